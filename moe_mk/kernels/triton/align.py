"""Sort assignments by local expert on the device, and cut each expert's rows into tiles.

Reads ids (R, K), writes the order (R * K) and the tile list; assignments of -1 come last and are in no tile. Stable:
rows of one expert keep their order, so that equal inputs give equal bits. Up to SMALL assignments one program compares
all pairs; beyond, chunks count, a prefix over chunks and experts follows, and chunks place their assignments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.tile_map import Empty, TileMap, empty_tile_map, write_tiles

SMALL = 1024
CHUNK = 128
COLUMNS = 8
CHUNKS_A_STEP = 128


@dataclass(frozen=True)
class Alignment:
    """The order in which a grouped GEMM reads assignments."""

    order_N: Tensor
    """int32: the assignment r * K + k at each position; those of -1 are behind the last tile."""
    tiles: TileMap


def align(ids_RK: Tensor, num_slots: int, tile_rows: int, *, empty: Empty = torch.empty) -> Alignment:
    """Sort the assignments of received rows by local slot; no synchronisation, sizes depend on shapes alone."""
    num = ids_RK.numel()
    order_N = empty((max(num, 1),), dtype=torch.int32, device=ids_RK.device)
    tiles = empty_tile_map(num, num_slots, tile_rows, ids_RK.device, empty)
    if num <= SMALL:
        _align_small[(1,)](
            ids_RK, order_N, tiles.tiles_3X, tiles.count, num, num_slots, tiles.tiles_3X.stride(0),
            PAIRS=max(triton.next_power_of_2(num), 16), STEP=16, TILE=tile_rows,
            SLOTS=triton.next_power_of_2(num_slots + 1), num_warps=8,
        )  # fmt: skip
    else:
        _align_chunks(ids_RK, order_N, tiles, num, num_slots, empty)
    return Alignment(order_N, tiles)


def _align_chunks(ids_RK: Tensor, order_N: Tensor, tiles: TileMap, num: int, num_slots: int, empty: Empty) -> None:
    chunks, slots = triton.cdiv(num, CHUNK), triton.next_power_of_2(num_slots + 1)
    before_XL = empty((chunks, slots), dtype=torch.int32, device=ids_RK.device)
    total_L = empty((slots,), dtype=torch.int32, device=ids_RK.device)
    first_L = empty((slots,), dtype=torch.int32, device=ids_RK.device)
    _count[(chunks,)](ids_RK, before_XL, num, num_slots, CHUNK=CHUNK, SLOTS=slots, num_warps=4)
    columns = min(COLUMNS, slots)
    _prefix_over_chunks[(slots // columns,)](
        before_XL, total_L, chunks, SLOTS=slots, COLUMNS=columns, STEP=CHUNKS_A_STEP, num_warps=4
    )
    _prefix_over_slots[(1,)](
        total_L, first_L, tiles.tiles_3X, tiles.count, num_slots, tiles.tiles_3X.stride(0),
        TILE=tiles.tile_rows, SLOTS=slots, num_warps=4,
    )  # fmt: skip
    _place[(chunks,)](
        ids_RK, before_XL, first_L, order_N, num, num_slots, CHUNK=CHUNK, SLOTS=slots, num_warps=4
    )  # fmt: skip


@triton.jit
def _slot(ids_ptr, index, num, num_slots):
    """The slot of an assignment; the one past the last for -1 and for lanes past the end."""
    slot = tl.load(ids_ptr + index, mask=index < num, other=-1).to(tl.int32)
    return tl.where(slot < 0, num_slots, slot)


@triton.jit
def _align_small(
    ids_ptr, order_ptr, tiles_ptr, count_ptr, num, num_slots, stride,
    PAIRS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    index, expert = tl.arange(0, PAIRS), tl.arange(0, SLOTS)
    key = _slot(ids_ptr, index, num, num_slots) * PAIRS + index
    position = tl.zeros([PAIRS], tl.int32)
    first, rows = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.int32)
    for start in range(0, num, STEP):
        other = start + tl.arange(0, STEP)
        slot = _slot(ids_ptr, other, num, num_slots)
        there = other < num
        earlier = ((slot * PAIRS + other)[None, :] < key[:, None]) & there[None, :]
        position += tl.sum(earlier.to(tl.int32), axis=1)
        first += tl.sum(((slot[None, :] < expert[:, None]) & there[None, :]).to(tl.int32), axis=1)
        rows += tl.sum(((slot[None, :] == expert[:, None]) & there[None, :]).to(tl.int32), axis=1)
    tl.store(order_ptr + position, index, mask=index < num)
    write_tiles(tiles_ptr, count_ptr, first, tl.where(expert < num_slots, rows, 0), expert, stride, TILE)


@triton.jit
def _count(ids_ptr, before_ptr, num, num_slots, CHUNK: tl.constexpr, SLOTS: tl.constexpr):
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    slot = _slot(ids_ptr, index, num, num_slots)
    tl.store(before_ptr + tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.histogram(slot, SLOTS))


@triton.jit
def _prefix_over_chunks(before_ptr, total_ptr, chunks, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Turn each chunk's counts into how many of the same slot lie in earlier chunks."""
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


@triton.jit
def _prefix_over_slots(
    total_ptr, first_ptr, tiles_ptr, count_ptr, num_slots, stride, TILE: tl.constexpr, SLOTS: tl.constexpr
):
    expert = tl.arange(0, SLOTS)
    total = tl.load(total_ptr + expert)
    first = tl.cumsum(total, axis=0) - total
    tl.store(first_ptr + expert, first)
    write_tiles(tiles_ptr, count_ptr, first, tl.where(expert < num_slots, total, 0), expert, stride, TILE)


@triton.jit
def _place(ids_ptr, before_ptr, first_ptr, order_ptr, num, num_slots, CHUNK: tl.constexpr, SLOTS: tl.constexpr):
    lane = tl.arange(0, CHUNK)
    index = tl.program_id(0) * CHUNK + lane
    slot = _slot(ids_ptr, index, num, num_slots)
    other = _slot(ids_ptr, tl.program_id(0) * CHUNK + lane, num, num_slots)
    same = (slot[:, None] == other[None, :]) & (lane[None, :] < lane[:, None])
    position = tl.load(first_ptr + slot) + tl.load(before_ptr + tl.program_id(0) * SLOTS + slot)
    tl.store(order_ptr + position + tl.sum(same.to(tl.int32), axis=1), index, mask=index < num)
