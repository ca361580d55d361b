"""Weight-only integers with one scale, and optionally a zero point, for a group of columns: W4A16 and W8A16.

Codes are unsigned, four-bit codes two a byte with the even column in the low four bits. value = (code - zero) * scale;
without zero points zero is 8 (4 bits) or 128 (8 bits). Scales are bf16, f16 or f32, as the checkpoint stores them.
Groups run along a row: of 32, 64 or 128 columns, or whole rows. The last group of a row may be shorter.
Sources: GPTQ (arXiv 2210.17323), AWQ (arXiv 2306.00978), compressed-tensors 0.20 (`pack-quantized`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.reference.quantize import linear_scales
from moe_mk.kernels.reference.scaled_blocks import block_amax, blocks_of, fitted, spread
from moe_mk.quant.blocked import WHOLE, BlockedScheme, Element
from moe_mk.quant.tensor import QuantTensor

GROUPS = (32, 64, 128, WHOLE)
"""Columns that share a scale."""
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TYPICAL_WIDTH = 8192
"""Values under one scale of a whole row, for the error that is expected of it."""


@dataclass(frozen=True)
class Grouped(BlockedScheme):
    """Integers of 4 or 8 bits, one scale for `columns` values of a row.

    has_zeros: whether a group has a zero point, uint8 of the shape of the scales in `QuantTensor.zeros`.
    """

    name: str
    bits: int
    columns: int
    has_zeros: bool = False
    rows: int = 1
    family = "wna16"
    scale_dtype, scale_dtypes = torch.bfloat16, SCALE_DTYPES
    """Scales that are computed here are bf16; those of checkpoints keep their dtype."""

    @property
    def element(self) -> Element:
        """Unsigned codes; `largest` is the distance of the last code from the zero."""
        largest = 2**self.bits - 1 if self.has_zeros else 2 ** (self.bits - 1) - 1
        return Element(f"uint{self.bits}", torch.uint8, float(largest), 0.0, 1.0, per_byte=8 // self.bits)

    @property
    def middle(self) -> int:
        """The zero of all groups without zero points."""
        return int(2 ** (self.bits - 1))

    @property
    def relative_rms(self) -> float:
        """The spacing is amax / 7 or 127, or with zero points the range / 15 or 255, for all values of a group.

        Hidden rows have a longer tail than normals, see `Int8Block`; it matters for whole rows only.
        """
        n = min(self.columns, TYPICAL_WIDTH)
        crest = math.log(n) if self.columns == WHOLE else math.sqrt(2.0 * math.log(2.0 * n))
        return (2.0 if self.has_zeros else 1.0) * crest / self.element.largest / math.sqrt(12.0)

    def num_bytes(self, rows: int, columns: int) -> int:
        tall, wide = self.scale_shape(rows, columns)
        return super().num_bytes(rows, columns) + (tall * wide if self.has_zeros else 0)

    def quantize(self, x: Tensor) -> QuantTensor:
        """Quantise (rows, columns), with any leading dimensions, each group by its own extremes.

        Scales are rounded up to bf16, so that no extreme is clipped. A zero point is the code of 0, and the
        range of every group includes 0. Raises ShapeError for an odd number of columns of four bits.
        """
        n, k = x.shape[-2:]
        self.expect_even(k)
        wide = x.to(torch.float32)
        if not self.has_zeros:
            scales = _rounded_up(linear_scales(block_amax(wide, self.block), self.element.largest))
            codes = (wide / spread(scales, n, k, self.block)).round() + self.middle
            return QuantTensor(self.pack(codes), scales, self)
        low, high = _extremes(wide, self.block)
        top = self.element.largest
        # The zero point is rounded by up to half a code: one code less for the range keeps both extremes.
        scales = _rounded_up(linear_scales(high - low, top - 1.0))
        zeros = (-low / scales.to(torch.float32)).round().nan_to_num(0.0)
        codes = (wide / spread(scales, n, k, self.block)).round() + spread(zeros, n, k, self.block)
        return QuantTensor(self.pack(codes), scales, self, zeros=zeros.to(torch.uint8))

    def dequantize(self, q: QuantTensor, dtype: torch.dtype) -> Tensor:
        """(code - zero) * scale in f32, rounded once."""
        return (self.centred(q) * self.spread_scales(q)).to(dtype)

    def centred(self, q: QuantTensor) -> Tensor:
        """Codes minus their zeros, f32 (..., n, k); integers, exactly."""
        codes = self.codes(q).to(torch.float32)
        if q.zeros is None:
            return codes - float(self.middle)
        return codes - spread(q.zeros, q.shape[-2], q.shape[-1], self.sides_of(q))

    def codes(self, q: QuantTensor) -> Tensor:
        """The unsigned codes, uint8 (..., n, k)."""
        return e2m1.unpack(q.values) if self.bits == 4 else q.values

    def pack(self, codes: Tensor) -> Tensor:
        """(..., n, k) codes as held: uint8, of four bits two a byte. A NaN becomes 0."""
        whole = codes.nan_to_num(0.0).clamp(0.0, 2.0**self.bits - 1.0).to(torch.uint8)
        return e2m1.pack(whole) if self.bits == 4 else whole


def _rounded_up(scales: Tensor) -> Tensor:
    """Positive f32 to the smallest bf16 that is not below; NaN and infinity are preserved."""
    near = scales.to(torch.bfloat16)
    above = torch.nextafter(near, torch.full_like(near, math.inf))
    return torch.where(near.to(torch.float32) < scales, above, near)


def _extremes(x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each group of a row, f32, with 0 between them; NaN where a group has one."""
    *leading, n, k = x.shape
    columns = fitted(n, k, block)[1]
    wide = blocks_of(n, k, (1, columns))[1]
    padded = torch.nn.functional.pad(x, (0, wide * columns - k)) if wide * columns != k else x
    groups = padded.reshape(*leading, n, wide, columns)
    return groups.amin(dim=-1).clamp_max(0.0), groups.amax(dim=-1).clamp_min(0.0)


def grouped(bits: int, group: int, *, zeros: bool = False) -> Grouped:
    """The scheme of a group size, WHOLE for whole rows. Raises ShapeError for sizes and bits that are not supported."""
    if bits not in (4, 8) or group not in GROUPS:
        sizes = ", ".join("whole rows" if size == WHOLE else str(size) for size in GROUPS)
        raise ShapeError(f"{bits}-bit weights with groups of {group} are not supported; use 4 or 8 bits and {sizes}")
    return GROUPED[kind_of(bits, group, zeros=zeros)]


def kind_of(bits: int, group: int, *, zeros: bool) -> str:
    """The name of a scheme in settings: int4_g32, int8_row_zp, ..."""
    return f"int{bits}_{'row' if group == WHOLE else f'g{group}'}{'_zp' if zeros else ''}"


GROUPED: Mapping[str, Grouped] = {
    name: Grouped(name, bits, group, zeros)
    for bits in (4, 8)
    for zeros in (False, True)
    for group in GROUPS
    for name in (kind_of(bits, group, zeros=zeros),)
}
"""All schemes by name: int4_g32, int4_g64, int4_g128, int4_row, the same with _zp, and those of int8."""
