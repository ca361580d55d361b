"""Both grouped GEMMs for many rows an expert, written for Hopper by hand: 128 rows x (128 + 128) columns a unit.

Two warpgroups multiply 64 rows each; one warp copies weights (and rows, where they lie one behind the other) through
the tensor memory accelerator, and where rows are gathered, four more warps copy them by cp.async. 256 columns a unit
halve the traffic from L2 compared with 128: 48 bytes a clock instead of 64. Each product of 128 terms is promoted to
f32 at once. In a tile of up to 64 rows the second warpgroup multiplies nothing, and rows that a tile lacks are gathered
as zeros, without a copy. Reads and writes what `grouped_w13` and `grouped_w2` do.

Both warpgroups take part in every unit: a unit of its own would be 256 registers of sums a thread. They may be as many
steps apart as there are stages, so that one multiplies during the first part of the other one's epilogue.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_mk.kernels.triton.weight_formats import pinned
from moe_mk_contrib.gluon.gluon_parts import columns_of, copy_rows, locate, scale_at, store, zero_dropped


@gluon.jit
def run(x, w, x_stride, order_ptr, units, ring, scales, out, how):
    """Divide the warps of a program; how: constants only."""
    if how.gather:
        gl.warp_specialize(
            [
                (_multiply, (order_ptr, units, ring, scales, out, how, 0)),
                (_multiply, (order_ptr, units, ring, scales, out, how, 1)),
                (copy_rows, (x, x_stride, order_ptr, units, ring, how, 4)),
                (_copy, (x, w, units, ring, how)),
            ],
            [4, 4, 1],
            [216, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (order_ptr, units, ring, scales, out, how, 0)),
                (_multiply, (order_ptr, units, ring, scales, out, how, 1)),
                (_copy, (x, w, units, ring, how)),
            ],
            [4, 1],
            [232, 40],
        )


@gluon.jit
def _copy(x, w, units, ring, how):
    it = 0
    for t in range(gl.program_id(0), units.total, how.programs):
        expert, first, _end, n = locate(t, units)
        row = expert * units.rows_an_expert + columns_of(n, how.mode)
        for k in range(units.steps):
            stage, phase = it % how.stages, (it // how.stages) & 1
            mbarrier.wait(ring.empty.index(stage), phase ^ 1)
            landed = ring.full.index(stage)
            mbarrier.expect(landed, 2 * 128 * 128 if how.gather else 3 * 128 * 128)
            tma.async_copy_global_to_shared(w, [row, k * 128], landed, ring.one.index(stage))
            tma.async_copy_global_to_shared(w, [row + units.second, k * 128], landed, ring.two.index(stage))
            if not how.gather:
                tma.async_copy_global_to_shared(x, [first, k * 128], landed, ring.rows.index(stage))
            it += 1


@gluon.jit
def _multiply(order_ptr, units, ring, scales, out, how, HALF: gl.constexpr):
    if how.reduced and HALF == 0:
        zero_dropped(order_ptr, units, out, how)
    it = 0
    for t in range(gl.program_id(0), units.total, how.programs):
        expert, first, end, n = locate(t, units)
        if first + HALF * 64 < end:
            _multiply_unit(order_ptr, units, ring, scales, out, how, HALF, expert, first, end, n, it)
        else:
            _release_unit(units, ring, how, it)
        it += units.steps


@gluon.jit
def _release_unit(units, ring, how, it):
    """Empty the stages of a unit without rows for this warpgroup: the matrix unit is left to the other one."""
    for _ in range(units.steps):
        mbarrier.wait(ring.full.index(it % how.stages), (it // how.stages) & 1)
        mbarrier.arrive(ring.empty.index(it % how.stages))
        it += 1


@gluon.jit
def _multiply_unit(order_ptr, units, ring, scales, out, how, HALF: gl.constexpr, expert, first, end, n, it):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    product = gl.zeros((64, 128), gl.float32, L)
    position = first + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    there = position < end
    row = gl.load(order_ptr + position, mask=there, other=0) // how.top_k if how.gather else position
    row_scales = scales.rows_ptr + row.to(gl.int64) * scales.rows_m
    block = (expert * units.rows_an_expert + columns_of(n, how.mode)) // 128
    one_scales = scales.weights_ptr + block * units.steps
    two_scales = one_scales + (units.second // 128) * units.steps
    one, two = gl.zeros((64, 128), gl.float32, L), gl.zeros((64, 128), gl.float32, L)
    s_x, s_1, s_2 = scale_at(row_scales, there), gl.load(one_scales), gl.load(two_scales)
    for k in range(units.steps):
        stage, phase = it % how.stages, (it // how.stages) & 1
        after = gl.minimum(k + 1, units.steps - 1)
        next_x = scale_at(row_scales + after * scales.rows_k, there)
        next_1, next_2 = gl.load(one_scales + after), gl.load(two_scales + after)
        mbarrier.wait(ring.full.index(stage), phase)
        if how.gather:  # cp.async wrote through the generic proxy, the matrix unit reads through the other one
            fence_async_shared()
        a = ring.rows.index(stage).slice(HALF * 64, 64)
        product = warpgroup_mma(a, ring.one.index(stage).permute((1, 0)), product, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, [product])
        one = pinned(one + product * (s_x * s_1)[:, None])
        product = warpgroup_mma(a, ring.two.index(stage).permute((1, 0)), product, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, [product])
        mbarrier.arrive(ring.empty.index(stage))
        two = pinned(two + product * (s_x * s_2)[:, None])
        s_x, s_1, s_2 = next_x, next_1, next_2
        it += 1
    store(one, two, position, there, n, order_ptr, out, how, 1)
