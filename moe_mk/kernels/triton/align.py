"""Sort assignments by local expert on the device, and split each expert's rows into tiles.

Reads ids (R, K), writes the order (R * K) and the tile list; assignments of -1 come last and are in no tile. The sort
is stable, so that equal inputs give equal bits. Up to SMALL assignments one program counts those of every slot, then
ranks them STEP at a time. With more, one program per chunk counts, a prefix sum runs over chunks and experts, and
chunks write their assignments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.launch import after_the_one_before, chained
from moe_mk.kernels.triton.tile_map import Empty, TileMap, empty_tile_map, write_tiles

SMALL = 1024
"""Assignments that one program sorts, in about 520 instructions for every STEP of them and 256 experts."""
STEP = 64
CHUNK = 128
COLUMNS = 8
CHUNKS_A_STEP = 128
COUNTS = ("num", "num_slots", "stride", "chunks")
"""Arguments that are bounds or the pitch of a list: every value uses the same compiled kernel."""


@dataclass(frozen=True)
class Alignment:
    """The order in which a grouped GEMM reads assignments."""

    order_N: Tensor
    """int32: the assignment r * K + k at each position; those of -1 are behind the last tile."""
    tiles: TileMap
    ids_RK: Tensor
    """The given ids; with shared experts one more column, of the last slot."""
    weights_RK: Tensor | None
    """The given weights; with shared experts one more column of ones."""


def align(
    ids_RK: Tensor, num_slots: int, tile_rows: int, *, empty: Empty = torch.empty, fuse_shared: Tensor | None = None
) -> Alignment:
    """Sort the assignments of received rows by local slot; no synchronisation, sizes depend only on shapes.

    fuse_shared: the routing weights, f32, if the last slot is applied to every row with weight 1 (shared experts).
    """
    aligned, given = room_of(ids_RK, num_slots, tile_rows, empty, fuse_shared), (ids_RK, fuse_shared)
    num, tiles = aligned.ids_RK.numel(), aligned.tiles
    if num <= SMALL:
        _align_small[(1,)](
            *pointers(aligned, given), num, num_slots, tiles.tiles_3X.stride(0), **sizes(num_slots),
            **choices(ids_RK, fuse_shared), TILE=tile_rows, num_warps=8, **chained(),
        )  # fmt: skip
    else:
        _align_chunks(aligned, given, num, num_slots, empty)
    return aligned


def room_of(ids_RK: Tensor, num_slots: int, tile_rows: int, empty: Empty, fuse_shared: Tensor | None) -> Alignment:
    """Memory for the results of `align`; ids and weights are the given ones without shared experts."""
    rows, top_k = ids_RK.shape
    all_ids, all_weights = ids_RK, fuse_shared
    if fuse_shared is not None:
        all_ids = empty((rows, top_k + 1), dtype=torch.int32, device=ids_RK.device)
        all_weights = empty((rows, top_k + 1), dtype=torch.float32, device=ids_RK.device)
    num = all_ids.numel()
    order_N = empty((max(num, 1),), dtype=torch.int32, device=ids_RK.device)
    tiles = empty_tile_map(num, num_slots, tile_rows, ids_RK.device, empty)
    return Alignment(order_N, tiles, all_ids, all_weights)


def pointers(aligned: Alignment, given: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    """The pointer arguments of the kernels, in order."""
    ids, weights = given
    all_weights = aligned.weights_RK if aligned.weights_RK is not None else aligned.order_N
    return (
        ids, weights if weights is not None else ids, aligned.ids_RK, all_weights, aligned.order_N,
        aligned.tiles.tiles_3X, aligned.tiles.count,
    )  # fmt: skip


def sizes(num_slots: int) -> dict[str, int]:
    """Assignments of a step and bins of the count of one program."""
    return {"STEP": STEP, "SLOTS": triton.next_power_of_2(num_slots + 1)}


def choices(ids_RK: Tensor, fuse_shared: Tensor | None) -> dict[str, int | bool]:
    """Experts per row, and whether the last slot is added."""
    return {"TOP_K": ids_RK.shape[1], "SHARED": fuse_shared is not None}


def _align_chunks(
    aligned: Alignment, given: tuple[Tensor, Tensor | None], num: int, num_slots: int, empty: Empty
) -> None:
    (ids_RK, fuse_shared), tiles = given, aligned.tiles
    chunks, slots, chosen = triton.cdiv(num, CHUNK), triton.next_power_of_2(num_slots + 1), choices(ids_RK, fuse_shared)
    before_XL = empty((chunks, slots), dtype=torch.int32, device=ids_RK.device)
    total_L = empty((slots,), dtype=torch.int32, device=ids_RK.device)
    first_L = empty((slots,), dtype=torch.int32, device=ids_RK.device)
    _count[(chunks,)](
        ids_RK, before_XL, num, num_slots, CHUNK=CHUNK, SLOTS=slots, num_warps=4, **chosen, **chained()
    )  # fmt: skip
    columns = min(COLUMNS, slots)
    _prefix_over_chunks[(slots // columns,)](
        before_XL, total_L, chunks, SLOTS=slots, COLUMNS=columns, STEP=CHUNKS_A_STEP, num_warps=4, **chained()
    )  # fmt: skip
    _prefix_over_slots[(1,)](
        total_L, first_L, tiles.tiles_3X, tiles.count, num_slots, tiles.tiles_3X.stride(0),
        TILE=tiles.tile_rows, SLOTS=slots, num_warps=4, **chained(),
    )  # fmt: skip
    _place[(chunks,)](
        *pointers(aligned, given)[:5], before_XL, first_L, num, num_slots,
        CHUNK=CHUNK, SLOTS=slots, num_warps=4, **chosen, **chained(),
    )  # fmt: skip


@triton.jit
def _slot(ids_ptr, index, num, num_slots, TOP_K: tl.constexpr, SHARED: tl.constexpr):
    """The slot of an assignment; the one past the last for -1 and for lanes past the end.

    SHARED: the last of a row's TOP_K + 1 assignments is to the last slot, whatever the ids are.
    """
    there = index < num
    if SHARED:
        k = index % (TOP_K + 1)
        chosen = tl.load(ids_ptr + index // (TOP_K + 1) * TOP_K + k, mask=there & (k < TOP_K), other=-1).to(tl.int32)
        slot = tl.where(there & (k == TOP_K), num_slots - 1, chosen)
    else:
        slot = tl.load(ids_ptr + index, mask=there, other=-1).to(tl.int32)
    return tl.where(slot < 0, num_slots, slot)


@triton.jit
def _write_all(
    weights_ptr, all_ids_ptr, all_weights_ptr, index, slot, num, num_slots, TOP_K: tl.constexpr, SHARED: tl.constexpr
):
    """Ids and weights including those of the last slot."""
    if SHARED:
        k, there = index % (TOP_K + 1), index < num
        weight = tl.load(weights_ptr + index // (TOP_K + 1) * TOP_K + k, mask=there & (k < TOP_K), other=1.0)
        tl.store(all_ids_ptr + index, tl.where(slot == num_slots, -1, slot), mask=there)
        tl.store(all_weights_ptr + index, weight, mask=there)


@triton.jit
def sort_small(
    ids_ptr, weights_ptr, all_ids_ptr, all_weights_ptr, order_ptr, tiles_ptr, count_ptr, num, num_slots, stride,
    STEP: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The complete alignment by one program: count every slot, then give each step the positions behind the last one.

    Assignments of -1 count as those of one more slot, as do lanes past the end: both come last, the latter unwritten.
    """
    expert, lane = tl.arange(0, SLOTS), tl.arange(0, STEP)
    rows = tl.zeros([SLOTS], tl.int32)
    for start in range(0, num, STEP):
        slot = _slot(ids_ptr, start + lane, num, num_slots, TOP_K, SHARED)
        rows += tl.histogram(slot, SLOTS)
    first = tl.cumsum(rows, axis=0) - rows
    write_tiles(tiles_ptr, count_ptr, first, tl.where(expert < num_slots, rows, 0), expert, stride, TILE)
    for start in range(0, num, STEP):
        index = start + lane
        slot = _slot(ids_ptr, index, num, num_slots, TOP_K, SHARED)
        _write_all(weights_ptr, all_ids_ptr, all_weights_ptr, index, slot, num, num_slots, TOP_K, SHARED)
        other = _slot(ids_ptr, start + lane, num, num_slots, TOP_K, SHARED)
        same = (slot[:, None] == other[None, :]) & (lane[None, :] < lane[:, None])
        position = tl.gather(first, slot, 0) + tl.sum(same.to(tl.int32), axis=1)
        tl.store(order_ptr + position, index, mask=index < num)
        first += tl.histogram(slot, SLOTS)


