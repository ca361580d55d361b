"""Device code shared by both Gluon GEMMs: the ring buffer, the position of a unit of work, and the epilogues.

A unit is 128 columns twice: of gate and of up in w13, two neighbouring blocks of 128 columns in w2. One producer warp
runs ahead over units and keeps a ring of shared memory full; the others multiply. full[s]: stage s is loaded;
empty[s]: every multiplier has finished with it. Both flip once a round, phase = (step / stages) & 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_mk.kernels.triton.numerics import as_scale, hidden_of, scale_of

W13, W2 = gl.constexpr(0), gl.constexpr(1)
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Waits for the warps of a partition. Triton 3.6 has `thread_barrier`, Triton 3.8 the same function as `barrier`."""


@constexpr_function
def row_pieces(left, right, axis, length):
    """A layout of (left, right) sums in which a thread holds `length` adjacent columns of a row, or as many as it has.

    axis: which of both are columns, the other one is of rows. Every warp keeps the sums that it has multiplied, 16 of
    each 64 on the left, so that only the threads of a warp exchange values. Lanes hold two more bits of the column.
    """
    sides = [[1 << bit for bit in range(side.bit_length() - 1)] for side in (left, right)]
    sides[0] = [bit for bit in sides[0] if bit not in (16, 32)]
    columns, rows = sides[axis], sides[1 - axis]
    held = min(length, left * right // 128).bit_length() - 1
    split = 5 - len(columns[held : held + 2])

    def bases(some_columns, some_rows):
        return [[0, c] if axis else [c, 0] for c in some_columns] + [[r, 0] if axis else [0, r] for r in some_rows]

    registers = bases(columns[:held] + columns[held + 2 :], rows[split:])
    lanes = bases(columns[held : held + 2], rows[:split])
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [left, right])


class Units(NamedTuple):
    """The work of a launch, which all warps of a program process in the same order."""

    tiles_ptr: Any
    tiles_stride: Any
    total: Any
    """Units: tiles times `across`."""
    assignments: Any
    """Rows of the output of the second product."""
    across: Any
    """Units side by side over the weight rows of a tile."""
    steps: Any
    """Of 128 terms, in the reduction."""
    rows_an_expert: Any
    second: Any
    """Weight rows from the first block of a unit to the second one."""


class Ring(NamedTuple):
    """Shared memory of every stage, and its barriers."""

    rows: Any
    one: Any
    two: Any
    full: Any
    empty: Any


class Scales(NamedTuple):
    """Of both operands: pointers and strides of those of token rows, and a pointer to those of weight blocks."""

    rows_ptr: Any
    rows_m: Any
    rows_k: Any
    weights_ptr: Any


class Out(NamedTuple):
    """The outputs."""

    ptr: Any
    width: Any
    scales_ptr: Any
    scales_m: Any
    scales_k: Any
    weights_ptr: Any
    """Routing weights, one an assignment."""


class How(NamedTuple):
    """Compile-time parameters of a kernel."""

    rows: Any
    """Token rows of a tile."""
    stages: Any
    mode: Any
    """W13 or W2."""
    gather: Any
    scatter: Any
    weighted: Any
    reduced: Any
    """Whether the second product writes the sums of one assignment a row."""
    top_k: Any
    programs: Any
    power_of_two: Any
    activation: Any
    alpha: Any
    limit: Any


@gluon.jit
def columns_of(n, mode):
    """First weight row of a unit's first half, within its expert."""
    return n * 128 if mode == 0 else n * 256


@gluon.jit
def after_the_one_before():
    """Wait for the previous kernel, then allow the next one to start."""
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def ring_of(boxes, ROWS: gl.constexpr, STAGES: gl.constexpr, COPIERS: gl.constexpr, READERS: gl.constexpr):
    """Shared memory for token rows and both blocks of weights in every stage.

    boxes: the descriptor of the weights, whose layout the rows share. COPIERS: arrivals that fill a stage, one for all
    boxes and one for each thread that gathers rows. READERS: those that empty it.
    """
    rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], boxes.layout)
    one = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], boxes.layout)
    two = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], boxes.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=COPIERS)
        mbarrier.init(empty.index(stage), count=READERS)
    fence_async_shared()
    return Ring(rows, one, two, full, empty)


@gluon.jit
def from_l2(pointer):
    """Load past the L1 cache, which may hold the value of an earlier replay of the same graph.

    Required for what is read before `gdc_wait`: the launch does not invalidate L1 after that point.
    """
    return gl.load(pointer, cache_modifier=".cg")


@gluon.jit
def locate(t, units):
    """Expert, first row, end of its rows and column block of a unit of work."""
    tile = t // units.across
    expert = from_l2(units.tiles_ptr + tile)
    first = from_l2(units.tiles_ptr + units.tiles_stride + tile)
    end = from_l2(units.tiles_ptr + 2 * units.tiles_stride + tile)
    return expert, first, end, t % units.across


