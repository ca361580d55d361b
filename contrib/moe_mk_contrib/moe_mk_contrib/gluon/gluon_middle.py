"""Both grouped GEMMs for up to 64 rows an expert: more than `gluon_decode` is for, too few for `gluon_prefill`.

A unit is 64 rows x (128 + 128) columns. Both warpgroups multiply all of its rows by 128 weight rows each: in w13 by 64
of gate and the same 64 of up, in w2 by one of the two blocks. One of them adds its products to f32 sums while the
matrix unit executes those of the other one; sums and epilogue are half of those of a warpgroup with a unit of its own.
The 128 weight rows of a warpgroup lie together, so that a product is 128 columns wide: two of 64 would read the rows
from shared memory twice. One warp copies weights, as four boxes of 64 rows a step, and where rows are gathered, another
one copies them by cp.async, so that weights never wait for the list of rows: up to this size memory is the limit. A
step is 32 KiB of weights and 8 KiB of rows. Reads and writes what `grouped_w13` and `grouped_w2` do.

In w13 the scale of 128 columns needs the amax of both warpgroups: each writes its own to shared memory and waits until
both have. Units alternate between two places, so that none is overwritten before it is read.

The second product fills its ring with weights while the first one drains, as in `gluon_decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from moe_mk.kernels.triton.numerics import hidden_of, scale_of
from moe_mk.kernels.triton.weight_formats import pinned
from moe_mk_contrib.gluon.gluon_parts import (
    after_the_one_before,
    columns_of,
    copy_rows,
    locate,
    scale_at,
    store_rows,
    store_weighted,
    thread_barrier,
    zero_dropped,
)

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
"""Of one of both blocks in a warpgroup."""


class Exchange(NamedTuple):
    """Where both warpgroups find the amax of the other one."""

    amax: Any
    """f32 (4, 64): by parity of the unit and warpgroup."""
    written: Any
    """Barrier of both."""


@gluon.jit
def run(x, w, x_stride, order_ptr, units, ring, scales, out, how):
    """Divide the warps of a program; how: constants only."""
    amax = gl.allocate_shared_memory(gl.float32, [4, how.rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(written, count=2)
    fence_async_shared()
    exchange = Exchange(amax, written)
    if how.gather:
        gl.warp_specialize(
            [
                (_multiply, (order_ptr, units, ring, exchange, scales, out, how, 0)),
                (_multiply, (order_ptr, units, ring, exchange, scales, out, how, 1)),
                (_copy, (x, w, units, ring, how)),
                (copy_rows, (x, x_stride, order_ptr, units, ring, how, 1)),
            ],
            [4, 1, 1],
            [208, 88, 88],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (order_ptr, units, ring, exchange, scales, out, how, 0)),
                (_multiply, (order_ptr, units, ring, exchange, scales, out, how, 1)),
                (_copy, (x, w, units, ring, how)),
            ],
            [4, 1],
            [208, 88],
        )


@gluon.jit
def _copy(x, w, units, ring, how):
    ahead = 0
    if how.mode == 1:
        ahead = gl.minimum(units.steps, how.stages)
        if gl.program_id(0) < units.total:
            expert, _first, _end, n = locate(gl.program_id(0), units)
            for k in range(ahead):
                _copy_weights(w, expert * units.rows_an_expert + columns_of(n, how.mode), k, units, ring, k, how)
        gdc_wait()
    it = 0
    for t in range(gl.program_id(0), units.total, how.programs):
        expert, first, _end, n = locate(t, units)
        row = expert * units.rows_an_expert + columns_of(n, how.mode)
        for k in range(units.steps):
            stage, phase = it % how.stages, (it // how.stages) & 1
            if it >= ahead:
                mbarrier.wait(ring.empty.index(stage), phase ^ 1)
                _copy_weights(w, row, k, units, ring, stage, how)
            if not how.gather:
                tma.async_copy_global_to_shared(x, [first, k * 128], ring.full.index(stage), ring.rows.index(stage))
            it += 1


@gluon.jit
def _copy_weights(w, row, k, units, ring, stage, how):
    """Both warpgroups' 128 weight rows: 64 of each block in w13, all of one block in w2."""
    across = 64 if how.mode == 0 else units.second
    behind = units.second if how.mode == 0 else 64
    loaded = ring.full.index(stage)
    mbarrier.expect(loaded, 256 * 128 if how.gather else (256 + how.rows) * 128)
    one = ring.one._reinterpret(gl.float8e4nv, [2 * how.stages, 64, 128], w.layout)
    two = ring.two._reinterpret(gl.float8e4nv, [2 * how.stages, 64, 128], w.layout)
    tma.async_copy_global_to_shared(w, [row, k * 128], loaded, one.index(2 * stage))
    tma.async_copy_global_to_shared(w, [row + behind, k * 128], loaded, one.index(2 * stage + 1))
    tma.async_copy_global_to_shared(w, [row + across, k * 128], loaded, two.index(2 * stage))
    tma.async_copy_global_to_shared(w, [row + across + behind, k * 128], loaded, two.index(2 * stage + 1))


