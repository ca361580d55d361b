"""Formats of numbers in a checkpoint: scales of one byte, ragged blocks, bf16, biases of another dtype."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_mk.errors import ConfigError, WeightError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.lab.checkpoints import write_checkpoint
from moe_mk.lab.checkpoints.like import tensors_of
from moe_mk.quant import BF16, NVFP4, weight_scheme
from moe_mk.weights import CONVENTIONS, LayerSpec, MappingSource, SafetensorsSource, load_layer
from moe_mk.weights.input_scales import read_input_scales
from moe_mk.weights.inspect import describe_block
from tests.weights.one_layer import PREFIX, StateDict, load


@pytest.mark.row(97)
def test_power_of_two_scales_are_read_from_either_dtype_into_either(tiny_state: StateDict, tiny: Shape) -> None:
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
def test_scales_that_are_no_powers_of_two_cannot_become_ue8m0(tiny: Shape, tiny_state: StateDict) -> None:
    spec = replace(tiny.layer_spec(), scheme=weight_scheme((16, 16), ue8m0=True))
    with pytest.raises(WeightError, match=r"\d+ scales are no power of two, as UE8M0 needs, in 15 tensors"):
        load(tiny_state, spec)


@pytest.mark.row(96)
def test_blocks_may_be_ragged_at_both_edges(tmp_path: Path) -> None:
    shape = Shape(num_experts=2, hidden_size=200, intermediate_size=130, top_k=1, num_groups=1, top_k_groups=1)
    write_checkpoint(tmp_path, shape)
    slot = load_layer(SafetensorsSource(tmp_path), 3, shape.layer_spec(), owned=[1]).experts.slot(0)
    assert slot.down_HI.scales is not None
    assert (slot.down_HI.shape, slot.down_HI.scales.shape) == ((200, 130), (2, 2))
    dense = slot.down_HI.dequantize(torch.float32)
    assert 0.5 < dense.std().item() * 130**0.5 < 1.5
    with pytest.raises(ConfigError, match="tp_size=2 .* 130 at the edges of 128x128 blocks; possible: 1$"):
        load_layer(SafetensorsSource(tmp_path), 3, shape.layer_spec(), owned=[1], tp_size=2)


def test_factors_that_are_divided_by_are_those_that_are_multiplied() -> None:
    """compressed-tensors stores 1 / scale of NVFP4 where modelopt stores the scale."""
    spec = LayerSpec(2, 64, 32, NVFP4, 1, 32, shared_scheme=BF16)
    theirs = tensors_of(spec, CONVENTIONS["packed"], seed=1)
    ours = {
        name.replace("_packed", "").replace("weight_global_scale", "weight_scale_2").replace("_global", ""):
        1 / tensor if "global_scale" in name else tensor for name, tensor in theirs.items()
    }  # fmt: skip
    assert "experts.0.up_proj.weight_scale_2" in ours and "shared_experts.up_proj.weight" in theirs
    found = []
    for tensors in (theirs, ours):
        source = MappingSource(tensors)
        assert describe_block(source, "", None, {}).layer_spec() == replace(spec, has_gate_bias=False)
        weights = load_layer(source, 0, spec, owned=[1], prefix="")
        scales = read_input_scales(source, 0, prefix="")
        assert scales is not None and weights.shared is not None and weights.shared.up_IH.scheme == BF16
        found.append((weights.experts.slot(0).down_HI.dequantize(torch.float32), torch.tensor(scales.tokens)))
    torch.testing.assert_close(*found)


def test_a_fused_tensor_whose_blocks_span_gate_and_up_is_refused() -> None:
    state = {"model.layers.3.mlp.experts.gate_up_proj": torch.zeros((2, 48, 64), dtype=torch.float8_e4m3fn)}
    with pytest.raises(ConfigError, match="gate_up_proj of intermediate size 24 has scale blocks of 16 rows"):
        load(state, LayerSpec(2, 64, 24, weight_scheme((16, 16))), owned=[0])


def test_a_bias_of_another_dtype_becomes_f32_and_no_tensor_is_changed(tiny: Shape, tiny_state: StateDict) -> None:
    name = f"{PREFIX}gate.e_score_correction_bias"
    tiny_state[name] = tiny_state[name].to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in tiny_state.items()}
    weights = load(tiny_state, tiny.layer_spec())
    assert weights.bias_E is not None
    assert weights.bias_E.dtype == torch.float32
    assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in tiny_state.items())
