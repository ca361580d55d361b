"""Loading one layer: only what is owned, in any naming convention, or an error that lists all that is wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_mk.errors import ConfigError, WeightError
from moe_mk.quant import BF16, FP8_128x128, QuantTensor, weight_scheme
from moe_mk.weights import (
    CheckpointShape,
    LayerSpec,
    LayerWeights,
    MappingSource,
    SafetensorsSource,
    load_layer,
    write_checkpoint,
)

PREFIX = "model.layers.3.mlp."
ALL = range(4)
CONVENTIONS = ["official", "fused", "mixtral", "converted"]
StateDict = dict[str, Tensor]


def same(one: QuantTensor | None, values: Tensor, scales: Tensor | None) -> bool:
    """Whether values and scales are the given ones, bit for bit."""
    assert one is not None
    bits = torch.equal(one.values.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8))
    return bits and (
        one.scales is None if scales is None else one.scales is not None and torch.equal(one.scales, scales)
    )


def load(state: StateDict, spec: LayerSpec, **options) -> LayerWeights:
    return load_layer(MappingSource(state), 3, spec, **{"owned": ALL, **options})


def test_a_layer_comes_from_disk_as_it_was_written(
    tiny: CheckpointShape, tiny_directory: Path, tiny_state: StateDict
) -> None:
    weights = load_layer(SafetensorsSource(tiny_directory), 3, tiny.layer_spec(), owned=ALL)
    assert torch.equal(weights.gate_EH, tiny_state[PREFIX + "gate.weight"])
    assert weights.bias_E is not None
    assert torch.equal(weights.bias_E, tiny_state[PREFIX + "gate.e_score_correction_bias"])
    for expert in ALL:
        slot = weights.experts.slot(expert)
        for q, name in ((slot.gate_IH, "gate_proj"), (slot.up_IH, "up_proj"), (slot.down_HI, "down_proj")):
            stem = f"{PREFIX}experts.{expert}.{name}."
            assert same(q, tiny_state[stem + "weight"], tiny_state[stem + "weight_scale_inv"])
    assert weights.shared is not None
    stem = f"{PREFIX}shared_experts.down_proj."
    assert same(weights.shared.down_HI, tiny_state[stem + "weight"], tiny_state[stem + "weight_scale_inv"])


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_all_conventions_name_the_same_weights(
    tiny: CheckpointShape, renamed: Callable[[str], StateDict], convention: str
) -> None:
    official = load(renamed("official"), tiny.layer_spec(), owned=[2, 0])
    other = load(renamed(convention), tiny.layer_spec(), owned=[2, 0])
    assert other.facts.convention == convention
    assert torch.equal(other.gate_EH, official.gate_EH)
    assert other.bias_E is not None and official.bias_E is not None
    assert torch.equal(other.bias_E, official.bias_E)
    assert other.shared is not None and official.shared is not None
    for one, two in zip([*other.experts.slots, other.shared], [*official.experts.slots, official.shared], strict=True):
        assert two.gate_IH is not None
        assert two.gate_IH.scales is not None
        assert same(one.gate_IH, two.gate_IH.values, two.gate_IH.scales)
        assert same(one.up_IH, two.up_IH.values, two.up_IH.scales)
        assert same(one.down_HI, two.down_HI.values, two.down_HI.scales)


@pytest.mark.parametrize("prefix", ["", "mlp.", "model.layers.{N}.mlp."])
def test_the_caller_may_say_what_stands_before_the_names(
    tiny: CheckpointShape, tiny_state: StateDict, prefix: str
) -> None:
    bare = prefix.replace("{N}", "3")
    state = {bare + name.removeprefix(PREFIX): tensor for name, tensor in tiny_state.items()}
    weights = load(state, tiny.layer_spec(), prefix=prefix)
    assert weights.facts.prefix == bare
    assert weights.experts.num_slots == 4


def test_only_owned_experts_are_opened(
    tiny: CheckpointShape, tiny_state: StateDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    source = MappingSource(tiny_state)
    monkeypatch.setattr(source, "open", lambda name: opened.append(name) or tiny_state[name])
    weights = load_layer(source, 3, tiny.layer_spec(), owned=[1])
    assert {name.split(".")[5] for name in opened if ".experts." in name} == {"1"}
    assert weights.facts.names == tuple(opened)
    # 4 x 64 bf16 gate, 4 f32 biases, and two experts (one shared) of three 32 x 64 matrices with 2 x 4 f32 scales
    assert weights.facts.bytes_read == 512 + 16 + 2 * 3 * (2048 + 32) == weights.num_bytes


def test_slots_follow_the_order_asked_for_and_replicas_share_memory(
    tiny: CheckpointShape, tiny_state: StateDict
) -> None:
    weights = load(tiny_state, tiny.layer_spec(), owned=[3, 1, 3])
    assert weights.facts.owned == (3, 1, 3)
    first, middle, last = weights.experts.slots
    assert first.up_IH.values.data_ptr() == last.up_IH.values.data_ptr() != middle.up_IH.values.data_ptr()
    assert same(first.up_IH, tiny_state[f"{PREFIX}experts.3.up_proj.weight"], first.up_IH.scales)


def test_a_rank_without_experts_still_gets_gate_and_shared_experts(
    tiny: CheckpointShape, tiny_state: StateDict
) -> None:
    weights = load(tiny_state, tiny.layer_spec(), owned=[])
    assert weights.experts.num_slots == 0
    assert weights.shared is not None


def test_nothing_is_copied_from_the_mapped_file(tiny: CheckpointShape, tiny_directory: Path) -> None:
    source = SafetensorsSource(tiny_directory)
    slot = load_layer(source, 3, tiny.layer_spec(), owned=[2], tp_rank=1, tp_size=2).experts.slot(0)
    whole = source.open(f"{PREFIX}experts.2.up_proj.weight")
    assert slot.up_IH.values.data_ptr() == whole.data_ptr() + 16 * 64


@pytest.mark.parametrize("convention", ["official", "fused"])
def test_tensor_parallel_ranks_get_rows_of_gate_and_up_and_columns_of_down(
    tiny: CheckpointShape, renamed: Callable[[str], StateDict], convention: str
) -> None:
    whole = load(renamed("official"), tiny.layer_spec())
    parts = [load(renamed(convention), tiny.layer_spec(), tp_rank=rank, tp_size=2) for rank in (0, 1)]
    for get in (lambda w: w.experts.slot(3), lambda w: w.shared):
        one, left, right = (get(weights) for weights in (whole, *parts))
        for q, axis in (("gate_IH", 0), ("up_IH", 0), ("down_HI", 1)):
            pieces = [getattr(half, q) for half in (left, right)]
            values = torch.cat([piece.values.view(torch.uint8) for piece in pieces], dim=axis)
            scales = torch.cat([piece.scales for piece in pieces], dim=axis)
            assert same(getattr(one, q), values, scales), q
    assert parts[0].facts.bytes_read == 512 + 16 + 5 * 3 * (1024 + 16)


def test_a_slice_inside_a_scale_block_is_refused_with_the_sizes_that_are_possible(
    tiny: CheckpointShape, tiny_state: StateDict
) -> None:
    with pytest.raises(ConfigError, match=r"tp_size=4 cannot cut .* 32 at the edges of 16x16 blocks; possible: 1, 2$"):
        load(tiny_state, tiny.layer_spec(), tp_rank=0, tp_size=4)
    with pytest.raises(ConfigError, match=r"tp_rank=2 is not in 0..1"):
        load(tiny_state, tiny.layer_spec(), tp_rank=2, tp_size=2)
    v3 = LayerSpec(256, 7168, 2048, FP8_128x128, 1, 2048)
    assert v3.legal_tp_sizes() == [1, 2, 4, 8, 16]
    assert replace(v3, scheme=BF16, intermediate_size=12, shared_intermediate_size=8).legal_tp_sizes() == [1, 2, 4]


def test_owned_experts_out_of_range_are_refused(tiny: CheckpointShape, tiny_state: StateDict) -> None:
    with pytest.raises(ConfigError, match=r"2 owned experts are not in 0..3: 4, -1"):
        load(tiny_state, tiny.layer_spec(), owned=[4, 0, -1])


def test_the_other_order_of_a_fused_tensor_is_turned_round_once(
    tiny: CheckpointShape, renamed: Callable[[str], StateDict]
) -> None:
    state = renamed("fused")
    for ending in ("", "_scale_inv"):
        name = f"{PREFIX}experts.gate_up_proj{ending}"
        half = state[name].shape[1] // 2
        state[name] = torch.cat((state[name][:, half:], state[name][:, :half]), dim=1)
    slot = load(state, replace(tiny.layer_spec(), gate_up_order="up_gate")).experts.slot(1)
    official = load(renamed("official"), tiny.layer_spec()).experts.slot(1)
    assert official.gate_IH is not None
    assert same(slot.gate_IH, official.gate_IH.values, official.gate_IH.scales)
    assert same(slot.up_IH, official.up_IH.values, official.up_IH.scales)
    with pytest.raises(ConfigError, match="official names tell them apart"):
        load(renamed("official"), replace(tiny.layer_spec(), gate_up_order="up_gate"))


def test_missing_half_filled_and_unexpected_are_told_together(tiny: CheckpointShape, tiny_state: StateDict) -> None:
    for name in [name for name in tiny_state if ".experts.0." in name]:
        del tiny_state[name]
    del tiny_state[f"{PREFIX}experts.2.up_proj.weight_scale_inv"]
    del tiny_state[f"{PREFIX}experts.3.down_proj.weight"]
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
        "expert 3 lacks experts.3.down_proj.weight",
        "  - 1 tensors are missing: gate.e_score_correction_bias",
        "  - 1 tensors are unexpected: shared_expert_gate.weight",
    ]


def test_more_experts_than_expected_are_unexpected_with_a_hint(tiny: CheckpointShape, tiny_state: StateDict) -> None:
    with pytest.raises(
        WeightError, match=r"12 tensors are unexpected: .*7 more \(experts up to 3 where 2 are expected"
    ):
        load(tiny_state, replace(tiny.layer_spec(), num_experts=2), owned=[0])


def test_a_spec_without_shared_experts_bias_or_scales_says_what_it_did_not_expect(
    tiny: CheckpointShape, tiny_state: StateDict
) -> None:
    with pytest.raises(WeightError, match=r"shared experts where fewer .*; a gate bias where .*; scales where plain"):
        load(tiny_state, LayerSpec(4, 64, 32, BF16))


def test_wrong_shapes_and_dtypes_are_told_together(tiny: CheckpointShape, tiny_state: StateDict) -> None:
    tiny_state[f"{PREFIX}experts.1.up_proj.weight"] = torch.zeros((64, 32), dtype=torch.float8_e4m3fn)
    tiny_state[f"{PREFIX}experts.2.up_proj.weight_scale_inv"] = torch.ones((2, 3))
    tiny_state[f"{PREFIX}experts.0.gate_proj.weight"] = torch.zeros((32, 64), dtype=torch.bfloat16)
    tiny_state[f"{PREFIX}gate.weight"] = torch.zeros((4, 64), dtype=torch.int32)
    with pytest.raises(WeightError) as caught:
        load(tiny_state, tiny.layer_spec())
    told = str(caught.value)
    assert "2 tensors are of a wrong shape: experts.1.up_proj.weight is [64, 32], expected [32, 64], " in told
    assert "experts.2.up_proj.weight_scale_inv is [2, 3], expected [2, 4]" in told
    assert "2 tensors are of a wrong dtype: gate.weight is I32, expected bfloat16 or float16 or float32, " in told
    assert "experts.0.gate_proj.weight is BF16, expected float8_e4m3fn" in told


def test_experts_of_other_ranks_are_not_examined(tiny: CheckpointShape, tiny_state: StateDict) -> None:
    tiny_state[f"{PREFIX}experts.1.up_proj.weight"] = torch.zeros((1, 1))
    assert load(tiny_state, tiny.layer_spec(), owned=[0, 2, 3]).experts.num_slots == 3


def test_nan_codes_and_broken_scales_are_counted_with_five_examples(
    tiny: CheckpointShape, tiny_state: StateDict
) -> None:
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
    assert lines[1].startswith(
        "  - 17 values are NaN or infinite in 9 tensors: gate.weight (1), experts.0.gate_proj.weight (2)"
    )
    assert lines[1].endswith(" and 4 more")
    assert lines[2].startswith(
        "  - 2 scales are not finite and positive in 2 tensors: experts.3.up_proj.weight_scale_inv (1)"
    )


def test_nan_codes_of_another_tensor_parallel_rank_do_not_matter(tiny: CheckpointShape, tiny_state: StateDict) -> None:
    tiny_state[f"{PREFIX}experts.0.down_proj.weight"].view(torch.uint8)[5, 20] = 0xFF
    load(tiny_state, tiny.layer_spec(), tp_rank=0, tp_size=2)
    with pytest.raises(
        WeightError, match=r"1 values are NaN or infinite in 1 tensors: experts.0.down_proj.weight \(1\)"
    ):
        load(tiny_state, tiny.layer_spec(), tp_rank=1, tp_size=2)


def test_a_truncated_shard_is_told_before_anything_is_read(
    tiny: CheckpointShape, tiny_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_directory, tmp_path / "cut")
    shards = sorted((tmp_path / "cut").glob("*.safetensors"))
    os.truncate(shards[-1], shards[-1].stat().st_size - 1)
    shards[0].unlink()
    with pytest.raises(WeightError) as caught:
        load_layer(SafetensorsSource(tmp_path / "cut"), 3, tiny.layer_spec(), owned=ALL)
    told = str(caught.value)
    assert f"{shards[0].name} is named by the index but does not exist (" in told
    assert "1 tensors are cut off, their file is truncated: " in told
    assert "lacks 1 of " in told


def test_a_layer_without_experts_names_the_layers_that_have_them(tiny: CheckpointShape, tiny_state: StateDict) -> None:
    for layer in (4, 5, 9):
        tiny_state[f"model.layers.{layer}.mlp.experts.0.up_proj.weight"] = torch.zeros(1)
    with pytest.raises(WeightError, match=r"has no experts for layer 0; layers with experts: 3-5, 9$"):
        load_layer(MappingSource(tiny_state), 0, tiny.layer_spec(), owned=ALL)
    with pytest.raises(WeightError, match=r"no name has a part 'experts\.' under a layer number; pass prefix="):
        load_layer(MappingSource({"gate.weight": torch.zeros(1)}), 0, tiny.layer_spec(), owned=ALL)
    tiny_state["vision.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(1)
    with pytest.raises(
        WeightError, match=r"has 2 MoE blocks for layer 3: 'model.layers.3.mlp.', 'vision.*; pass prefix="
    ):
        load(tiny_state, tiny.layer_spec())


@pytest.mark.row(97)
def test_power_of_two_scales_are_read_from_either_dtype_into_either(
    tiny_state: StateDict, tiny: CheckpointShape
) -> None:
    for name in tiny_state:
        if name.endswith("scale_inv"):
            tiny_state[name] = torch.exp2(torch.log2(tiny_state[name]).ceil())
    as_bytes = {n: t.to(torch.float8_e8m0fnu) if n.endswith("scale_inv") else t for n, t in tiny_state.items()}
    one_byte = replace(tiny.layer_spec(), scheme=weight_scheme((16, 16), ue8m0=True))
    expected = tiny_state[f"{PREFIX}experts.1.down_proj.weight_scale_inv"]
    for state in (tiny_state, as_bytes):
        for spec in (tiny.layer_spec(), one_byte):
            scales = load(state, spec).experts.slot(1).down_HI.scales
            assert scales is not None
            assert scales.dtype == spec.scheme.scale_dtype
            assert torch.equal(scales.to(torch.float32), expected)


@pytest.mark.row(97)
def test_scales_that_are_no_powers_of_two_cannot_become_ue8m0(tiny: CheckpointShape, tiny_state: StateDict) -> None:
    spec = replace(tiny.layer_spec(), scheme=weight_scheme((16, 16), ue8m0=True))
    with pytest.raises(WeightError, match=r"\d+ scales are no power of two, as UE8M0 needs, in 15 tensors"):
        load(tiny_state, spec)


@pytest.mark.row(96)
def test_blocks_may_be_ragged_at_both_edges(tmp_path: Path) -> None:
    shape = CheckpointShape(
        num_experts=2, hidden_size=200, intermediate_size=130, top_k=1, num_groups=1, top_k_groups=1
    )
    write_checkpoint(tmp_path, shape)
    slot = load_layer(SafetensorsSource(tmp_path), 3, shape.layer_spec(), owned=[1]).experts.slot(0)
    assert slot.down_HI.scales is not None
    assert (slot.down_HI.shape, slot.down_HI.scales.shape) == ((200, 130), (2, 2))
    dense = slot.down_HI.dequantize(torch.float32)
    assert 0.5 < dense.std().item() * 130**0.5 < 1.5
    with pytest.raises(ConfigError, match="tp_size=2 .* 130 at the edges of 128x128 blocks; possible: 1$"):
        load_layer(SafetensorsSource(tmp_path), 3, shape.layer_spec(), owned=[1], tp_size=2)


def test_a_fused_tensor_whose_blocks_span_gate_and_up_is_refused() -> None:
    state = {"model.layers.3.mlp.experts.gate_up_proj": torch.zeros((2, 48, 64), dtype=torch.float8_e4m3fn)}
    with pytest.raises(ConfigError, match="gate_up_proj of intermediate size 24 has scale blocks of 16 rows"):
        load(state, LayerSpec(2, 64, 24, weight_scheme((16, 16))), owned=[0])


def test_bf16_checkpoints_load_as_they_are(tmp_path: Path, tiny: CheckpointShape) -> None:
    shape = replace(tiny, quant="bf16")
    write_checkpoint(tmp_path, shape)
    weights = load_layer(SafetensorsSource(tmp_path), 3, shape.layer_spec(), owned=ALL, tp_rank=1, tp_size=4)
    assert weights.experts.scheme == BF16
    assert weights.experts.slot(0).down_HI.values.dtype == torch.bfloat16
    assert weights.experts.slot(0).down_HI.shape == (64, 8)


def test_a_bias_of_another_dtype_becomes_f32_and_no_tensor_is_changed(
    tiny: CheckpointShape, tiny_state: StateDict
) -> None:
    name = f"{PREFIX}gate.e_score_correction_bias"
    tiny_state[name] = tiny_state[name].to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in tiny_state.items()}
    weights = load(tiny_state, tiny.layer_spec())
    assert weights.bias_E is not None
    assert weights.bias_E.dtype == torch.float32
    assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in tiny_state.items())


def test_progress_ends_at_all_bytes_of_weights(tiny: CheckpointShape, tiny_directory: Path) -> None:
    told: list[tuple[str, int, int]] = []
    source = SafetensorsSource(tiny_directory)
    load_layer(source, 3, tiny.layer_spec(), owned=ALL, on_progress=lambda *said: told.append(said))
    assert {what for what, _, _ in told} == {"check"}
    assert told[-1][1] == told[-1][2] == 512 + 16 + 5 * 3 * 2048


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_experts": 0}, "num_experts=0 must be at least 1"),
        ({"num_shared_experts": 0}, "num_shared_experts=0 and shared_intermediate_size=32 must both"),
        ({"gate_up_order": "w3_w1"}, "gate_up_order='w3_w1' must be one of gate_up, up_gate, interleaved"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(tiny: CheckpointShape, change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(tiny.layer_spec(), **change)


def test_a_file_written_by_the_safetensors_library_loads_too(
    tiny: CheckpointShape, tiny_state: StateDict, tmp_path: Path
) -> None:
    save_file(tiny_state, tmp_path / "model.safetensors")
    weights = load_layer(SafetensorsSource(tmp_path / "model.safetensors"), 3, tiny.layer_spec(), owned=ALL)
    assert torch.equal(weights.gate_EH, tiny_state[PREFIX + "gate.weight"])
