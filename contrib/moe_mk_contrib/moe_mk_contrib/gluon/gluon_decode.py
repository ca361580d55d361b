"""Both grouped GEMMs for few rows an expert: the weights are the left operand, two blocks of 128 of their rows a unit.

One warpgroup multiplies (128 + 128) weight rows by 8, 16 or 32 tokens; one warp keeps a ring of 32 KiB steps full, far
ahead and across units, which is what holds the memory busy: 29 KiB on their way a multiprocessor suffice on an H200,
six steps are 192. Gathered rows are copied by the same warp. Reads and writes what `grouped_w13` and `grouped_w2` do.

The second product begins while the first one drains: its list of tiles was complete before the first one let it start,
and weights never change, so the ring is filled with them ahead of the wait; what the first one writes is read after it.
"""

from __future__ import annotations

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
from triton.language.extra.cuda import gdc_wait

from moe_mk_contrib.gluon.gluon_parts import after_the_one_before, columns_of, locate, scale_at, store, zero_dropped


@gluon.jit
def run(x, w, x_stride, order_ptr, units, ring, scales, out, how):
    """Divide the warps of a program; how: constants only."""
    gl.warp_specialize(
        [
            (_multiply, (order_ptr, units, ring, scales, out, how)),
            (_copy, (x, w, x_stride, order_ptr, units, ring, how)),
        ],
        [1],
        [64],
    )


@gluon.jit
def _copy(x, w, x_stride, order_ptr, units, ring, how):
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0])
    ahead = 0
    if how.mode == 1:
        ahead = gl.minimum(units.steps, how.stages)
        _copy_weights_ahead(w, units, ring, ahead, how)
        gdc_wait()
    it = 0
    for t in range(gl.program_id(0), units.total, how.programs):
        expert, first, end, n = locate(t, units)
        weight_row = expert * units.rows_an_expert + columns_of(n, how.mode)
        if how.gather:
            position = first + gl.arange(0, how.rows, gl.SliceLayout(1, SPREAD))
            there = position < end
            row = gl.load(order_ptr + position, mask=there, other=0) // how.top_k
            column = gl.arange(0, 128, gl.SliceLayout(0, SPREAD))
            pointer = x + row[:, None].to(gl.int64) * x_stride + column[None, :]
        for k in range(units.steps):
            stage, phase = it % how.stages, (it // how.stages) & 1
            landed = ring.full.index(stage)
            if it >= ahead:
                mbarrier.wait(ring.empty.index(stage), phase ^ 1)
                _copy_weights(w, weight_row, k, units, ring, stage, how)
            if how.gather:
                async_copy.async_copy_global_to_shared(ring.rows.index(stage), pointer + k * 128, mask=there[:, None])
                async_copy.mbarrier_arrive(landed, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x, [first, k * 128], landed, ring.rows.index(stage))
            it += 1


@gluon.jit
def _copy_weights(w, row, k, units, ring, stage, how):
    landed = ring.full.index(stage)
    mbarrier.expect(landed, 2 * 128 * 128 if how.gather else (256 + how.rows) * 128)
    tma.async_copy_global_to_shared(w, [row, k * 128], landed, ring.one.index(stage))
    tma.async_copy_global_to_shared(w, [row + units.second, k * 128], landed, ring.two.index(stage))


@gluon.jit
def _copy_weights_ahead(w, units, ring, ahead, how):
    t = gl.program_id(0)
    if t < units.total:
        expert, _first, _end, n = locate(t, units)
        for k in range(ahead):
            _copy_weights(w, expert * units.rows_an_expert + columns_of(n, how.mode), k, units, ring, k, how)


@gluon.jit
def _multiply(order_ptr, units, ring, scales, out, how):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.rows, 32])
    if how.mode == 1:
        after_the_one_before()
    if how.reduced:
        zero_dropped(order_ptr, units, out, how)
    it = 0
    for t in range(gl.program_id(0), units.total, how.programs):
        expert, first, end, n = locate(t, units)
        position = first + gl.arange(0, how.rows, gl.SliceLayout(0, L))
        there = position < end
        row = gl.load(order_ptr + position, mask=there, other=0) // how.top_k if how.gather else position
        row_scales = scales.rows_ptr + row.to(gl.int64) * scales.rows_m
        block = (expert * units.rows_an_expert + columns_of(n, how.mode)) // 128
        one_scales = scales.weights_ptr + block * units.steps
        two_scales = one_scales + (units.second // 128) * units.steps
        one, two = gl.zeros((128, how.rows), gl.float32, L), gl.zeros((128, how.rows), gl.float32, L)
        s_x, s_1, s_2 = scale_at(row_scales, there), gl.load(one_scales), gl.load(two_scales)
        for k in range(units.steps):
            stage, phase = it % how.stages, (it // how.stages) & 1
            after = gl.minimum(k + 1, units.steps - 1)
            next_x = scale_at(row_scales + after * scales.rows_k, there)
            next_1, next_2 = gl.load(one_scales + after), gl.load(two_scales + after)
            mbarrier.wait(ring.full.index(stage), phase)
            if how.gather:  # cp.async wrote through the generic proxy, the matrix unit reads through the other one
                fence_async_shared()
            tokens = ring.rows.index(stage).permute((1, 0))
            zero = gl.zeros((128, how.rows), gl.float32, L)
            a = warpgroup_mma(ring.one.index(stage), tokens, zero, use_acc=False, is_async=True)
            b = warpgroup_mma(ring.two.index(stage), tokens, zero, use_acc=False, is_async=True)
            a, b = warpgroup_mma_wait(0, [a, b])
            mbarrier.arrive(ring.empty.index(stage))
            one += a * (s_x * s_1)[None, :]
            two += b * (s_x * s_2)[None, :]
            s_x, s_1, s_2 = next_x, next_1, next_2
            it += 1
        store(one, two, position, there, n, order_ptr, out, how, 0)