@gluon.jit
def scale_at(pointer, mask):
    """Scales as f32, from f32 or from UE8M0 bytes."""
    return as_scale(gl.load(pointer, mask=mask, other=0))


@gluon.jit
def store(one, two, position, there, n, order_ptr, out, how, AXIS: gl.constexpr):
    """Finish a unit and write it. AXIS: along which axis of its sums the weight rows lie."""
    first = columns_of(n, how.mode)
    if how.mode == 0:
        hidden = hidden_of(one, two, how.activation, how.alpha, how.limit, True)
        scale = scale_of(gl.max(gl.abs(hidden), AXIS), how.power_of_two)
        value = (hidden * gl.expand_dims(1.0 / scale, AXIS)).to(gl.float8e4nv)
        gl.store(out.scales_ptr + position.to(gl.int64) * out.scales_m + n * out.scales_k, scale, mask=there)
        store_rows(value, out.ptr, out.width, position, there, first, AXIS)
    else:
        store_weighted(one, two, position, there, first, order_ptr, out, how, AXIS)


@gluon.jit
def store_weighted(one, two, position, there, first, order_ptr, out, how, AXIS: gl.constexpr):
    """Write both sums of the second product, which lie side by side, to the rows of their assignments."""
    target = gl.load(order_ptr + position, mask=there, other=0) if how.scatter else position
    if how.weighted:
        weight = gl.expand_dims(gl.load(out.weights_ptr + target, mask=there, other=0.0), AXIS)
        one, two = one * weight, two * weight
    store_rows(in_bf16(one, how), out.ptr, out.width, target, there, first, AXIS)
    store_rows(in_bf16(two, how), out.ptr, out.width, target, there, first + two.shape[AXIS], AXIS)


@gluon.jit
def in_bf16(sums, how):
    """Rounded once; the sum of one term is never -0."""
    value = sums.to(gl.bfloat16)
    if how.reduced:
        value = (value.to(gl.float32) + 0.0).to(gl.bfloat16)
    return value


@gluon.jit
def zero_dropped(order_ptr, units, out, how):
    """Zero the rows of assignments in no tile, which are last in the order, while the ring is filled."""
    LINE: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    last = units.total // units.across - 1
    ends = units.tiles_ptr + 2 * units.tiles_stride
    kept = gl.load(ends + last, mask=last >= 0, other=0, cache_modifier=".cg")
    for position in range(kept + gl.program_id(0), units.assignments, how.programs):
        row = out.ptr + gl.load(order_ptr + position).to(gl.int64) * out.width
        for start in range(0, out.width, 1024):
            column = start + gl.arange(0, 1024, LINE)
            gl.store(row + column, gl.zeros((1024,), gl.bfloat16, LINE), mask=column < out.width)


@gluon.jit
def store_rows(value, ptr, pitch, target, there, first, AXIS: gl.constexpr):
    """Write values to the rows `target` from column `first` on, 16 bytes a thread; 8 of the codes of 8 tokens.

    The threads of each warp exchange their values first. AXIS: along which axis of the values the columns lie.
    """
    PIECES: gl.constexpr = row_pieces(value.shape[0], value.shape[1], AXIS, 16 // value.dtype.itemsize)
    target = gl.convert_layout(target, gl.SliceLayout(AXIS, PIECES))
    there = gl.convert_layout(there, gl.SliceLayout(AXIS, PIECES))
    column = first + gl.arange(0, value.shape[AXIS], gl.SliceLayout(1 - AXIS, PIECES))
    pointer = ptr + gl.expand_dims(target.to(gl.int64) * pitch, AXIS) + gl.expand_dims(column, 1 - AXIS)
    gl.store(pointer, gl.convert_layout(value, PIECES), mask=gl.expand_dims(there, AXIS))


@gluon.jit
def copy_rows(x, x_stride, order_ptr, units, ring, how, WARPS: gl.constexpr):
    """Gather the rows of each tile by cp.async, 128 columns a step; rows that a tile lacks become zeros."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    it = 0
    for t in range(gl.program_id(0), units.total, how.programs):
        _expert, first, end, _n = locate(t, units)
        position = first + gl.arange(0, how.rows, gl.SliceLayout(1, SPREAD))
        there = position < end
        row = gl.load(order_ptr + position, mask=there, other=0) // how.top_k
        column = gl.arange(0, 128, gl.SliceLayout(0, SPREAD))
        pointer = x + row[:, None].to(gl.int64) * x_stride + column[None, :]
        for k in range(units.steps):
            stage, phase = it % how.stages, (it // how.stages) & 1
            mbarrier.wait(ring.empty.index(stage), phase ^ 1)
            async_copy.async_copy_global_to_shared(ring.rows.index(stage), pointer + k * 128, mask=there[:, None])
            async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
            it += 1
