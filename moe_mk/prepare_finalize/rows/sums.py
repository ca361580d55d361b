"""The ordered sum of combine: adds rows to their tokens in a fixed order, in f32 from zero, rounded once.

    total = 0
    for each group:    partial = 0;  for each part of it:  partial += its row;     total += partial

A group is what meets on the way: the ranks of a node. A flat sum is one group. By kernels where they are compiled, with
torch else: the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moe_mk.comm.communicator import add_in_order
from moe_mk.kernels.native.exchange import ROW_TYPES, add_rows
from moe_mk.kernels.native.library import Native

ROWS_AT_ONCE = 64
"""Rows that torch adds up together: their f32 sums at H = 7168 are 1.8 MB, which a core keeps in its cache."""

FEW_BYTES = 1 << 17
"""Less than this torch adds up before a call of a kernel is made ready."""


@dataclass(frozen=True)
class Part:
    """Rows (X, H), and for each the sum that it adds to (int64; ascending, each once)."""

    rows: Tensor
    row_X: Tensor


def cut(edges: Sequence[int], parts: Sequence[Part]) -> list[list[Part]]:
    """Return, for each part, the rows added in each interval between edges, relative to the interval's start."""
    pieces: list[list[Part]] = [[] for _ in edges[1:]]
    for part in parts:
        edge_X = torch.tensor(edges, dtype=part.row_X.dtype, device=part.row_X.device)
        places = pairwise(torch.searchsorted(part.row_X, edge_X).tolist())
        for piece, start, (first, last) in zip(pieces, edges, places, strict=False):
            piece.append(Part(part.rows[first:last], part.row_X[first:last] - start))
    return pieces


def add_up(groups: Sequence[Sequence[Part]], out_RH: Tensor, native: Native | None) -> Tensor:
    """Write the sums of all groups to `out_RH`, zero where none has a row. native: None to add with torch."""
    if not len(out_RH):
        return out_RH
    parts = flattened(groups)
    few = out_RH.numel() * out_RH.element_size() < FEW_BYTES
    if native is None or few or not parts or not out_RH.is_contiguous() or out_RH.dtype not in ROW_TYPES:
        return _add_up(groups, out_RH)
    if any(each.device.type != "cpu" or each.dtype is not out_RH.dtype for each in (out_RH, *(p.rows for p in parts))):
        return _add_up(groups, out_RH)
    return add_rows(native, [(part.rows, part.row_X) for part in parts], out_RH)


def flattened(groups: Sequence[Sequence[Part]]) -> list[Part] | None:
    """An order of the parts in which a flat sum gives the same bits; None: there is none for certain.

    A first group is the beginning of a flat sum, and the first two may change places, because a + b is b + a. A later
    one can join it only if it is a single part.
    """
    ordered = [list(group) for group in groups]
    if len(ordered) > 1 and len(ordered[1]) > 1:
        ordered[:2] = ordered[1::-1]
    if any(len(group) > 1 for group in ordered[1:]):
        return None
    return [part for group in ordered for part in group]


def _add_up(groups: Sequence[Sequence[Part]], out_RH: Tensor) -> Tensor:
    """With torch. Many sums are finished a few at a time on the host, while they are in the cache."""
    if len(out_RH) <= ROWS_AT_ONCE or out_RH.device.type != "cpu":
        return out_RH.copy_(total(groups, out_RH.shape, out_RH.device))
    edges = [*range(0, len(out_RH), ROWS_AT_ONCE), len(out_RH)]
    pieces_of_group = [cut(edges, group) for group in groups]
    for number, (first, last) in enumerate(pairwise(edges)):
        to_XH = out_RH[first:last]
        to_XH.copy_(total([pieces[number] for pieces in pieces_of_group], to_XH.shape, to_XH.device))
    return out_RH


def total(groups: Sequence[Sequence[Part]], shape: Sequence[int], device: torch.device) -> Tensor:
    """The sums in f32."""
    total_RH = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
    for number, group in enumerate(groups):
        apart = number > 0 and len(group) > 1
        sum_RH = torch.zeros_like(total_RH) if apart else total_RH
        add_in_order(sum_RH, ((part.rows, None if len(part.rows) == len(sum_RH) else part.row_X) for part in group))
        if apart:
            total_RH += sum_RH
    return total_RH
