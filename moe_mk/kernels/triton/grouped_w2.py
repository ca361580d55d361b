"""Second grouped GEMM of the experts; the routing weight and the way back to the assignment are in its epilogue.

    y[assignment] = weight * (h w2^T + b)               per tile: ROWS positions x 128 columns

Reads h (positions, I) and w2 (L * H, I) through the tensor memory accelerator, only of experts that have rows. Writes
y (., H) at the assignment of each position, so that summing a received row's assignments needs no map (`combine`), or
where the row lies. Minimum bytes: active experts x I H + h + y. FP8 sums as in `grouped_w13`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS, KernelFormat
from moe_mk.kernels.triton.launch import after_the_one_before, boxes, chained, resident_programs
from moe_mk.kernels.triton.numerics import to_dtype
from moe_mk.kernels.triton.tile import BLOCK, Tile
from moe_mk.kernels.triton.tile_map import TileMap
from moe_mk.kernels.triton.weight_formats import (
    add_product,
    fp8_product,
    packs,
    scale_codes,
    spread,
    with_bias,
    with_row_scales,
)


def grouped_w2(
    h: tuple[Tensor, Tensor | None],
    w2: tuple[Tensor, Tensor | None],
    y: Tensor,
    tiles: TileMap,
    tile: Tile,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
    reduced: bool = False,
    format: KernelFormat | None = None,
    row_scales: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Fill y (., H) from h (positions, I); each pair is values and scales, None for bf16.

    order: int32, the assignment at each position, which is its row of y; None: position p is row p. weights: f32, one
    an assignment; None leaves rows as they are. reduced: whether y, in bf16, is the sum over one assignment a row: rows
    of assignments in no tile are zeroed, and -0 is written as 0, as `combine` does. format, row_scales, bias: as in
    `grouped_w13`, the last two of rows of w2.
    """
    (h_values, h_scales), (w_values, w_scales) = h, w2
    k, width, programs = h_values.shape[1], y.shape[1], resident_programs(y.device)
    format = format or KERNEL_FORMATS["plain" if h_scales is None else "fp8"]
    _w2[(programs,)](
        boxes(h_values, tile.rows, format.row_box), h_scales if h_scales is not None else h_values,
        boxes(w_values.view(-1, w_values.shape[-1]), BLOCK, format.box), w_scales if w_scales is not None else w_values,
        row_scales if row_scales is not None else tiles.count, bias if bias is not None else tiles.count, y,
        order if order is not None else tiles.count, weights if weights is not None else y,
        tiles.tiles_3X, tiles.count, tiles.tiles_3X.stride(0), y.shape[0], k, width,
        *(h_scales.stride() if h_scales is not None else (0, 0)),
        ROWS=tile.rows, STEP=format.step, GROUPS=format.groups, PROGRAMS=programs, SWAP=tile.swap, FORMAT=format.name,
        SCATTER=order is not None, WEIGHTED=weights is not None, REDUCED=reduced, BIASED=bias is not None,
        num_warps=tile.warps, num_stages=tile.stages, **chained(),
    )  # fmt: skip


