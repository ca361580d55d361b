"""Where DeepGEMM wants rows and scales: padded places of grouped rows, blocks with room, stacks of mapped matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.expert_weights import ExpertWeights, Weights


def padded_places(counts_L: Tensor, num_rows: int, alignment: int) -> tuple[Tensor, Tensor]:
    """Where grouped rows go if each expert starts at a multiple of `alignment`, and whose row every place is.

    Returns int64 (N,) and int32 (room,), -1 for padding; the room is that of the worst routing, known from shapes.

        counts 3 0 2, alignment 4      rows 0 1 2 3 4 -> places 0 1 2 4 5      experts 0 0 0 -1 2 2 -1 -1 ...
    """
    room = -(-(num_rows + len(counts_L) * (alignment - 1)) // alignment) * alignment
    ends_L = torch.cumsum(counts_L, 0)
    padded_L = (counts_L + alignment - 1) // alignment * alignment
    padded_ends_L = torch.cumsum(padded_L, 0)
    row_N = torch.arange(num_rows, dtype=torch.int64, device=counts_L.device)
    expert_N = torch.searchsorted(ends_L, row_N, right=True)
    place_N = row_N - (ends_L - counts_L)[expert_N] + (padded_ends_L - padded_L)[expert_N]
    expert_X = torch.full((room,), -1, dtype=torch.int32, device=counts_L.device)
    expert_X[place_N] = expert_N.to(torch.int32)
    return place_N, expert_X


def widened(part: Tensor, rows: int) -> Tensor:
    """Blocks of more rows; what is added is zero."""
    made = torch.zeros((part.shape[0], rows, part.shape[2]), dtype=part.dtype, device=part.device)
    if part.element_size() == 1:
        made.view(torch.uint8)[:, : part.shape[1]] = part.view(torch.uint8)
    else:
        made[:, : part.shape[1]] = part
    return made


def stacked(weights: Weights) -> ExpertWeights:
    """Mapped matrices as one stack, with scales in f32."""
    slots = [weights.slot(index) for index in range(weights.num_slots)]
    first = [[q for q in (slot.gate_IH, slot.up_IH) if q is not None] for slot in slots]

    def stack(parts: list[list[QuantTensor]]) -> QuantTensor:
        values = torch.stack([torch.cat([q.values.view(torch.uint8) for q in part]) for part in parts])
        scales = torch.stack([torch.cat([scales_of(q) for q in part]) for part in parts])
        return QuantTensor(values.view(parts[0][0].values.dtype), scales, weights.scheme)

    return ExpertWeights(stack(first), stack([[slot.down_HI] for slot in slots]), gated=weights.gated)


def scales_of(q: QuantTensor) -> Tensor:
    """In f32, whatever they are held in."""
    assert q.scales is not None
    return q.scales.to(torch.float32)