@gluon.jit
def _multiply(order_ptr, units, ring, exchange, scales, out, how, HALF: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    product = gl.zeros((how.rows, 128), gl.float32, L)
    weights = ring.one if HALF == 0 else ring.two
    if how.mode == 1:
        after_the_one_before()
    if how.reduced and HALF == 0:
        zero_dropped(order_ptr, units, out, how)
    it = 0
    for t in range(gl.program_id(0), units.total, how.programs):
        expert, first, end, n = locate(t, units)
        position = first + gl.arange(0, how.rows, gl.SliceLayout(1, SUMS))
        there = position < end
        row = gl.load(order_ptr + position, mask=there, other=0) // how.top_k if how.gather else position
        row_scales = scales.rows_ptr + row.to(gl.int64) * scales.rows_m
        block = (expert * units.rows_an_expert + columns_of(n, how.mode)) // 128
        if how.mode == 1 and HALF == 1:
            block += units.second // 128
        one_scales = scales.weights_ptr + block * units.steps
        two_scales = one_scales + (units.second // 128) * units.steps if how.mode == 0 else one_scales
        one, two = gl.zeros((how.rows, 64), gl.float32, SUMS), gl.zeros((how.rows, 64), gl.float32, SUMS)
        s_x, s_1, s_2 = scale_at(row_scales, there), gl.load(one_scales), gl.load(two_scales)
        for k in range(units.steps):
            stage, phase = it % how.stages, (it // how.stages) & 1
            after = gl.minimum(k + 1, units.steps - 1)
            next_x = scale_at(row_scales + after * scales.rows_k, there)
            next_1, next_2 = gl.load(one_scales + after), gl.load(two_scales + after)
            mbarrier.wait(ring.full.index(stage), phase)
            if how.gather:  # cp.async wrote through the generic proxy, the matrix unit reads through the other one
                fence_async_shared()
            tokens, columns = ring.rows.index(stage), weights.index(stage).permute((1, 0))
            product = warpgroup_mma(tokens, columns, product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, [product])
            mbarrier.arrive(ring.empty.index(stage))
            a, b = product.reshape((how.rows, 2, 64)).permute((0, 2, 1)).split()
            a, b = gl.convert_layout(a, SUMS, assert_trivial=True), gl.convert_layout(b, SUMS, assert_trivial=True)
            one = pinned(one + a * (s_x * s_1)[:, None])
            two = pinned(two + b * (s_x * s_2)[:, None])
            s_x, s_1, s_2 = next_x, next_1, next_2
            it += 1
        if how.mode == 0:
            _store_hidden(one, two, position, there, n, (t // how.programs) & 1, exchange, out, how, HALF)
        else:
            store_weighted(one, two, position, there, columns_of(n, how.mode) + HALF * 128, order_ptr, out, how, 1)


@gluon.jit
def _store_hidden(gate, up, position, there, n, parity, exchange, out, how, HALF: gl.constexpr):
    """Finish a unit of w13 and write 64 columns of it."""
    hidden = hidden_of(gate, up, how.activation, how.alpha, how.limit, True)
    own = gl.max(gl.abs(hidden), 1)
    exchange.amax.index(2 * parity + HALF).store(own)
    thread_barrier()
    mbarrier.arrive(exchange.written)
    mbarrier.wait(exchange.written, parity)
    other = exchange.amax.index(2 * parity + 1 - HALF).load(gl.SliceLayout(1, SUMS))
    scale = scale_of(gl.maximum(own, other), how.power_of_two)
    if HALF == 0:
        gl.store(out.scales_ptr + position.to(gl.int64) * out.scales_m + n * out.scales_k, scale, mask=there)
    value = (hidden * (1.0 / scale)[:, None]).to(gl.float8e4nv)
    store_rows(value, out.ptr, out.width, position, there, n * 128 + HALF * 64, 1)
