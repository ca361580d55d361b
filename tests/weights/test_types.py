"""Every type of experts from a file and back: written, described, read, sliced, stacked, moved."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk import MoELayer
from moe_mk.config import MoEConfig
from moe_mk.errors import ConfigError, WeightError
from moe_mk.experts.held import held_as
from moe_mk.lab.checkpoints import CheckpointShape
from moe_mk.lab.checkpoints.checkpoint_shape import FORMATS
from moe_mk.lab.verify.dense import decoded
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant import BF16, INT8_CHANNEL, MXFP4, NVFP4, BlockedScheme, QuantScheme, QuantTensor
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.kinds import KINDS, scheme_of_kind
from moe_mk.weights import LayerSpec, LayerWeights, MappingSource, SlotWeights, inspect_checkpoint, load_layer
from moe_mk.weights.expert_weights import ExpertWeights
from tests.weights.one_layer import load_written, wide

CPU = torch.device("cpu")
EXPERTS, HIDDEN, INNER = 4, 128, 256
SHAPE = CheckpointShape(EXPERTS, HIDDEN, INNER, layers=(1,), top_k=2, num_groups=2, top_k_groups=1)
QUANTISED = [quant for quant in FORMATS if quant in KINDS and quant != "bf16" and quant not in GROUPED]
PACKED = {quant: quant for quant in ("int4_g32", "int4_row", "int8_g64_zp", "int4_g128_zp")}
PACKED |= {"gptq": "int4_g128", "awq": "int4_g128_zp"}
"""Integers packed into words, with the kind that each is described as."""


@pytest.mark.row(101)
@pytest.mark.row(167)
@pytest.mark.parametrize("quant", [*QUANTISED, *PACKED])
def test_a_type_is_written_described_and_read(quant: str, written: Callable[[str], Path]) -> None:
    folder = written(quant)
    facts = inspect_checkpoint(folder)
    assert facts.sound, [*facts.problems, *facts.layers[0].problems]
    config, kind = MoEConfig.from_hf(folder), PACKED.get(quant, quant)
    scheme = scheme_of_kind(kind)
    assert config.model.quant.weights == facts.layers[0].kind == kind and config.model.quant.weight_scheme == scheme
    assert config.model.quant.shared == (facts.layers[0].shared or "same")
    assert (facts.layers[0].hidden_size, facts.layers[0].intermediate_size) == (HIDDEN, INNER)
    weights = load_written(folder)
    for matrix, q in zip(wide(weights.experts.slots[0]), three(weights.experts.slots[0]), strict=True):
        # Normals of a known size: a wrong scale, order or half of a byte would change it.
        gain = 1.7 if matrix.shape[1] == HIDDEN else 0.9
        assert float(matrix.std()) * matrix.shape[1] ** 0.5 == pytest.approx(gain, rel=0.5)
        assert torch.isfinite(matrix).all() and abs(float(matrix.mean())) < 0.01
        assert torch.equal(decoded(q).float(), matrix), "two decoders agree"
    matrices = 3 * (EXPERTS + 1) * scheme.num_bytes(INNER, HIDDEN)
    assert weights.shared is not None and weights.shared.up_IH.shape == (INNER, HIDDEN)
    if facts.layers[0].shared is None:
        assert weights.experts.num_bytes + sum(q.num_bytes for q in three(weights.shared)) <= matrices * 1.01


def three(slot: SlotWeights | None) -> list[QuantTensor]:
    assert slot is not None
    return [q for q in (slot.gate_IH, slot.up_IH, slot.down_HI) if q is not None]


@pytest.mark.parametrize("quant", [*QUANTISED, *PACKED])
def test_slices_of_tensor_parallel_ranks_are_the_whole(quant: str, written: Callable[[str], Path]) -> None:
    folder = written(quant)
    whole, halves = load_written(folder), [load_written(folder, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    for expert in range(EXPERTS):
        gate, up, down = wide(whole.experts.slots[expert])
        parts = [wide(half.experts.slots[expert]) for half in halves]
        assert torch.equal(torch.cat([part[0] for part in parts]), gate)
        assert torch.equal(torch.cat([part[1] for part in parts]), up)
        assert torch.equal(torch.cat([part[2] for part in parts], dim=1), down)


@pytest.mark.parametrize(
    "quant,size,legal", [("mxfp4", 16, "1, 2, 4, 8"), ("nvfp4", 32, "1, 2, 4, 8, 16"), ("gptq", 4, "1, 2")]
)
def test_a_slice_that_cuts_a_block_is_refused_with_the_sizes_that_do_not(
    quant: str, size: int, legal: str, written: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=rf"tp_size={size} cannot cut .*blocks; possible: {legal}$"):
        load_written(written(quant), tp_size=size)
    config = MoEConfig.from_hf(written(quant))
    with pytest.raises(ConfigError, match=rf"parallel\.tp={size} .*; possible: {legal}"):
        config.with_(tp=size)


@pytest.mark.parametrize("quant", QUANTISED)
def test_weights_held_in_another_form_leave_the_stored_ones_alone(quant: str, written: Callable[[str], Path]) -> None:
    stored = load_written(written(quant)).experts
    held = held_as(stored, scheme_of_kind("fp8_block", ue8m0=True))
    assert held.scheme.name == "fp8_128x128_ue8m0" and stored.scheme == scheme_of_kind(quant)
    for before, after in zip(wide(stored.slot(0)), wide(held.slot(0)), strict=True):
        moved = float((after - before).norm() / before.norm())
        assert moved == 0 if quant == "mxfp4" else moved < 1.5 * held.scheme.relative_rms
    assert held_as(stored, stored.scheme) is stored
    for both in ((stored.scheme, INT8_CHANNEL), (INT8_CHANNEL, stored.scheme)):  # down projections in one of their own
        slot = held_as(stored, *both).slot(0)
        assert (slot.up_IH.scheme, slot.down_HI.scheme) == both
    stack = ExpertWeights(BF16.quantize(torch.ones(2, 8, 4)), BF16.quantize(torch.ones(2, 4, 4)))
    assert (held_as(stack, INT8_CHANNEL, BF16).slot(1).down_HI.scheme, stack.w13.scheme) == (BF16, BF16)


# Layouts that others write.


def checkpoint(scheme: QuantScheme, names: Callable[[str, int], str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of two experts and what they mean, by projection and expert."""
    tensors, meant = {"gate.weight": torch.randn(2, 64, dtype=torch.float32)}, {}
    for e in range(2):
        for p, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
            draw = torch.Generator().manual_seed(7 * e + len(p))
            q = scheme.quantize(torch.randn(shape, generator=draw, dtype=torch.float32))
            assert q.scales is not None
            tensors[names(p, e)], tensors[names(p, e) + "_scale"] = q.values, q.scales
            if q.global_scale is not None:
                tensors[names(p, e) + "_scale_2"] = q.global_scale.reshape(())
                tensors[names(p, e).replace("weight", "input_scale")] = torch.tensor(0.5, dtype=torch.float32)
            meant[f"{p}{e}"] = q.dequantize(torch.float32)
    return tensors, meant


