"""First grouped GEMM of the experts, with everything up to the second one in its epilogue.

    h = quantise(act(x w_gate^T + b_gate) * (x w_up^T + b_up))   per tile: ROWS tokens x 128 columns of gate and of up

Reads x (rows, H) at `order` (gathered, no permuted copy) or in place, w13 (L * 2I, H) through the tensor memory
accelerator, only of experts that have rows. Writes h (positions, I) and, in FP8, its scales: one group of 128 columns
is one tile wide, so its amax is known in registers. FP8 products are promoted to f32 after every 128 terms (one scale
block): the matrix unit adds with about 14 bits. Minimum bytes: active experts x 2 I H + x + h.

A tile never spans two experts; rows past the end of an expert are computed and not stored. With SWAP the weights are
the left operand, so that 16 tokens still fill the matrix unit: with fewer than 64 rows on the left Triton does not use
it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS, KernelFormat
from moe_mk.kernels.triton.launch import after_the_one_before, boxes, chained, readable_scales, resident_programs
from moe_mk.kernels.triton.numerics import as_scale, hidden_of, scale_of, to_dtype, to_e4m3
from moe_mk.kernels.triton.tile import BLOCK, Tile
from moe_mk.kernels.triton.tile_map import TileMap
from moe_mk.kernels.triton.weight_formats import (
    add_product,
    fp8_product,
    halved,
    packs,
    pinned,
    scale_codes,
    spread,
    with_bias,
    with_row_scales,
)

CLAMPED = ("swiglu_limit", "swiglu_oai", "silu_limit", "situ")


def grouped_w13(
    x: tuple[Tensor, Tensor | None],
    w13: tuple[Tensor, Tensor | None],
    h: tuple[Tensor, Tensor | None],
    tiles: TileMap,
    tile: Tile,
    *,
    order: Tensor | None = None,
    top_k: int = 1,
    activation: str = "silu",
    gated: bool = True,
    power_of_two: bool = False,
    format: KernelFormat | None = None,
    row_scales: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
) -> None:
    """Fill h (positions, I) from x (rows, H); each pair is values and scales, None for bf16.

    order: int32, the assignment at each position, row order // top_k of x; None: position p is row p of x. format: of
    the weights; None: FP8 where rows have scales, else bf16. row_scales: f32, one a row of w13, for formats with them.
    bias: f32, one a row of w13. alpha, limit: of the clamped activations; others ignore them.
    """
    (x_values, x_scales), (w_values, w_scales), (h_values, h_scales) = x, w13, h
    k, inner = x_values.shape[1], h_values.shape[1]
    format = format or KERNEL_FORMATS["plain" if x_scales is None else "fp8"]
    x_scales = readable_scales(x_scales) if x_scales is not None else x_values
    programs = resident_programs(x_values.device)
    _w13[(programs,)](
        x_values if order is not None else boxes(x_values, tile.rows, format.row_box), x_scales,
        boxes(w_values.view(-1, w_values.shape[-1]), BLOCK, format.box), w_scales if w_scales is not None else w_values,
        row_scales if row_scales is not None else tiles.count, bias if bias is not None else tiles.count,
        h_values, h_scales if h_scales is not None else h_values, order if order is not None else tiles.count,
        tiles.tiles_3X, tiles.count, tiles.tiles_3X.stride(0), k, inner, x_values.stride(0), x_scales.stride(0),
        x_scales.stride(1), *(h_scales.stride() if h_scales is not None else (0, 0)),
        ROWS=tile.rows, STEP=format.step, GROUPS=format.groups, TOP_K=top_k, PROGRAMS=programs, SWAP=tile.swap,
        FORMAT=format.name, GATHER=order is not None, EVEN=k % format.step == 0, ACTIVATION=activation, GATED=gated,
        POWER_OF_TWO=power_of_two, ALPHA=alpha, LIMIT=(limit or 0.0) if activation in CLAMPED else 0.0,
        BIASED=bias is not None, num_warps=tile.warps, num_stages=tile.stages, **chained(),
    )  # fmt: skip


@triton.jit
def load_rows(x, first, row, there, k0, k, stride, ROWS: tl.constexpr, STEP: tl.constexpr, GATHER: tl.constexpr,
              EVEN: tl.constexpr):  # fmt: skip
    """ROWS x STEP of the activations: gathered by pointer, or as one box."""
    if GATHER:
        column = k0 + tl.arange(0, STEP)
        inside = there[:, None] if EVEN else there[:, None] & (column < k)[None, :]
        return tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)
    else:
        return x.load([first, k0])


@triton.jit
def scale_offset(row, stride, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """Where the scales of rows begin: in 32 bits, for at most 2^31 scales, where mxfp4 leaves no register."""
    return row * stride if FORMAT == "mxfp4" and ROWS == 128 else row.to(tl.int64) * stride


@triton.jit
def scaled_sums(
    gate, up, x, x_scales_ptr, w, w_scales_ptr, w_blocks_ptr, first, row, there, expert, gate_row, up_row,
    rows_an_expert, steps, k, x_stride, x_scales_m, x_scales_k,
    ROWS: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr, SWAP: tl.constexpr, FORMAT: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Sum gate and up of FP8 times FP8: every product of 128 terms gets the scales of its row and of its block.

    w_blocks_ptr: f32 scales of 128 x 128 weights. w_scales_ptr: with mxfp4, the shifts of groups below them.
    """
    BOX: tl.constexpr = STEP // 2 if packs(FORMAT) else STEP
    HALVED: tl.constexpr = halved(FORMAT, ROWS, GATHER)
    LOADED: tl.constexpr = BOX if HALVED else STEP
    before = expert * rows_an_expert
    g_low, g_high = scale_codes(w_scales_ptr, expert, 0, steps, gate_row - before, rows_an_expert, GROUPS, FORMAT)
    u_low, u_high = scale_codes(w_scales_ptr, expert, 0, steps, up_row - before, rows_an_expert, GROUPS, FORMAT)
    up_scales = w_blocks_ptr + (up_row // 128).to(tl.int64) * steps
    gate_scales = w_blocks_ptr + (gate_row // 128).to(tl.int64) * steps
    row_scales = x_scales_ptr + scale_offset(row, x_scales_m, ROWS, FORMAT)
    s_x = as_scale(tl.load(row_scales, mask=there, other=0))
    s_g, s_u = tl.load(gate_scales), tl.load(up_scales)
    for step in range(steps):
        a = load_rows(x, first, row, there, step * STEP, k, x_stride, ROWS, LOADED, GATHER, EVEN)
        b = load_rows(x, first, row, there, step * STEP + BOX, k, x_stride, ROWS, BOX, GATHER, EVEN) if HALVED else a
        # Scales of the next step are on their way while this one multiplies.
        after = tl.minimum(step + 1, steps - 1)
        next_x = as_scale(tl.load(row_scales + after * x_scales_k, mask=there, other=0))
        next_g, next_u = tl.load(gate_scales + after), tl.load(up_scales + after)
        g_next = scale_codes(w_scales_ptr, expert, after, steps, gate_row - before, rows_an_expert, GROUPS, FORMAT)
        u_next = scale_codes(w_scales_ptr, expert, after, steps, up_row - before, rows_an_expert, GROUPS, FORMAT)
        if GATED:
            product = fp8_product(a, b, w.load([gate_row, step * BOX]), g_low, g_high, SWAP, FORMAT, HALVED)
            gate += product * spread(s_x * s_g, SWAP)
            gate = gate if SWAP else pinned(gate)
        product = fp8_product(a, b, w.load([up_row, step * BOX]), u_low, u_high, SWAP, FORMAT, HALVED)
        up += product * spread(s_x * s_u, SWAP)
        up = up if SWAP else pinned(up)
        s_x, s_g, s_u = next_x, next_g, next_u
        g_low, g_high = g_next
        u_low, u_high = u_next
    return gate, up


@triton.jit
def unscaled_sums(
    gate, up, x, w, w_scales_ptr, first, row, there, expert, gate_row, up_row, rows_an_expert, steps, k, x_stride,
    ROWS: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr, SWAP: tl.constexpr, FORMAT: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Sum gate and up where rows have no scales of groups: every format but FP8 times FP8."""
    PACKED: tl.constexpr = packs(FORMAT)
    BOX: tl.constexpr = STEP // 2 if PACKED else STEP
    before = expert * rows_an_expert
    g_low, g_high = scale_codes(w_scales_ptr, expert, 0, steps, gate_row - before, rows_an_expert, GROUPS, FORMAT)
    u_low, u_high = scale_codes(w_scales_ptr, expert, 0, steps, up_row - before, rows_an_expert, GROUPS, FORMAT)
    for step in range(steps):
        a = load_rows(x, first, row, there, step * STEP, k, x_stride, ROWS, BOX, GATHER, EVEN)
        b = load_rows(x, first, row, there, step * STEP + BOX, k, x_stride, ROWS, BOX, GATHER, EVEN) if PACKED else a
        # Scales of the next step are on their way while this one multiplies.
        after = tl.minimum(step + 1, steps - 1)
        g_next = scale_codes(w_scales_ptr, expert, after, steps, gate_row - before, rows_an_expert, GROUPS, FORMAT)
        u_next = scale_codes(w_scales_ptr, expert, after, steps, up_row - before, rows_an_expert, GROUPS, FORMAT)
        if GATED:
            gate = add_product(gate, a, b, w.load([gate_row, step * BOX]), g_low, g_high, SWAP, FORMAT)
        up = add_product(up, a, b, w.load([up_row, step * BOX]), u_low, u_high, SWAP, FORMAT)
        g_low, g_high = g_next
        u_low, u_high = u_next
    return gate, up


@triton.jit(do_not_specialize=["tiles_stride"])
def _w13(
    x, x_scales_ptr, w, w_scales_ptr, w_rows_ptr, bias_ptr, h_ptr, h_scales_ptr, order_ptr, tiles_ptr, count_ptr,
    tiles_stride, k, inner, x_stride, x_scales_m, x_scales_k, h_scales_m, h_scales_k,
    ROWS: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr, TOP_K: tl.constexpr, PROGRAMS: tl.constexpr,
    SWAP: tl.constexpr, FORMAT: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, POWER_OF_TWO: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    SCALED: tl.constexpr = FORMAT == "fp8" or FORMAT == "mxfp4"
    across, steps = tl.cdiv(inner, 128), tl.cdiv(k, STEP)
    halves = 2 if GATED else 1
    M: tl.constexpr = 128 if SWAP else ROWS
    N: tl.constexpr = ROWS if SWAP else 128
    ACC: tl.constexpr = tl.int32 if FORMAT == "int8" else tl.float32
    # Adjacent programs share an expert's rows and differ in its columns: every weight is read once.
    for t in tl.range(tl.program_id(0), tl.load(count_ptr) * across, PROGRAMS):
        tile, n = t // across, t % across
        expert = tl.load(tiles_ptr + tile)
        first = tl.load(tiles_ptr + tiles_stride + tile)
        end = tl.load(tiles_ptr + 2 * tiles_stride + tile)
        position = first + tl.arange(0, ROWS)
        there = position < end
        row = tl.load(order_ptr + position, mask=there, other=0) // TOP_K if GATHER else position
        gate_row = expert * inner * halves + n * 128
        up_row = gate_row + inner if GATED else gate_row
        gate, up = tl.zeros((M, N), ACC), tl.zeros((M, N), ACC)
        if SCALED:
            gate, up = scaled_sums(
                gate, up, x, x_scales_ptr, w, w_scales_ptr, w_scales_ptr if FORMAT == "fp8" else w_rows_ptr, first, row,
                there, expert, gate_row, up_row, inner * halves, steps, k, x_stride, x_scales_m, x_scales_k,
                ROWS, STEP, GROUPS, SWAP, FORMAT, GATHER, EVEN, GATED,
            )  # fmt: skip
        else:
            gate, up = unscaled_sums(
                gate, up, x, w, w_scales_ptr, first, row, there, expert, gate_row, up_row, inner * halves, steps, k,
                x_stride, ROWS, STEP, GROUPS, SWAP, FORMAT, GATHER, EVEN, GATED,
            )  # fmt: skip
            x_rows = x_scales_ptr + row.to(tl.int64) * x_scales_m
            gate = with_row_scales(gate, x_rows, there, w_rows_ptr, gate_row, inner - n * 128, SWAP, FORMAT)
            if BIASED:  # one sum is finished before the scales of the other are loaded
                gate = with_bias(gate, bias_ptr, gate_row, inner - n * 128, SWAP)
            up = with_row_scales(up, x_rows, there, w_rows_ptr, up_row, inner - n * 128, SWAP, FORMAT)
        if BIASED:
            if SCALED:
                gate = with_bias(gate, bias_ptr, gate_row, inner - n * 128, SWAP)
            up = with_bias(up, bias_ptr, up_row, inner - n * 128, SWAP)
        hidden = hidden_of(gate, up, ACTIVATION, ALPHA, LIMIT, GATED)
        if SWAP:
            hidden = tl.trans(hidden)
        column = n * 128 + tl.arange(0, 128)
        pointer = h_ptr + position[:, None].to(tl.int64) * inner + column[None, :]
        inside = there[:, None] & (column < inner)[None, :]
        if SCALED:
            scale = scale_of(tl.max(tl.abs(hidden), axis=1), POWER_OF_TWO)
            tl.store(pointer, to_e4m3(hidden * (1.0 / scale)[:, None]), mask=inside)
            offset = scale_offset(position, h_scales_m, ROWS, FORMAT)
            tl.store(h_scales_ptr + offset + n * h_scales_k, scale, mask=there)
        else:
            tl.store(pointer, to_dtype(hidden, h_ptr.dtype.element_ty), mask=inside)
