"""Biases, clamped SwiGLU, experts of several sizes, on tiny shapes; run by test_interpreted.py (TRITON_INTERPRET=1)."""

from dataclasses import replace

import pytest
import torch

from moe_mk import UnsupportedError
from moe_mk.config.tuned import Tuned
from moe_mk.experts.base import ExpertsContext
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.experts.triton import weights as triton_weights
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.testing.experts import _poisoned, random_experts
from moe_mk.lab.testing.limits import require_close
from moe_mk.oracle.expected_error import experts_error
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant import BF16, FP32, FP8_1x128, FP8_128x128, QuantScheme
from moe_mk.quant.int8 import INT8_CHANNEL, INT8_TOKEN
from moe_mk.quant.microscaling import MXFP4
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import BatchedTokens, GroupedTokens, OutputStage, RowTokens
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotBiases, SlotWeights
from moe_mk.weights.layer_weights import as_mapped
from moe_mk.weights.slices import narrow_rows
from tests.kernels.triton.interpreted_experts import CPU, HIDDEN, IDS, INNER, SLOTS, context, rows

CLAMPS = {"silu": {}, "swiglu_limit": {"swiglu_limit": 0.7}, "swiglu_oai": {"swiglu_limit": 0.9, "swiglu_alpha": 1.702}}
"""Limits that some of the sums are beyond, on either side."""


def clamped(activation: str, compute: QuantScheme = BF16) -> ExpertsContext:
    return replace(context(compute, activation), **CLAMPS[activation])


def experts(
    scheme: QuantScheme, *, slots: int = SLOTS, biases: bool = True, gated: bool = True, inner: int = INNER
) -> MappedExpertWeights:
    """Biases in bf16, as checkpoints have them, of the size of the sums they are added to."""
    draw = torch.Generator().manual_seed(8)

    def with_biases(slot: SlotWeights) -> SlotWeights:
        gate, up, down = (torch.randn(n, generator=draw).bfloat16() for n in (inner, inner, HIDDEN))
        own = SlotBiases(gate if gated else None, up, down) if biases else None
        return replace(slot, gate_IH=slot.gate_IH if gated else None, biases=own)

    mapped = as_mapped(random_experts(scheme, slots, HIDDEN, inner, CPU))
    return MappedExpertWeights(tuple(with_biases(slot) for slot in mapped.slots), scheme)


def close(backend: TritonExperts, given: MappedExpertWeights, layout: type = RowTokens) -> None:
    tokens, compute = rows(BF16), backend.context.compute
    exact = FP32 if isinstance(compute, Plain) else compute
    reference = ReferenceExperts(replace(backend.context, dtype=FP32, compute=exact))
    expected = weight_and_reduce(reference.run(tokens, given), tokens, OutputStage.REDUCED).y
    laid = permute(tokens, (layout,))
    laid = _poisoned(laid) if isinstance(laid, BatchedTokens) else laid
    got = weight_and_reduce(backend.run(laid, backend.relayout(given)), laid, OutputStage.REDUCED).y
    error = experts_error(BF16, compute, given.scheme, HIDDEN)
    require_close(got.float(), expected, error, f"{backend.context.activation} {given.scheme.name} {layout.__name__}")


@pytest.mark.parametrize("biases", [False, True], ids=["bare", "biased"])
@pytest.mark.parametrize("activation", CLAMPS)
def test_clamps_and_biases_equal_the_reference(activation: str, biases: bool) -> None:
    close(TritonExperts(clamped(activation)), experts(MXFP4, biases=biases))


@pytest.mark.parametrize(
    "weights,compute",
    [(BF16, BF16), (FP8_128x128, FP8_1x128), (MXFP4, FP8_1x128), (INT8_CHANNEL, INT8_TOKEN)],
    ids=lambda s: s.name,
)
def test_other_types_have_them_too(weights: QuantScheme, compute: QuantScheme) -> None:
    close(TritonExperts(clamped("swiglu_oai", compute)), experts(weights))


@pytest.mark.parametrize("layout", [GroupedTokens, BatchedTokens])
def test_in_every_layout(layout: type) -> None:
    close(TritonExperts(clamped("swiglu_oai")), experts(BF16), layout)


