"""Both grouped GEMMs for few rows an expert: the weights are the left operand, two blocks of 128 of their rows a tile.

One warpgroup multiplies (128 + 128) weight rows by 8, 16 or 32 tokens; one warp keeps a ring of 32 KiB steps full, far
ahead and across tiles, which is what holds the memory busy: 29 KiB on their way a multiprocessor suffice on an H200,
six steps are 192. Gathered rows are copied by the same warp. Reads and writes what `grouped_w13` and `grouped_w2` do.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_mk.kernels.triton.gluon_parts import (
    after_the_one_before,
    columns_of,
    launch_w2,
    launch_w13,
    locate,
    ring,
    scale_at,
    scale_of,
)
from moe_mk.kernels.triton.tile import Tile
from moe_mk.kernels.triton.tile_map import TileMap


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
) -> None:
    """As `grouped_w13.grouped_w13`, which serves what this does not: bf16, other activations, ragged columns."""
    launch_w13(
        _swapped, {"ROWS": tile.rows}, tile.rows, x, w13, h, tiles, tile, order=order, top_k=top_k,
        activation=activation, gated=gated, power_of_two=power_of_two,
    )  # fmt: skip


def grouped_w2(
    h: tuple[Tensor, Tensor | None],
    w2: tuple[Tensor, Tensor | None],
    y: Tensor,
    tiles: TileMap,
    tile: Tile,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """As `grouped_w2.grouped_w2`, which serves bf16 and widths that are no multiple of 256."""
    launch_w2(_swapped, {"ROWS": tile.rows}, tile.rows, h, w2, y, tiles, tile, order=order, weights=weights)


@gluon.jit
def _producer(
    given, ROWS: gl.constexpr, TOP_K: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
    GATHER: gl.constexpr,
):  # fmt: skip
    (
        x, w, order_ptr, rows_s, one_s, two_s, full, empty, tiles_ptr, tiles_stride, total, across, steps,
        rows_an_expert, second, x_stride,
    ) = given  # fmt: skip
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0])
    it = 0
    for t in range(gl.program_id(0), total, PROGRAMS):
        expert, first, end, n = locate(t, across, tiles_ptr, tiles_stride)
        weight_row = expert * rows_an_expert + columns_of(n, MODE)
        if GATHER:
            position = first + gl.arange(0, ROWS, gl.SliceLayout(1, SPREAD))
            row = gl.load(order_ptr + position, mask=position < end, other=0) // TOP_K
            column = gl.arange(0, 128, gl.SliceLayout(0, SPREAD))
            pointer = x + row[:, None].to(gl.int64) * x_stride + column[None, :]
        for k in range(steps):
            stage, phase = it % STAGES, (it // STAGES) & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            landed = full.index(stage)
            mbarrier.expect(landed, 2 * 128 * 128 if GATHER else (256 + ROWS) * 128)
            tma.async_copy_global_to_shared(w, [weight_row, k * 128], landed, one_s.index(stage))
            tma.async_copy_global_to_shared(w, [weight_row + second, k * 128], landed, two_s.index(stage))
            if GATHER:
                async_copy.async_copy_global_to_shared(rows_s.index(stage), pointer + k * 128)
                async_copy.mbarrier_arrive(landed, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x, [first, k * 128], landed, rows_s.index(stage))
            it += 1


@gluon.jit
def _multiplier(
    given, ROWS: gl.constexpr, TOP_K: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
    GATHER: gl.constexpr, SCATTER: gl.constexpr, WEIGHTED: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    (
        x_scales_ptr, w_scales_ptr, out_ptr, out_scales_ptr, order_ptr, weights_ptr, rows_s, one_s, two_s, full, empty,
        tiles_ptr, tiles_stride, total, across, steps, rows_an_expert, second, width, x_scales_m, x_scales_k,
        out_scales_m, out_scales_k,
    ) = given  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    ROW: gl.constexpr = gl.SliceLayout(0, L)
    it = 0
    for t in range(gl.program_id(0), total, PROGRAMS):
        expert, first, end, n = locate(t, across, tiles_ptr, tiles_stride)
        position = first + gl.arange(0, ROWS, ROW)
        there = position < end
        row = gl.load(order_ptr + position, mask=there, other=0) // TOP_K if GATHER else position
        row_scales = x_scales_ptr + row.to(gl.int64) * x_scales_m
        one_scales = w_scales_ptr + ((expert * rows_an_expert + columns_of(n, MODE)) // 128) * steps
        two_scales = one_scales + (second // 128) * steps
        one, two = gl.zeros((128, ROWS), gl.float32, L), gl.zeros((128, ROWS), gl.float32, L)
        s_x, s_1, s_2 = scale_at(row_scales, there), gl.load(one_scales), gl.load(two_scales)
        for k in range(steps):
            stage, phase = it % STAGES, (it // STAGES) & 1
            after = gl.minimum(k + 1, steps - 1)
            next_x = scale_at(row_scales + after * x_scales_k, there)
            next_1, next_2 = gl.load(one_scales + after), gl.load(two_scales + after)
            mbarrier.wait(full.index(stage), phase)
            if GATHER:  # cp.async wrote through the generic proxy, the matrix unit reads through the other one
                fence_async_shared()
            tokens = rows_s.index(stage).permute((1, 0))
            zero = gl.zeros((128, ROWS), gl.float32, L)
            a = warpgroup_mma(one_s.index(stage), tokens, zero, use_acc=False, is_async=True)
            b = warpgroup_mma(two_s.index(stage), tokens, zero, use_acc=False, is_async=True)
            a, b = warpgroup_mma_wait(0, [a, b])
            mbarrier.arrive(empty.index(stage))
            one += a * (s_x * s_1)[None, :]
            two += b * (s_x * s_2)[None, :]
            s_x, s_1, s_2 = next_x, next_1, next_2
            it += 1
        column = columns_of(n, MODE) + gl.arange(0, 128, gl.SliceLayout(1, L))
        if MODE == 0:
            hidden = one * two / (1.0 + gl.exp(-one))
            scale = scale_of(gl.max(gl.abs(hidden), 0), POWER_OF_TWO)
            value = (hidden * (1.0 / scale)[None, :]).to(gl.float8e4nv)
            gl.store(out_ptr + position[None, :].to(gl.int64) * width + column[:, None], value, mask=there[None, :])
            gl.store(out_scales_ptr + position.to(gl.int64) * out_scales_m + n * out_scales_k, scale, mask=there)
        else:
            target = gl.load(order_ptr + position, mask=there, other=0) if SCATTER else position
            if WEIGHTED:
                weight = gl.load(weights_ptr + target, mask=there, other=0.0)
                one, two = one * weight[None, :], two * weight[None, :]
            pointer = out_ptr + target[None, :].to(gl.int64) * width + column[:, None]
            gl.store(pointer, one.to(gl.bfloat16), mask=there[None, :])
            gl.store(pointer + 128, two.to(gl.bfloat16), mask=there[None, :])


@gluon.jit
def _swapped(
    x, x_scales_ptr, w, w_scales_ptr, out_ptr, out_scales_ptr, order_ptr, weights_ptr, tiles_ptr, count_ptr,
    tiles_stride, across, steps, rows_an_expert, second, width, x_stride, x_scales_m, x_scales_k, out_scales_m,
    out_scales_k,
    ROWS: gl.constexpr, TOP_K: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
    GATHER: gl.constexpr, SCATTER: gl.constexpr, WEIGHTED: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    # The producer arrives once for its boxes; each of its 32 threads once more for the rows it gathers.
    rows_s, one_s, two_s, full, empty = ring(w, ROWS, STAGES, 33 if GATHER else 1, 1)
    after_the_one_before()
    total = gl.load(count_ptr) * across
    multiply = (
        x_scales_ptr, w_scales_ptr, out_ptr, out_scales_ptr, order_ptr, weights_ptr, rows_s, one_s, two_s, full, empty,
        tiles_ptr, tiles_stride, total, across, steps, rows_an_expert, second, width, x_scales_m, x_scales_k,
        out_scales_m, out_scales_k,
    )  # fmt: skip
    copy = (
        x, w, order_ptr, rows_s, one_s, two_s, full, empty, tiles_ptr, tiles_stride, total, across, steps,
        rows_an_expert, second, x_stride,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _multiplier,
                (multiply, ROWS, TOP_K, PROGRAMS, STAGES, MODE, GATHER, SCATTER, WEIGHTED, POWER_OF_TWO),
            ),
            (_producer, (copy, ROWS, TOP_K, PROGRAMS, STAGES, MODE, GATHER)),
        ],
        [1],
        [64],
    )
