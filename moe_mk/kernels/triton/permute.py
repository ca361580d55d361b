"""Permute tokens and sum their rows on the device, with sizes from shapes only: no count is read on the host.

    first_kept    compact the local assignments of each row, for transports whose rows have mostly remote experts
    group_rows    one row per assignment, sorted by expert; rows behind the last assignment are undefined
    sum_rows      the rows of every token added up again, in the order of their positions

`group_rows` reads and writes every row once. Sums run in f32 in the order of positions and are rounded once: the bits
are those of `permute.reduce_rows` on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.align import align
from moe_mk.kernels.triton.launch import after_the_one_before, chained
from moe_mk.kernels.triton.numerics import to_dtype
from moe_mk.kernels.triton.tile_map import Empty

COLUMNS = 1024
BYTES = 4096
"""Of a row, copied by one program."""
ROWS = 32
TILE = 128
"""Rows of the tiles that `align` lists; the list is not used."""


class Grouped(NamedTuple):
    """Rows sorted by expert. N = R * K, the most assignments that there can be."""

    values: Tensor
    """(N, H) in the dtype of the rows."""
    scales: Tensor | None
    counts_L: Tensor
    """int64."""
    row_N: Tensor
    """int64; 0 behind the last assignment."""
    weights_N: Tensor
    """f32; 0 behind the last assignment."""
    position_RK: Tensor
    """int32: the row of each assignment; -1 for dropped ones."""


def first_kept(ids_RK: Tensor, weights_RK: Tensor, most_K: int, empty: Empty = torch.empty) -> tuple[Tensor, Tensor]:
    """The assignments of every row that are not -1, in their order: ids int32 and weights f32, (R, most_K).

    -1 with weight 0 stands behind them. A row with more than most_K of them loses the last.
    """
    rows, top_k = ids_RK.shape
    ids = empty((rows, most_K), dtype=torch.int32, device=ids_RK.device)
    weights = empty((rows, most_K), dtype=torch.float32, device=ids_RK.device)
    if rows:
        _first_kept[(triton.cdiv(rows, ROWS),)](
            ids_RK, weights_RK, ids, weights, rows, TOP_K=top_k, KS=triton.next_power_of_2(top_k), MOST=most_K,
            ROWS=ROWS, num_warps=4, **chained(),
        )  # fmt: skip
    return ids, weights


@triton.jit(do_not_specialize=["num_rows"])
def _first_kept(
    ids_ptr, weights_ptr, out_ids_ptr, out_weights_ptr, num_rows,
    TOP_K: tl.constexpr, KS: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    row, k = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, KS)[None, :]
    inside = row < num_rows
    ids = tl.load(ids_ptr + row * TOP_K + k, mask=inside & (k < TOP_K), other=-1)
    kept = (ids >= 0).to(tl.int32)
    place = tl.cumsum(kept, axis=1) - kept
    stored = (ids >= 0) & (place < MOST)
    weights = tl.load(weights_ptr + row * TOP_K + k, mask=stored, other=0.0)
    tl.store(out_ids_ptr + row * MOST + place, ids, mask=stored)
    tl.store(out_weights_ptr + row * MOST + place, weights, mask=stored)
    behind = inside & (k >= tl.sum(kept, axis=1)[:, None]) & (k < MOST)
    tl.store(out_ids_ptr + row * MOST + k, tl.full([ROWS, KS], -1, tl.int32), mask=behind)
    tl.store(out_weights_ptr + row * MOST + k, tl.zeros([ROWS, KS], tl.float32), mask=behind)


def group_rows(values: Tensor, scales: Tensor | None, ids_RK: Tensor, weights_RK: Tensor, num_slots: int) -> Grouped:
    """Sort the assignments of rows (R, H) by expert, keeping the order of rows inside one.

    ids_RK: int32, -1: dropped. scales: (R, groups), moved with their rows; None: values have none.
    """
    (rows, top_k), device = ids_RK.shape, ids_RK.device
    parts = [part for part in (values, scales) if part is not None]
    num, given = rows * top_k, [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    made = [torch.empty((num, part.shape[1]), dtype=part.dtype, device=device) for part in given]
    counts_L = torch.zeros((num_slots,), dtype=torch.int64, device=device)
    row_N = torch.empty((num,), dtype=torch.int64, device=device)
    weights_N = torch.empty((num,), dtype=torch.float32, device=device)
    position_RK = torch.empty((rows, top_k), dtype=torch.int32, device=device)
    found = Grouped(made[0], None if scales is None else made[1], counts_L, row_N, weights_N, position_RK)
    if num:
        ids = ids_RK.to(torch.int32).contiguous()
        order = align(ids, num_slots, TILE).order_N
        bytes_in, bytes_out = ([part.view(torch.uint8) for part in parts] for parts in (given, made))
        width, narrow = bytes_in[0].shape[1], bytes_in[1].shape[1] if scales is not None else 0
        _group_rows[(num, triton.cdiv(width, BYTES))](
            order, ids, weights_RK.to(torch.float32).contiguous(), bytes_in[0], bytes_in[-1], bytes_out[0],
            bytes_out[-1], counts_L, row_N, weights_N, position_RK, bytes_in[0].stride(0), bytes_in[-1].stride(0),
            width, narrow, TOP_K=top_k, BYTES=BYTES, NARROW=triton.next_power_of_2(max(narrow, 1)),
            SCALED=scales is not None, num_warps=4, **chained(),
        )  # fmt: skip
    return found


@triton.jit
def _group_rows(
    order_ptr, ids_ptr, weights_ptr, x_ptr, scales_ptr, out_ptr, out_scales_ptr, counts_ptr, row_ptr, out_weights_ptr,
    position_ptr, x_stride, scales_stride, width, narrow,
    TOP_K: tl.constexpr, BYTES: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One program for a part of a row; the first of a row also writes what there is once for an assignment."""
    after_the_one_before()
    position = tl.program_id(0).to(tl.int64)
    choice = tl.load(order_ptr + position)
    slot = tl.load(ids_ptr + choice)
    row = (choice // TOP_K).to(tl.int64)
    if tl.program_id(1) == 0:
        kept = slot >= 0
        tl.store(row_ptr + position, tl.where(kept, row, 0))
        tl.store(out_weights_ptr + position, tl.load(weights_ptr + choice, mask=kept, other=0.0))
        tl.store(position_ptr + choice, tl.where(kept, position, -1).to(tl.int32))
        tl.atomic_add(counts_ptr + slot, 1, mask=kept, sem="relaxed")
        if SCALED:
            column = tl.arange(0, NARROW)
            inside = (column < narrow) & kept
            scales = tl.load(scales_ptr + row * scales_stride + column, mask=inside)
            tl.store(out_scales_ptr + position * narrow + column, scales, mask=inside)
    if slot >= 0:
        column = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
        inside = column < width
        part = tl.load(x_ptr + row * x_stride + column, mask=inside)
        tl.store(out_ptr + position * width + column, part, mask=inside)


def sum_rows(y: Tensor, position_RK: Tensor, weights_N: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Add up the rows of every token, each times its weight if weights are given: (R, H) in the dtype of y.

    y: (N, H). position_RK: as of `group_rows`; rows that it does not name are not read. out: the output; None:
    allocated.
    """
    rows, top_k = position_RK.shape
    out_RH = torch.empty((rows, y.shape[1]), dtype=y.dtype, device=y.device) if out is None else out
    if out_RH.numel():
        _sum_rows[(rows, triton.cdiv(y.shape[1], COLUMNS))](
            y, position_RK, weights_N if weights_N is not None else y, out_RH, y.shape[1], y.stride(0),
            out_RH.stride(0), TOP_K=top_k, KS=triton.next_power_of_2(top_k), WEIGHTED=weights_N is not None,
            COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False, **chained(),
        )  # fmt: skip
    return out_RH


@triton.jit
def _sum_rows(
    y_ptr, position_ptr, weights_ptr, out_ptr, width, y_stride, out_stride,
    TOP_K: tl.constexpr, KS: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, KS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    positions = tl.load(position_ptr + row * TOP_K + k, mask=k < TOP_K, other=-1)
    total = tl.zeros([COLUMNS], tl.float32)
    last = -1
    for _ in tl.static_range(TOP_K):
        # The next position in ascending order; behind the last one the largest integer, which is not read.
        position = tl.min(tl.where(positions > last, positions, 0x7FFFFFFF), axis=0)
        kept = position != 0x7FFFFFFF
        part = tl.load(y_ptr + position.to(tl.int64) * y_stride + column, mask=inside & kept, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights_ptr + position, mask=kept, other=0.0)
        total += part
        last = position
    tl.store(out_ptr + row * out_stride + column, to_dtype(total, out_ptr.dtype.element_ty), mask=inside)
