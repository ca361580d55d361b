"""Memory layouts of scales for kernels; every conversion is exact and has an inverse.

    row_major        (m, g), as quantised and transported
    column_major     g contiguous columns of m
    tma_aligned      column-major, each column padded to start at a multiple of 16 bytes (DeepGEMM on Hopper)
    packed           four power-of-two scales of a row in one int32, columns padded to 16 bytes (DeepGEMM on Blackwell)
    swizzled         tiles of 128 x 4 bytes, in each the row r at 16 (r mod 32) + 4 (r div 32) (Blackwell tensor cores)

Scales are converted at the experts, because transports send rows, which swizzled tiles do not have. Padding is zero.
Sources: DeepGEMM (`transform_sf_into_required_layout`), cuBLAS 12.8 (block scaling factors layout).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from moe_mk.errors import ShapeError, UnsupportedError

TMA_BYTES = 16
TILE_ROWS, TILE_COLUMNS, TILE_STRIPE = 128, 4, 32


class ScaleLayout(Enum):
    """The memory order of (row, group) scales."""

    ROW_MAJOR = "row_major"
    COLUMN_MAJOR = "column_major"
    TMA_ALIGNED = "tma_aligned"
    PACKED = "packed"
    SWIZZLED = "swizzled"


@dataclass(frozen=True)
class LaidOutScales:
    """Scales in a layout, with the data needed to invert it."""

    data: Tensor
    layout: ScaleLayout
    shape: tuple[int, int]
    """(rows, groups) of the scales themselves, without padding."""
    dtype: torch.dtype

    def row_major(self) -> Tensor:
        """The scales as (rows, groups), bit for bit."""
        rows, groups = self.shape
        if self.layout is ScaleLayout.PACKED:
            words = torch.empty(self.data.shape, dtype=torch.int32, device=self.data.device).copy_(self.data)
            octets = words.view(torch.uint8)[:rows, :groups]
            return octets.contiguous().view(self.dtype)
        if self.layout is ScaleLayout.SWIZZLED:
            tall, wide = -(-rows // TILE_ROWS), -(-groups // TILE_COLUMNS)
            tiles = self.data.view(tall, wide, TILE_STRIPE, TILE_ROWS // TILE_STRIPE, TILE_COLUMNS)
            flat = tiles.permute(0, 3, 2, 1, 4).reshape(tall * TILE_ROWS, wide * TILE_COLUMNS)
            return flat[:rows, :groups].contiguous().view(self.dtype)
        return torch.empty((rows, groups), dtype=self.dtype, device=self.data.device).copy_(self.data)


def lay_out(scales: Tensor, layout: ScaleLayout) -> LaidOutScales:
    """Convert (rows, groups) scales to a layout.

    packed requires UE8M0 scales, swizzled scales of one byte. Raises ShapeError for other than two dimensions,
    UnsupportedError for a dtype that the layout does not support.
    """
    if scales.dim() != 2:
        raise ShapeError(f"scales have shape {tuple(scales.shape)}; a layout is of (rows, groups)")
    rows, groups = scales.shape
    if layout is ScaleLayout.ROW_MAJOR:
        data = scales.contiguous()
    elif layout is ScaleLayout.PACKED:
        data = _packed(scales)
    elif layout is ScaleLayout.SWIZZLED:
        data = _swizzled(scales)
    else:
        step = TMA_BYTES // scales.element_size() if layout is ScaleLayout.TMA_ALIGNED else 1
        data = _columns(scales, -(-rows // step) * step)
    return LaidOutScales(data, layout, (rows, groups), scales.dtype)


def _columns(scales: Tensor, stride: int) -> Tensor:
    """A copy of (rows, groups) whose columns are `stride` elements apart."""
    rows, groups = scales.shape
    memory = torch.zeros((groups, stride), dtype=torch.uint8, device=scales.device)
    if scales.element_size() > 1:
        memory = torch.zeros((groups, stride), dtype=scales.dtype, device=scales.device)
        memory[:, :rows] = scales.T
        return memory.T[:rows]
    memory[:, :rows] = scales.view(torch.uint8).T
    return memory.view(scales.dtype).T[:rows]


def _packed(scales: Tensor) -> Tensor:
    """(rows, ceil(groups / 4)) int32, the first group in the lowest byte, in TMA-aligned columns."""
    if scales.dtype is not torch.float8_e8m0fnu:
        raise UnsupportedError(f"packing {scales.dtype} scales", ["only powers of two (UE8M0) have one byte to pack"])
    rows, groups = scales.shape
    octets = torch.zeros((rows, -(-groups // 4) * 4), dtype=torch.uint8, device=scales.device)
    octets[:, :groups] = scales.view(torch.uint8)
    words = octets.view(torch.int32)
    step = TMA_BYTES // words.element_size()
    return _columns(words, -(-rows // step) * step)


def _swizzled(scales: Tensor) -> Tensor:
    if scales.element_size() != 1:
        raise UnsupportedError(f"swizzling {scales.dtype} scales", ["tiles hold scales of one byte: UE8M0 or e4m3"])
    rows, groups = scales.shape
    tall, wide = -(-rows // TILE_ROWS), -(-groups // TILE_COLUMNS)
    padded = torch.zeros((tall * TILE_ROWS, wide * TILE_COLUMNS), dtype=torch.uint8, device=scales.device)
    padded[:rows, :groups] = scales.view(torch.uint8)
    tiles = padded.view(tall, TILE_ROWS // TILE_STRIPE, TILE_STRIPE, wide, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
