"""Rows and columns of quantised matrices, cut and joined with their scales, as views where they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.quant.blocked import WHOLE, BlockedScheme
from moe_mk.quant.tensor import QuantTensor


def gate_and_up(both: QuantTensor, order: str) -> tuple[QuantTensor, QuantTensor]:
    """Gate and up of one expert as views; one scale of a whole tensor holds for both."""
    values = halves_of(both.values, order)
    scales, above, zeros = (
        (part, part) if part is None or part.shape[0] == 1 else halves_of(part, order)
        for part in (both.scales, both.global_scale, both.zeros)
    )
    gate, up = (QuantTensor(values[i], scales[i], both.scheme, above[i], zeros[i]) for i in (0, 1))
    return gate, up


def halves_of(both: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Gate and up of rows of one expert, as views."""
    if order == "interleaved":
        return both[0::2], both[1::2]
    first, second = both.chunk(2)
    return (first, second) if order == "gate_up" else (second, first)


def narrow_rows(q: QuantTensor, start: int, length: int) -> QuantTensor:
    """Rows [start, start + length) of a matrix; the start must be a block edge."""
    return _narrow(q, 0, start, length)


def narrow_columns(q: QuantTensor, start: int, length: int) -> QuantTensor:
    """Columns [start, start + length) of a matrix; the start must be a block edge."""
    return _narrow(q, 1, start, length)


def _narrow(q: QuantTensor, axis: int, start: int, length: int) -> QuantTensor:
    first, end = start, start + length
    if axis == 1:
        _expect_edges(q, start, length)
        first, end = (q.scheme.held_columns(at) for at in (start, start + length))
    values = q.values.narrow(axis, first, end - first)
    above = q.global_scale
    if above is not None and axis == 0:
        above = _scales_of(above, 0, -(-q.shape[0] // above.shape[0]), start, length, whole=True)
    if q.scales is None:
        return replace(q, values=values, global_scale=above)
    assert isinstance(q.scheme, BlockedScheme)
    side, whole = q.scheme.sides_of(q)[axis], q.scheme.block[axis] == WHOLE
    scales, zeros = (
        None if part is None else _scales_of(part, axis, side, start, length, whole=whole)
        for part in (q.scales, q.zeros)
    )
    return replace(q, values=values, scales=scales, global_scale=above, zeros=zeros)


def _expect_edges(q: QuantTensor, start: int, length: int) -> None:
    """Raise ShapeError if a slice of columns cuts a group of weight-only integers or a block of GGUF."""
    packed, end = q.scheme.per_byte, start + length
    if q.scheme.family not in ("wna16", "gguf"):
        assert start % packed == 0 == length % packed, (
            f"{start} and {length} must be multiples of {packed}: so many values are packed together"
        )
        return
    assert q.scheme.block is not None
    side = packed if q.scheme.block[1] == WHOLE else q.scheme.block[1]
    if start % side or (end % side and (end != q.shape[1] or end % packed)):
        raise ShapeError(
            f"columns {start} to {end} of {q.shape[1]} would cut a group of {side} columns of {q.scheme.name}; "
            f"use multiples of {side}"
        )


def _scales_of(scales: Tensor, axis: int, side: int, start: int, length: int, *, whole: bool) -> Tensor:
    """The scales of a slice, which must begin at an edge; one of a whole matrix holds for each of its parts."""
    if whole and start // side == (start + max(length, 1) - 1) // side:
        return scales.narrow(axis, start // side, 1)
    assert start % side == 0, f"{start} is not a multiple of the block side {side}"
    return scales.narrow(axis, start // side, -(-length // side))


def stacked_rows(parts: Sequence[QuantTensor]) -> QuantTensor:
    """Matrices of one scheme, one above the other; scales of whole matrices become one per part."""

    def stacked(name: str) -> Tensor | None:
        pieces = [getattr(q, name) for q in parts]
        if pieces[0] is None or len(pieces) == 1:
            return pieces[0]  # type: ignore[no-any-return]
        return torch.cat([piece.contiguous().view(torch.uint8) for piece in pieces]).view(pieces[0].dtype)

    values = stacked("values")
    assert values is not None
    return QuantTensor(values, stacked("scales"), parts[0].scheme, stacked("global_scale"), stacked("zeros"))