def test_biases_of_a_ragged_block_with_the_weights_on_the_right() -> None:
    backend = TritonExperts(replace(clamped("swiglu_oai"), intermediate_size=136))
    backend.tuned = Tuned.fixed(Tile(64, False, 8, 4))
    close(backend, experts(BF16, inner=136))


def test_experts_without_a_gate_have_biases_too() -> None:
    close(TritonExperts(context(BF16, "relu2")), experts(BF16, gated=False))


@pytest.mark.parametrize("activation", ["swiglu_limit", "swiglu_oai"])
def test_a_value_that_is_no_number_is_not_clamped_away(activation: str) -> None:
    backend, tokens = TritonExperts(clamped(activation)), rows(BF16)
    poisoned = tokens.x_RH.values.clone()
    poisoned[0, 0] = torch.nan
    tokens = replace(tokens, x_RH=QuantTensor(poisoned, None, BF16))
    y = backend.run(tokens, backend.relayout(experts(BF16))).y
    assert bool(y[0].isnan().all()) and not y[1:].isnan().any()


@pytest.mark.parametrize("of_shared", [False, True], ids=["routed only", "both"])
def test_shared_experts_beside_biased_ones(of_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_weights, "WORTH_A_SPARE", SLOTS)
    backend, given = TritonExperts(clamped("swiglu_oai")), rows(BF16)
    slots = experts(BF16, slots=SLOTS + 1).slots
    last = slots[SLOTS] if of_shared else replace(slots[SLOTS], biases=None)
    routed = backend.relayout(MappedExpertWeights(slots[:SLOTS], BF16))
    lone = TritonExperts(replace(clamped("swiglu_oai"), num_slots=1))
    shared = lone.relayout(MappedExpertWeights((last,), BF16))
    both = backend.fuse_shared_experts(routed, shared)
    assert both is not None
    one = replace(
        given, ids_RK=torch.zeros((len(IDS), 1), dtype=torch.int32), weights_RK=torch.ones(len(IDS), 1), num_slots=1
    )
    expected = backend.run(given, routed).y.float() + lone.run(one, shared).y.float()
    torch.testing.assert_close(backend.run(given, both).y.float(), expected, rtol=0.02, atol=0.03)


def test_biased_shared_experts_find_no_room_beside_bare_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_weights, "WORTH_A_SPARE", SLOTS)
    backend, slots = TritonExperts(context(BF16)), experts(BF16, slots=SLOTS + 1).slots
    bare = MappedExpertWeights(tuple(replace(slot, biases=None) for slot in slots[:SLOTS]), BF16)
    lone = TritonExperts(replace(context(BF16), num_slots=1)).relayout(MappedExpertWeights(slots[SLOTS:], BF16))
    assert backend.fuse_shared_experts(backend.relayout(bare), lone) is None


@pytest.mark.parametrize("scheme", [BF16, MXFP4], ids=lambda s: s.name)
def test_a_slot_gives_back_its_biases_in_f32(scheme: QuantScheme) -> None:
    given = experts(scheme)
    held = TritonExperts(context(BF16)).relayout(given)
    assert held.num_bytes >= given.num_bytes + SLOTS * (2 * INNER + HIDDEN) * 2  # four bytes a bias, not two
    for index in range(SLOTS):
        mine, theirs = held.slot(index).biases, given.slot(index).biases
        assert mine is not None and theirs is not None
        for one, other in zip(mine.tensors, theirs.tensors, strict=True):
            assert torch.equal(one, other.float())


def test_experts_of_several_sizes_are_refused_by_them() -> None:
    wide, narrow = experts(BF16).slots[0], experts(BF16).slots[1]
    assert narrow.gate_IH is not None
    narrow = SlotWeights(narrow_rows(narrow.gate_IH, 0, 96), narrow_rows(narrow.up_IH, 0, 96), narrow.down_HI)
    with pytest.raises(UnsupportedError, match="intermediate sizes 96, 128, triton holds equal ones"):
        TritonExperts(context(BF16)).relayout(MappedExpertWeights((wide, narrow), BF16))
