"""Scales in the tiles that Blackwell's tensor cores read; exact, with an inverse.

A tile holds 128 rows x 4 groups of one-byte scales, the row r of a tile at 16 (r mod 32) + 4 (r div 32). Scales are
converted at the experts, because transports send rows, which tiles do not have. Padding is zero.
Source: cuBLAS 12.8 (block scaling factors layout).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.errors import ShapeError, UnsupportedError

TILE_ROWS, TILE_COLUMNS, TILE_STRIPE = 128, 4, 32


def swizzled(scales: Tensor) -> Tensor:
    """The bytes of (rows, groups) scales in tiles, flat, both sides padded to whole tiles.

    Raises ShapeError for other than two dimensions, UnsupportedError for scales of more than one byte.
    """
    if scales.dim() != 2:
        raise ShapeError(f"scales have shape {tuple(scales.shape)}; tiles are of (rows, groups)")
    if scales.element_size() != 1:
        raise UnsupportedError(f"swizzling {scales.dtype} scales", ["tiles hold scales of one byte: UE8M0 or e4m3"])
    rows, groups = scales.shape
    tall, wide = -(-rows // TILE_ROWS), -(-groups // TILE_COLUMNS)
    padded = torch.zeros((tall * TILE_ROWS, wide * TILE_COLUMNS), dtype=torch.uint8, device=scales.device)
    padded[:rows, :groups] = scales.view(torch.uint8)
    tiles = padded.view(tall, TILE_ROWS // TILE_STRIPE, TILE_STRIPE, wide, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzled(octets: Tensor, rows: int, groups: int) -> Tensor:
    """The inverse of `swizzled`: (rows, groups) bytes."""
    tall, wide = -(-rows // TILE_ROWS), -(-groups // TILE_COLUMNS)
    tiles = octets.view(tall, wide, TILE_STRIPE, TILE_ROWS // TILE_STRIPE, TILE_COLUMNS)
    flat = tiles.permute(0, 3, 2, 1, 4).reshape(tall * TILE_ROWS, wide * TILE_COLUMNS)
    return flat[:rows, :groups].contiguous()
