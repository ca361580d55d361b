"""Requantise weights at load to another format than the checkpoint's, expert by expert.

The loaded weights are kept, so that a reload or a move of experts starts from the stored values and rounding errors do
not accumulate.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_mk.quant.gguf import Gguf
from moe_mk.quant.grouped import Grouped
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, SlotWeights, Weights


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
    return stored.bits == held.bits and stored.has_zeros <= held.has_zeros


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
