"""The tile list of a grouped GEMM, built on the device without copying counts to the host.

Reads assignments of each expert (L), writes a list of tiles (expert, first row, end row) and their number. The list
has the size of the worst routing; persistent kernels stop at the number of tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.launch import after_the_one_before, chained

Empty = Callable[..., Tensor]
"""torch.empty, or a compatible allocator."""


@dataclass(frozen=True)
class TileMap:
    """Tiles of up to `tile_rows` rows, none across two experts; every row of an expert is in exactly one."""

    tiles_3X: Tensor
    """int32 (3, worst case): expert, first row, end of the expert's rows. Undefined beyond the count."""
    count: Tensor
    """int32 (1,): the number of tiles."""
    tile_rows: int


def worst_tiles(num_rows: int, num_slots: int, tile_rows: int) -> int:
    """The most tiles for any routing of this many rows: each expert may have one partial tile."""
    return max(min(num_rows, num_rows // tile_rows + num_slots), 1)


def empty_tile_map(
    num_rows: int, num_slots: int, tile_rows: int, device: torch.device, empty: Empty = torch.empty
) -> TileMap:
    """Memory for the tiles of the worst routing."""
    tiles_3X = empty((3, worst_tiles(num_rows, num_slots, tile_rows)), dtype=torch.int32, device=device)
    return TileMap(tiles_3X, empty((1,), dtype=torch.int32, device=device), tile_rows)


def tile_map(
    counts_L: Tensor, num_rows: int, tile_rows: int, *, block: int | None = None, empty: Empty = torch.empty
) -> TileMap:
    """Split the rows of each expert into tiles.

    num_rows: of all experts, for the size of the list; with `block` the rows of all blocks. block: expert l starts at
    row l * block ("batched"); None: experts are contiguous ("grouped").
    """
    made = empty_tile_map(num_rows, counts_L.shape[0], tile_rows, counts_L.device, empty)
    _tile_map[(1,)](
        counts_L, made.tiles_3X, made.count, counts_L.shape[0], made.tiles_3X.stride(0), block or 0,
        TILE=tile_rows, SLOTS=triton.next_power_of_2(counts_L.shape[0]), BLOCKED=block is not None, num_warps=4,
        **chained(),
    )  # fmt: skip
    return made


@triton.jit
def write_tiles(tiles_ptr, count_ptr, first, rows, expert, stride, TILE: tl.constexpr):
    """Write the tiles of experts that start at `first` and have `rows` rows, in the order of experts."""
    tiles = (rows + TILE - 1) // TILE
    place = tl.cumsum(tiles, axis=0) - tiles
    for t in range(tl.max(tiles)):
        there = t < tiles
        tl.store(tiles_ptr + place + t, expert, mask=there)
        tl.store(tiles_ptr + stride + place + t, first + t * TILE, mask=there)
        tl.store(tiles_ptr + 2 * stride + place + t, first + rows, mask=there)
    tl.store(count_ptr, tl.sum(tiles))


@triton.jit(do_not_specialize=["stride", "block"])
def _tile_map(
    counts_ptr, tiles_ptr, count_ptr, num_slots, stride, block,
    TILE: tl.constexpr, SLOTS: tl.constexpr, BLOCKED: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    expert = tl.arange(0, SLOTS)
    rows = tl.load(counts_ptr + expert, mask=expert < num_slots, other=0).to(tl.int32)
    first = expert * block if BLOCKED else tl.cumsum(rows, axis=0) - rows
    write_tiles(tiles_ptr, count_ptr, first, rows, expert, stride, TILE)
