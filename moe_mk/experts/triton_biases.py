"""Biases as the Triton kernels add them: f32, one row a slot, gate's before up's, with room behind as weights have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.weights.expert_weights import SlotBiases, Weights, stacked_biases


@dataclass(frozen=True)
class Biases:
    """Of the experts of one rank."""

    b13: Tensor
    """(L, 2I), or (L, I) without a gate."""
    b2: Tensor
    """(L, H)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.b13.nbytes + self.b2.nbytes

    def slot(self, index: int, *, gated: bool) -> SlotBiases:
        """Those of one expert, in f32 whatever they were stored in; a copy."""
        first = self.b13[index].clone().chunk(2 if gated else 1)
        return SlotBiases(first[0] if gated else None, first[-1], self.b2[index].clone())


def biases_of(weights: Weights, device: torch.device, *, spare: int = 0) -> Biases | None:
    """Copy the biases of every expert to a device; None for experts without. spare: slots to leave free behind them."""
    b13, b2 = stacked_biases(weights)
    return None if b13 is None or b2 is None else Biases(_roomy(b13, device, spare), _roomy(b2, device, spare))


def _roomy(stack: Tensor, device: torch.device, spare: int) -> Tensor:
    room = torch.zeros((len(stack) + spare, stack.shape[1]), dtype=torch.float32, device=device)[: len(stack)]
    room.copy_(stack)
    return room


def no_biases_like(routed: Biases) -> Biases:
    """Zeros for one slot beside biases."""
    return Biases(torch.zeros_like(routed.b13[:1]), torch.zeros_like(routed.b2[:1]))
