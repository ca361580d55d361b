"""Experts in a format that the backend does not support, requantised at load.

The loaded weights are kept, so that a reload or a move of experts starts from the stored values and rounding errors do
not accumulate.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_mk.experts.base import FusedExperts
from moe_mk.quant.gguf import Gguf
from moe_mk.quant.grouped import Grouped
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import ExpertOutput, Tokens
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, SlotWeights, Weights
from moe_mk.weights.scan import Progress


def requantised(q: QuantTensor, scheme: QuantScheme) -> QuantTensor:
    """A matrix or a stack in another scheme; unchanged if it already has it."""
    if q.scheme == scheme:
        return q
    if isinstance(q.scheme, Gguf) and q.scheme.blocks.held == scheme.name and not isinstance(scheme, Plain):
        return q.scheme.exact(q)
    if is_kept(q.scheme, scheme):
        assert isinstance(q.scheme, Grouped) and q.scales is not None
        return replace(q, scheme=scheme, zeros=torch.full_like(q.scales, q.scheme.middle, dtype=torch.uint8))
    return scheme.quantize(q.dequantize(torch.float32))


def is_kept(stored: QuantScheme, held: QuantScheme) -> bool:
    """Whether every code and scale stays: the same scheme, or the same groups that get zero points."""
    if not isinstance(stored, Grouped) or not isinstance(held, Grouped) or stored.block != held.block:
        return stored == held
    return (stored.bits, stored.has_biases) == (held.bits, held.has_biases) and stored.has_zeros <= held.has_zeros


def held_as(weights: Weights, scheme: QuantScheme, down: QuantScheme | None = None) -> Weights:
    """All experts of a rank in another scheme. Canonical stacks stay stacks, other layouts become mapped.

    down: of down projections, where it is another one.
    """
    if down is None and weights.scheme == scheme:
        return weights
    if isinstance(weights, ExpertWeights):
        return replace(weights, w13=requantised(weights.w13, scheme), w2=requantised(weights.w2, down or scheme))
    slots = tuple(slot_held_as(weights.slot(index), scheme, down) for index in range(weights.num_slots))
    return MappedExpertWeights(slots, scheme)


def slot_held_as(slot: SlotWeights, scheme: QuantScheme, down: QuantScheme | None = None) -> SlotWeights:
    """One expert in another scheme; biases are not changed."""
    gate = None if slot.gate_IH is None else requantised(slot.gate_IH, scheme)
    down_HI = requantised(slot.down_HI, down or scheme)
    return replace(slot, gate_IH=gate, up_IH=requantised(slot.up_IH, scheme), down_HI=down_HI)


class HeldExperts(FusedExperts):
    """A backend whose weights are requantised to another scheme than the stored one.

    Not registered; used for a Decision whose weights are held in another format. down: that of down projections.
    """

    def __init__(self, inner: FusedExperts, scheme: QuantScheme, down: QuantScheme) -> None:
        super().__init__(inner.context)
        self.inner, self.scheme, self.down = inner, scheme, down
        self.traits = inner.traits  # type: ignore[misc]

    def __call__(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        return self.inner(tokens, weights)  # the backend that was decided for is recorded, and no other

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        return self.inner.run(tokens, weights)

    def parameters(self) -> str:
        return self.inner.parameters()

    def numerics(self, weights: Weights) -> str:
        return self.inner.numerics(weights)

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """Requantise, then convert to the layout of the backend. The stored weights are not changed.

        Plain shared experts of quantised routed ones stay as they are.
        """
        down = weights.slot(0).down_HI.scheme if weights.num_slots else weights.scheme
        both = (weights.scheme, down), (self.scheme, self.down)
        stored, wanted = (all(isinstance(scheme, Plain) for scheme in schemes) for schemes in both)
        if not stored or wanted or "plain" not in self.traits.weights:
            weights = held_as(weights, self.scheme, self.down)
        return self.inner.relayout(weights, on_progress=on_progress)
