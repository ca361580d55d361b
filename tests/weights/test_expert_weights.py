"""One rank's experts: a stack, or views of files; both give the same matrices."""

import pytest
import torch
from torch import Tensor

from moe_mk.quant import BF16, FP8_128x128, FP8_128x128_UE8M0, QuantScheme, QuantTensor, weight_scheme
from moe_mk.weights.expert_weights import (
    ExpertWeights,
    MappedExpertWeights,
    SlotWeights,
    narrow_columns,
    narrow_rows,
)

SCHEMES = [BF16, FP8_128x128, FP8_128x128_UE8M0]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def stacked(scheme: QuantScheme, *, gated: bool = True, width: int = 256, hidden: int = 384) -> ExpertWeights:
    w13 = scheme.quantize(normal(3, 2 * width if gated else width, hidden))
    return ExpertWeights(w13, scheme.quantize(normal(3, hidden, width)), gated=gated)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_a_slot_is_gate_rows_then_up_rows_then_down(scheme: QuantScheme) -> None:
    weights = stacked(scheme)
    w13, w2 = weights.w13.dequantize(torch.float32), weights.w2.dequantize(torch.float32)
    for index in range(weights.num_slots):
        slot = weights.slot(index)
        assert slot.gate_IH is not None and slot.gate_IH.values.data_ptr() == weights.w13.values[index].data_ptr()
        assert torch.equal(slot.gate_IH.dequantize(torch.float32), w13[index, :256])
        assert torch.equal(slot.up_IH.dequantize(torch.float32), w13[index, 256:])
        assert torch.equal(slot.down_HI.dequantize(torch.float32), w2[index])
    assert weights.scheme == scheme and weights.gated and weights.num_slots == 3
    assert weights.num_bytes == 3 * (scheme.num_bytes(512, 384) + scheme.num_bytes(384, 256))


def test_an_ungated_expert_has_no_gate() -> None:
    weights = stacked(FP8_128x128, gated=False)
    slot = weights.slot(1)
    assert slot.gate_IH is None and slot.up_IH.shape == (256, 384)
    assert not MappedExpertWeights([slot], FP8_128x128).gated


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_mapped_weights_are_the_same_slots_and_bytes(scheme: QuantScheme) -> None:
    weights = stacked(scheme)
    mapped = MappedExpertWeights([weights.slot(index) for index in range(3)], scheme)
    assert mapped.num_slots == 3 and mapped.gated and mapped.num_bytes == weights.num_bytes
    assert mapped.slot(2).up_IH.values.data_ptr() == weights.slot(2).up_IH.values.data_ptr()
    assert weights.layout != mapped.layout


def test_a_private_layout_cannot_be_read_by_slot() -> None:
    weights = stacked(BF16)
    private = ExpertWeights(weights.w13, weights.w2, layout="swizzled")
    with pytest.raises(AssertionError, match="layout 'swizzled' is private"):
        private.slot(0)


@pytest.mark.parametrize(
    "scheme", [BF16, weight_scheme((2, 3)), weight_scheme((2, 3), ue8m0=True)], ids=lambda s: s.name
)
def test_narrowing_at_block_edges_keeps_the_right_scales(scheme: QuantScheme) -> None:
    # Blocks of 2 x 3 on a 7 x 10 matrix; the last ones are ragged.
    q = scheme.quantize(normal(7, 10) * torch.arange(1, 11) * torch.arange(1, 8)[:, None])
    whole = q.dequantize(torch.float32)
    for start, length in ((0, 7), (0, 2), (4, 3), (6, 1), (2, 3), (0, 0)):
        part = narrow_rows(q, start, length)
        assert part.values.data_ptr() == q.values[start:].data_ptr() or length == 0
        assert torch.equal(part.dequantize(torch.float32), whole[start : start + length])
        assert part.num_bytes == scheme.num_bytes(length, 10)
    for start, length in ((0, 10), (3, 3), (6, 4), (9, 1), (3, 5)):
        part = narrow_columns(q, start, length)
        assert torch.equal(part.dequantize(torch.float32), whole[:, start : start + length])


def test_a_start_inside_a_block_is_a_mistake_of_ours() -> None:
    q = weight_scheme((2, 3)).quantize(normal(7, 10))
    with pytest.raises(AssertionError, match="1 is not a multiple of the block side 2"):
        narrow_rows(q, 1, 2)
    with pytest.raises(AssertionError, match="4 is not a multiple of the block side 3"):
        narrow_columns(q, 4, 2)


def test_slots_of_parts_count_their_own_bytes() -> None:
    q = BF16.quantize(normal(4, 6))
    slot = SlotWeights(None, q, QuantTensor(q.values.T, None, BF16))
    assert MappedExpertWeights([slot, slot], BF16).num_bytes == 2 * 2 * 24 * 2