@triton.jit(do_not_specialize=COUNTS)
def _align_small(
    ids_ptr, weights_ptr, all_ids_ptr, all_weights_ptr, order_ptr, tiles_ptr, count_ptr, num, num_slots, stride,
    STEP: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    sort_small(
        ids_ptr, weights_ptr, all_ids_ptr, all_weights_ptr, order_ptr, tiles_ptr, count_ptr, num, num_slots, stride,
        STEP, TILE, SLOTS, TOP_K, SHARED,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def _count(
    ids_ptr, before_ptr, num, num_slots,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    slot = _slot(ids_ptr, index, num, num_slots, TOP_K, SHARED)
    tl.store(before_ptr + tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.histogram(slot, SLOTS))


@triton.jit(do_not_specialize=COUNTS)
def _prefix_over_chunks(before_ptr, total_ptr, chunks, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Replace each chunk's counts by the number of assignments to the same slot in earlier chunks."""
    after_the_one_before()
    slot = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, chunks, STEP):
        chunk = start + tl.arange(0, STEP)
        pointer = before_ptr + chunk[:, None] * SLOTS + slot[None, :]
        there = tl.broadcast_to(chunk[:, None] < chunks, [STEP, COLUMNS])
        count = tl.load(pointer, mask=there, other=0)
        tl.store(pointer, total[None, :] + tl.cumsum(count, axis=0) - count, mask=there)
        total += tl.sum(count, axis=0)
    tl.store(total_ptr + slot, total)


@triton.jit(do_not_specialize=COUNTS)
def _prefix_over_slots(
    total_ptr, first_ptr, tiles_ptr, count_ptr, num_slots, stride, TILE: tl.constexpr, SLOTS: tl.constexpr
):
    after_the_one_before()
    expert = tl.arange(0, SLOTS)
    total = tl.load(total_ptr + expert)
    first = tl.cumsum(total, axis=0) - total
    tl.store(first_ptr + expert, first)
    write_tiles(tiles_ptr, count_ptr, first, tl.where(expert < num_slots, total, 0), expert, stride, TILE)


@triton.jit(do_not_specialize=COUNTS)
def _place(
    ids_ptr, weights_ptr, all_ids_ptr, all_weights_ptr, order_ptr, before_ptr, first_ptr, num, num_slots,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    lane = tl.arange(0, CHUNK)
    index = tl.program_id(0) * CHUNK + lane
    slot = _slot(ids_ptr, index, num, num_slots, TOP_K, SHARED)
    _write_all(weights_ptr, all_ids_ptr, all_weights_ptr, index, slot, num, num_slots, TOP_K, SHARED)
    other = _slot(ids_ptr, tl.program_id(0) * CHUNK + lane, num, num_slots, TOP_K, SHARED)
    same = (slot[:, None] == other[None, :]) & (lane[None, :] < lane[:, None])
    position = tl.load(first_ptr + slot) + tl.load(before_ptr + tl.program_id(0) * SLOTS + slot)
    tl.store(order_ptr + position + tl.sum(same.to(tl.int32), axis=1), index, mask=index < num)
