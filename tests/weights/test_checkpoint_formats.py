"""Formats of numbers in a checkpoint: scales of one byte, ragged blocks, bf16, biases of another dtype."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_mk.errors import CheckpointWarning, ConfigError, WeightError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.lab.checkpoints import write_checkpoint
from moe_mk.lab.checkpoints.like import tensors_of
from moe_mk.quant import BF16, FP16, NVFP4, weight_scheme
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.weights import CONVENTIONS, LayerSpec, MappingSource, SafetensorsSource, load_layer
from moe_mk.weights.input_scales import read_input_scales
from moe_mk.weights.inspect import describe_block
from moe_mk.weights.layer_spec import expected_tensors, unnamed_parts
from moe_mk.weights.names import Role
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


def test_blocks_of_a_fused_tensor_must_show_where_up_begins() -> None:
    """Of 2 x 40 rows in blocks of 16, six rows of scales are three of each half; five would span gate and up."""
    fp8, scales = torch.float8_e4m3fn, torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])

    def state(inner: int, tall: int) -> StateDict:
        held = {"gate_up_proj": (2 * inner, 64, tall, 4), "down_proj": (64, inner, 4, -(-inner // 16))}
        found = {"gate.weight": torch.ones(2, 64).bfloat16(), "gate.e_score_correction_bias": torch.zeros(2)}
        for name, (n, k, rows, columns) in held.items():
            found[f"experts.{name}"] = torch.ones((2, n, k)).to(fp8)
            found[f"experts.{name}_scale_inv"] = torch.ones((2, rows, columns))
        found["experts.gate_up_proj_scale_inv"] *= scales[:tall, None]
        return {PREFIX + name: tensor for name, tensor in found.items()}

    spec = LayerSpec(2, 64, 40, weight_scheme((16, 16)), has_gate_bias=True)
    slot = load(state(40, 6), spec, owned=[1]).experts.slot(0)
    assert slot.gate_IH is not None
    gate, up = (q.dequantize(torch.float32)[:, 0].tolist() for q in (slot.gate_IH, slot.up_IH))
    assert gate == [1.0] * 16 + [2.0] * 16 + [4.0] * 8 and up == [8.0] * 16 + [16.0] * 16 + [32.0] * 8
    with pytest.raises(WeightError, match=r"gate_up_proj_scale_inv is \[2, 5, 4\], expected \[2, 6, 4\]"):
        load(state(40, 5), spec, owned=[1])
    # 2 x 24 rows are three blocks that span, or four that do not; of 2 x 25 both are four.
    with pytest.raises(ConfigError, match="intermediate size 25 has 4 scale blocks of 16 rows, and their number does"):
        load(state(25, 4), replace(spec, intermediate_size=25), owned=[0])


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_plain_experts_of_another_dtype_are_read_in_the_stated_one(stored: torch.dtype) -> None:
    """Also where only some are; a number that the stated dtype cannot hold is reported with its tensor."""
    spec = LayerSpec(2, 64, 32, BF16, has_gate_bias=True)
    tensors = tensors_of(spec, CONVENTIONS["official"], seed=1)
    values = torch.linspace(-3, 3, 64 * 32).view(32, 64).to(stored)
    other = torch.float16 if stored is torch.float32 else torch.float32
    held = tensors | {"experts.1.up_proj.weight": values, "experts.1.down_proj.weight": torch.ones(64, 32, dtype=other)}
    with pytest.warns(CheckpointWarning) as caught:
        weights = load({PREFIX + name: t for name, t in held.items()}, spec, owned=[1])
    texts = " ".join(str(each.message) for each in caught)
    assert all(f"are {str(each)[6:]} and are rounded to bfloat16, the stated" in texts for each in (stored, other))
    assert torch.equal(weights.experts.slot(0).up_IH.values, values.bfloat16())
    half = replace(spec, scheme=FP16)
    held["experts.1.up_proj.weight"] = values.bfloat16() * 1e5
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(WeightError, match=r"infinite in 1 tensors: experts\.1\.up_proj\.weight"),
    ):
        load({PREFIX + name: t for name, t in held.items()}, half, owned=[1])


def test_a_bias_of_another_dtype_becomes_f32_and_no_tensor_is_changed(tiny: Shape, tiny_state: StateDict) -> None:
    name = f"{PREFIX}gate.e_score_correction_bias"
    tiny_state[name] = tiny_state[name].to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in tiny_state.items()}
    weights = load(tiny_state, tiny.layer_spec())
    assert weights.bias_E is not None
    assert weights.bias_E.dtype == torch.float32
    assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in tiny_state.items())


NAMED = [
    (kind, name, turned)
    for turned in (False, True)
    for kind in ("fp8_tensor", "fp8_channel", "nvfp4")
    for name, convention in CONVENTIONS.items()
    if (convention.stacked or convention.fused)
    and not convention.packing
    and not unnamed_parts(LayerSpec(2, 64, 32, scheme_of_kind(kind), stacks_transposed=turned), convention)
]


@pytest.mark.parametrize("kind,name,turned", NAMED)
def test_a_tensor_is_read_alike_in_each_shape_that_it_may_have(kind: str, name: str, turned: bool) -> None:
    """One value may stand for all experts: it is that of each."""
    spec = LayerSpec(2, 64, 32, scheme_of_kind(kind), stacks_transposed=turned)
    convention = CONVENTIONS[name]
    tensors = tensors_of(spec, convention, seed=1)
    for local, each in expected_tensors(spec, convention).items():
        if local not in tensors or each.part.role is not Role.EXPERT:
            continue
        for shape in each.also:
            whole, one = tensors[local], tensors[local].reshape(-1)[0]
            if math.prod(shape) not in (1, whole.numel()):
                continue
            same = math.prod(shape) == whole.numel()
            whole = whole if same else one.expand(whole.shape).contiguous()
            other = whole.reshape(shape) if same else one.reshape(shape)
            found = []
            for tensor in (whole, other):
                given = {PREFIX + key: t for key, t in (tensors | {local: tensor}).items()}
                found.append(load(given, spec, owned=range(2)).experts)
            for index in range(2):
                pairs = zip(found[0].slot(index).matrices.values(), found[1].slot(index).matrices.values(), strict=True)
                assert all(torch.equal(*(q.dequantize(torch.float32) for q in pair)) for pair in pairs), (local, shape)


@pytest.mark.parametrize("down", [None, "mxfp4"])
@pytest.mark.parametrize("shared", [None, "fp16"])
def test_shared_experts_have_the_formats_of_the_routed_ones_unless_theirs_is_stated(
    down: str | None, shared: str | None
) -> None:
    of = {name: None if name is None else scheme_of_kind(name) for name in (down, shared)}
    spec = LayerSpec(2, 64, 32, BF16, 1, 32, down_scheme=of[down], shared_scheme=of[shared])
    for projection in ("gate", "up", "gate_up", "down"):
        routed = of[down] if projection == "down" and down else BF16
        assert spec.scheme_of(Role.EXPERT, projection) is routed
        assert spec.scheme_of(Role.SHARED, projection) is (of[shared] or routed)