@triton.jit
def scaled_sum(
    total, h, h_scales_ptr, w, w_scales_ptr, w_blocks_ptr, first, position, there, expert, row, width, block, steps,
    h_scales_m, h_scales_k, STEP: tl.constexpr, GROUPS: tl.constexpr, SWAP: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """FP8 times FP8, with scales as in `scaled_sums` of the first GEMM."""
    BOX: tl.constexpr = STEP // 2 if packs(FORMAT) else STEP
    low, high = scale_codes(w_scales_ptr, expert, 0, steps, row, width, GROUPS, FORMAT)
    w_scales = w_blocks_ptr + block.to(tl.int64) * steps
    row_scales = h_scales_ptr + position.to(tl.int64) * h_scales_m
    s_h, s_w = tl.load(row_scales, mask=there, other=0.0), tl.load(w_scales)
    for step in range(steps):
        a, b = h.load([first, step * STEP]), w.load([expert * width + row, step * BOX])
        after = tl.minimum(step + 1, steps - 1)
        next_h, next_w = tl.load(row_scales + after * h_scales_k, mask=there, other=0.0), tl.load(w_scales + after)
        following = scale_codes(w_scales_ptr, expert, after, steps, row, width, GROUPS, FORMAT)
        total += fp8_product(a, a, b, low, high, SWAP, FORMAT, False) * spread(s_h * s_w, SWAP)
        s_h, s_w = next_h, next_w
        low, high = following
    return total


@triton.jit
def unscaled_sum(
    total, h, w, w_scales_ptr, first, expert, row, width, steps,
    STEP: tl.constexpr, GROUPS: tl.constexpr, SWAP: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Sum the products of every format but FP8 times FP8."""
    PACKED: tl.constexpr = packs(FORMAT)
    BOX: tl.constexpr = STEP // 2 if PACKED else STEP
    low, high = scale_codes(w_scales_ptr, expert, 0, steps, row, width, GROUPS, FORMAT)
    for step in range(steps):
        a = h.load([first, step * STEP])
        b = h.load([first, step * STEP + BOX]) if PACKED else a
        after = scale_codes(w_scales_ptr, expert, tl.minimum(step + 1, steps - 1), steps, row, width, GROUPS, FORMAT)
        total = add_product(total, a, b, w.load([expert * width + row, step * BOX]), low, high, SWAP, FORMAT)
        low, high = after
    return total


@triton.jit
def zero_rows(y_ptr, order_ptr, first, end, width, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero the rows of y at the positions from `first` to `end`, shared among programs."""
    for position in range(first + tl.program_id(0), end, PROGRAMS):
        row = y_ptr + tl.load(order_ptr + position).to(tl.int64) * width
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            tl.store(row + column, tl.zeros([COLUMNS], y_ptr.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["tiles_stride", "num"])
def _w2(
    h, h_scales_ptr, w, w_scales_ptr, w_rows_ptr, bias_ptr, y_ptr, order_ptr, weights_ptr, tiles_ptr, count_ptr,
    tiles_stride, num, k, width, h_scales_m, h_scales_k,
    ROWS: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr, PROGRAMS: tl.constexpr, SWAP: tl.constexpr,
    FORMAT: tl.constexpr, SCATTER: tl.constexpr, WEIGHTED: tl.constexpr, REDUCED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    if REDUCED:  # the end of the last tile, loaded before the products and used after them
        last = tl.load(count_ptr) - 1
        kept = tl.load(tiles_ptr + 2 * tiles_stride + last, mask=last >= 0, other=0)
    across, steps = tl.cdiv(width, 128), tl.cdiv(k, STEP)
    M: tl.constexpr = 128 if SWAP else ROWS
    N: tl.constexpr = ROWS if SWAP else 128
    ACC: tl.constexpr = tl.int32 if FORMAT == "int8" else tl.float32
    for t in tl.range(tl.program_id(0), tl.load(count_ptr) * across, PROGRAMS):
        tile, n = t // across, t % across
        expert = tl.load(tiles_ptr + tile)
        first = tl.load(tiles_ptr + tiles_stride + tile)
        end = tl.load(tiles_ptr + 2 * tiles_stride + tile)
        position = first + tl.arange(0, ROWS)
        there, weight_row = position < end, expert * width + n * 128
        total = tl.zeros((M, N), ACC)
        if FORMAT == "fp8" or FORMAT == "mxfp4":
            total = scaled_sum(
                total, h, h_scales_ptr, w, w_scales_ptr, w_scales_ptr if FORMAT == "fp8" else w_rows_ptr, first,
                position, there, expert, n * 128, width, expert * across + n, steps, h_scales_m, h_scales_k,
                STEP, GROUPS, SWAP, FORMAT,
            )  # fmt: skip
        else:
            total = unscaled_sum(
                total, h, w, w_scales_ptr, first, expert, n * 128, width, steps, STEP, GROUPS, SWAP, FORMAT
            )  # fmt: skip
            h_rows = h_scales_ptr + position.to(tl.int64) * h_scales_m
            total = with_row_scales(total, h_rows, there, w_rows_ptr, weight_row, width - n * 128, SWAP, FORMAT)
        if BIASED:
            total = with_bias(total, bias_ptr, weight_row, width - n * 128, SWAP)
        if SWAP:
            total = tl.trans(total)
        target = tl.load(order_ptr + position, mask=there, other=0) if SCATTER else position
        if WEIGHTED:
            total *= tl.load(weights_ptr + target, mask=there, other=0.0)[:, None]
        column = n * 128 + tl.arange(0, 128)
        inside = there[:, None] & (column < width)[None, :]
        value = to_dtype(total, y_ptr.dtype.element_ty)
        if REDUCED:
            value = to_dtype(value.to(tl.float32) + 0.0, y_ptr.dtype.element_ty)
        tl.store(y_ptr + target[:, None].to(tl.int64) * width + column[None, :], value, mask=inside)
    if REDUCED:
        zero_rows(y_ptr, order_ptr, kept, num, width, PROGRAMS, 2048)