def read(tensors: dict[str, Tensor], scheme: QuantScheme) -> LayerWeights:
    spec = LayerSpec(2, 64, 96, scheme)
    return load_layer(MappingSource(tensors), 0, spec, owned=(0, 1), prefix="")


def official(p: str, e: int) -> str:
    return f"experts.{e}.{p}_proj.weight"


def test_deepseek_v4_names_with_fp4_in_signed_bytes_are_read() -> None:
    words = {"gate": "w1", "up": "w3", "down": "w2"}
    tensors, meant = checkpoint(MXFP4, lambda p, e: f"experts.{e}.{words[p]}.weight")
    signed = {n.replace("weight_scale", "scale"): t.view(torch.int8) if t.dtype is torch.uint8 else t
              for n, t in tensors.items()}  # fmt: skip
    for e, slot in enumerate(read(signed, MXFP4).experts.slots):
        assert all(map(torch.equal, wide(slot), (meant[f"{p}{e}"] for p in words)))


@pytest.mark.parametrize("scheme,bad", [(NVFP4, 0x00), (NVFP4, 0x7F), (MXFP4, 0xFF)], ids=str)
def test_scales_that_are_none_are_refused(scheme: BlockedScheme, bad: int) -> None:
    tensors, _ = checkpoint(scheme, official)
    tensors["experts.1.down_proj.weight_scale"].view(torch.uint8)[3, 1] = bad
    reported = r"1 scales are not finite and positive .*experts\.1\.down_proj\.weight_scale"
    with pytest.raises(WeightError, match=reported):
        read(tensors, scheme)


def test_a_missing_scale_above_the_scales_is_reported() -> None:
    tensors, _ = checkpoint(NVFP4, official)
    del tensors["experts.0.up_proj.weight_scale_2"]
    with pytest.raises(WeightError, match=r"expert 0 lacks experts\.0\.up_proj\.weight_scale_2"):
        read(tensors, NVFP4)


def test_every_type_has_a_scheme_and_unknown_ones_are_refused() -> None:
    assert len({scheme_of_kind(kind).name for kind in KINDS}) == len(KINDS) == 11
    with pytest.raises(ConfigError, match="no type of experts is called 'mxfp5'.*mxfp"):
        scheme_of_kind("mxfp5")


@pytest.mark.parametrize("quant", ["int8", "mxfp4", "nvfp4", "mxfp8"])
@torch.no_grad()
def test_packed_experts_move_to_another_placement_and_reload(quant: str, written: Callable[[str], Path]) -> None:
    folder = written(quant)
    layer = MoELayer(MoEConfig.from_hf(folder), dtype=torch.bfloat16).load_from_safetensors(folder, 1)
    x = torch.randn((9, HIDDEN), generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16()
    before = layer(x)
    layer.live.set_placement(ExpertMap.from_physical([3, 1, 0, 2], 1, EXPERTS))
    assert torch.equal(layer(x), before), "experts in another order give the same bits"
    layer.load_from_safetensors(folder, 1)
    assert torch.equal(layer(x), before)
