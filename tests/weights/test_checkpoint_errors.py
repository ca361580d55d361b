"""What is wrong with the tensors of a layer, all of it at once, before anything is served."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_mk.errors import ConfigError, WeightError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.quant import BF16
from moe_mk.weights import LayerSpec, MappingSource, SafetensorsSource, load_layer
from tests.weights.one_layer import ALL, PREFIX, StateDict, load


def test_owned_experts_out_of_range_are_refused(tiny: Shape, tiny_state: StateDict) -> None:
    with pytest.raises(ConfigError, match=r"2 owned experts are not in 0..3: 4, -1"):
        load(tiny_state, tiny.layer_spec(), owned=[4, 0, -1])


def test_missing_half_filled_and_unexpected_are_reported_together(tiny: Shape, tiny_state: StateDict) -> None:
    for name in [name for name in tiny_state if ".experts.0." in name]:
        del tiny_state[name]
    del tiny_state[f"{PREFIX}experts.2.up_proj.weight_scale_inv"]
    for name in [name for name in tiny_state if ".experts.3." in name and not name.endswith("gate_proj.weight")]:
        del tiny_state[name]
    del tiny_state[f"{PREFIX}gate.e_score_correction_bias"]
    tiny_state[f"{PREFIX}shared_expert_gate.weight"] = torch.zeros(1)
    tiny_state["model.layers.4.mlp.gate.weight"] = torch.zeros(1)  # another layer's business
    with pytest.raises(WeightError) as caught:
        load(tiny_state, tiny.layer_spec(), owned=[1])
    lines = str(caught.value).splitlines()
    assert lines == [
        "layer 3 of the state dict (official names under 'model.layers.3.mlp.') cannot be loaded:",
        "  - 1 of 4 experts are missing: 0",
        "  - 2 experts are half filled: expert 2 lacks experts.2.up_proj.weight_scale_inv; "
        "expert 3 lacks experts.3.gate_proj.weight_scale_inv, experts.3.up_proj.weight, "
        "experts.3.up_proj.weight_scale_inv, experts.3.down_proj.weight, experts.3.down_proj.weight_scale_inv",
        "  - 1 tensors are missing: gate.e_score_correction_bias",
        "  - 1 tensors are unexpected: shared_expert_gate.weight "
        "(a gate of the shared experts; set model.shared_gate = true)",
    ]


def test_more_experts_than_expected_are_unexpected_with_a_hint(tiny: Shape, tiny_state: StateDict) -> None:
    complaint = r"12 tensors are unexpected: .*7 more \(experts up to 3 where 2 are expected"
    with pytest.raises(WeightError, match=complaint):
        load(tiny_state, replace(tiny.layer_spec(), num_experts=2), owned=[0])


def test_a_spec_without_shared_experts_bias_or_scales_states_what_it_did_not_expect(
    tiny: Shape, tiny_state: StateDict
) -> None:
    with pytest.raises(WeightError, match=r"shared experts where fewer .*; a gate bias where .*; scales where plain"):
        load(tiny_state, LayerSpec(4, 64, 32, BF16))


def test_wrong_shapes_and_dtypes_are_reported_together(tiny: Shape, tiny_state: StateDict) -> None:
    tiny_state[f"{PREFIX}experts.1.up_proj.weight"] = torch.zeros((64, 32), dtype=torch.float8_e4m3fn)
    tiny_state[f"{PREFIX}experts.2.up_proj.weight_scale_inv"] = torch.ones((2, 3))
    tiny_state[f"{PREFIX}experts.0.gate_proj.weight"] = torch.zeros((32, 64), dtype=torch.bfloat16)
    tiny_state[f"{PREFIX}gate.weight"] = torch.zeros((4, 64), dtype=torch.int32)
    with pytest.raises(WeightError) as caught:
        load(tiny_state, tiny.layer_spec())
    reported = str(caught.value)
    assert "2 tensors are of a wrong shape: experts.1.up_proj.weight is [64, 32], expected [32, 64], " in reported
    assert "experts.2.up_proj.weight_scale_inv is [2, 3], expected [2, 4]" in reported
    assert "2 tensors are of a wrong dtype: gate.weight is I32, expected bfloat16 or float16 or float32, " in reported
    assert "experts.0.gate_proj.weight is BF16, expected float8_e4m3fn" in reported


def test_experts_of_other_ranks_are_not_examined(tiny: Shape, tiny_state: StateDict) -> None:
    tiny_state[f"{PREFIX}experts.1.up_proj.weight"] = torch.zeros((1, 1))
    assert load(tiny_state, tiny.layer_spec(), owned=[0, 2, 3]).experts.num_slots == 3


def test_nan_codes_and_broken_scales_are_counted_with_five_examples(tiny: Shape, tiny_state: StateDict) -> None:
    for expert in ALL:
        for projection in ("gate", "up"):
            codes = tiny_state[f"{PREFIX}experts.{expert}.{projection}_proj.weight"].view(torch.uint8)
            codes[0, 0], codes[31, 63] = 0x7F, 0xFF
    tiny_state[f"{PREFIX}experts.3.down_proj.weight_scale_inv"][1, 1] = 0.0
    tiny_state[f"{PREFIX}experts.3.up_proj.weight_scale_inv"][0, 0] = float("inf")
    tiny_state[f"{PREFIX}gate.weight"][3, 5] = float("nan")
    with pytest.raises(WeightError) as caught:
        load(tiny_state, tiny.layer_spec())
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("is damaged:")
    start = "  - 17 values are NaN or infinite in 9 tensors: gate.weight (1), experts.0.gate_proj.weight (2)"
    assert lines[1].startswith(start)
    assert lines[1].endswith(" and 4 more; the first is gate.weight[3, 5] = nan")
    start = "  - 2 scales are not finite and positive in 2 tensors: experts.3.up_proj.weight_scale_inv (1)"
    assert lines[2].startswith(start)
    assert lines[2].endswith("; the first is experts.3.up_proj.weight_scale_inv[0, 0] = inf")


def test_nan_codes_of_another_tensor_parallel_rank_do_not_matter(tiny: Shape, tiny_state: StateDict) -> None:
    tiny_state[f"{PREFIX}experts.0.down_proj.weight"].view(torch.uint8)[5, 20] = 0xFF
    load(tiny_state, tiny.layer_spec(), tp_rank=0, tp_size=2)
    complaint = r"1 values are NaN or infinite in 1 tensors: experts.0.down_proj.weight \(1\)"
    with pytest.raises(WeightError, match=complaint):
        load(tiny_state, tiny.layer_spec(), tp_rank=1, tp_size=2)


def test_a_truncated_shard_is_reported_before_anything_is_read(
    tiny: Shape, tiny_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_directory, tmp_path / "cut")
    shards = sorted((tmp_path / "cut").glob("*.safetensors"))
    os.truncate(shards[-1], shards[-1].stat().st_size - 1)
    shards[0].unlink()
    with pytest.raises(
        WeightError, match=rf"{shards[0].name} is named by the index but does not exist in \S+cut \("
    ) as cut:
        load_layer(SafetensorsSource(tmp_path / "cut"), 3, tiny.layer_spec(), owned=ALL)
    assert "1 tensors are cut off, their file is truncated: " in str(cut.value) and "lacks 1 of " in str(cut.value)


def test_a_layer_without_experts_names_the_layers_that_have_them(tiny: Shape, tiny_state: StateDict) -> None:
    for layer in (4, 5, 9):
        tiny_state[f"model.layers.{layer}.mlp.experts.0.up_proj.weight"] = torch.zeros(1)
    with pytest.raises(WeightError, match=r"has no experts for layer 0; layers with experts: 3-5, 9$"):
        load_layer(MappingSource(tiny_state), 0, tiny.layer_spec(), owned=ALL)
    with pytest.raises(WeightError, match=r"no name has a part 'experts\.' under a layer number; pass prefix="):
        load_layer(MappingSource({"gate.weight": torch.zeros(1)}), 0, tiny.layer_spec(), owned=ALL)
    tiny_state["vision.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(1)
    complaint = r"has 2 MoE blocks for layer 3: 'model.layers.3.mlp.', 'vision.*; pass prefix="
    with pytest.raises(WeightError, match=complaint):
        load(tiny_state, tiny.layer_spec())


@pytest.mark.parametrize("change, words", [
    ({"num_experts": 0}, "num_experts=0 must be at least 1"),
    ({"num_shared_experts": 0}, "num_shared_experts=0 and shared_intermediate_size=32 must both"),
    ({"gate_up_order": "w3_w1"}, "gate_up_order='w3_w1' must be one of gate_up, up_gate, interleaved"),
])  # fmt: skip
def test_a_spec_that_cannot_be_is_refused(tiny: Shape, change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(tiny.layer_spec(), **change)
