"""Shared experts as one more slot of the same pass: their weights lie behind those of the routed ones.

A stack that is copied to the device gets room for one slot more where it has many; nothing else is copied twice. Stacks
that lie there already have no room, and their shared experts are computed by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_mk.experts.triton.weights import FormedMatrix, FormedWeights, RoomyWeights
from moe_mk.experts.triton_biases import Biases, no_biases_like
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.expert_weights import ExpertWeights, Weights

WORTH_A_SPARE = 32
"""Slots from which on one more is a small part of the memory."""


def spare_of(num_slots: int) -> int:
    """Slots to leave free behind so many."""
    return 1 if num_slots >= WORTH_A_SPARE else 0


@dataclass(frozen=True)
class Beside:
    """Both in one stack, with what they were made of, to know them again."""

    weights: Weights
    routed: Weights
    shared: Weights

    def made_of(self, routed: Weights, shared: Weights) -> bool:
        """Whether these very weights are joined here."""
        return self.routed is routed and self.shared is shared


def joined(routed: Weights, shared: Weights) -> Weights | None:
    """Both in one stack, if they lie alike and there is room behind the routed ones; only that room is written."""
    if isinstance(routed, RoomyWeights) and isinstance(shared, ExpertWeights) and routed.spare:
        own = shared.biases if isinstance(shared, RoomyWeights) else None
        if routed.scheme != shared.scheme or routed.gated != shared.gated or _is_alone(routed.biases, own):
            return None
        w13, w2 = (_joined_stack(a, b) for a, b in ((routed.w13, shared.w13), (routed.w2, shared.w2)))
        if w13 is None or w2 is None:
            return None
        return replace(routed, w13=w13, w2=w2, biases=_joined_biases(routed.biases, own))
    if isinstance(routed, FormedWeights) and isinstance(shared, FormedWeights) and routed.spare:
        if routed.form != shared.form or routed.gated != shared.gated or _is_alone(routed.biases, shared.biases):
            return None
        first, second = (_joined_matrix(a, b) for a, b in ((routed.w13, shared.w13), (routed.w2, shared.w2)))
        if first is None or second is None:
            return None
        return replace(routed, w13=first, w2=second, biases=_joined_biases(routed.biases, shared.biases))
    return None


def _is_alone(routed: Biases | None, shared: Biases | None) -> bool:
    """Whether shared experts have biases that find no room behind the routed ones'."""
    return routed is None and shared is not None


def _joined_biases(routed: Biases | None, shared: Biases | None) -> Biases | None:
    """Behind the biases of routed experts those of the shared ones, zeros where they have none."""
    if routed is None:
        return None
    own = shared or no_biases_like(routed)
    b13, b2 = _behind(routed.b13, own.b13), _behind(routed.b2, own.b2)
    assert b13 is not None and b2 is not None, "their matrices fit, so do they"
    return Biases(b13, b2)


def _joined_stack(routed: QuantTensor, shared: QuantTensor) -> QuantTensor | None:
    values = _behind(routed.values, shared.values)
    if values is None or routed.scales is None or shared.scales is None:
        return None if values is None else replace(routed, values=values)
    scales = _behind(routed.scales, shared.scales)
    return None if scales is None else replace(routed, values=values, scales=scales)


def _joined_matrix(routed: FormedMatrix, shared: FormedMatrix) -> FormedMatrix | None:
    values = _behind(routed.values, shared.values)
    made: dict[str, Tensor | None] = {"values": values}
    for name in ("scales", "rows"):
        own, other = getattr(routed, name), getattr(shared, name)
        made[name] = None if own is None else _behind(own, other)
        if own is not None and made[name] is None:
            return None
    return None if values is None else replace(routed, **made)  # type: ignore[arg-type]


def _behind(stack: Tensor, one: Tensor) -> Tensor | None:
    """A stack with room behind it, and `one` in that room; None for one of another size."""
    if stack.shape[1:] != one.shape[1:] or len(one) != 1 or stack.dtype != one.dtype:
        return None
    assert stack.storage_offset() == 0 and stack.untyped_storage().nbytes() > stack.nbytes, "no room was left"
    both = stack.as_strided((len(stack) + 1, *stack.shape[1:]), stack.stride())
    if both.element_size() == 1:
        both[-1].view(torch.uint8).copy_(one[0].contiguous().view(torch.uint8))
    else:
        both[-1].copy_(one[0])
    return both
