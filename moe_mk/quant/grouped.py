"""Weight-only integers with one scale, and optionally a zero point or a bias, for a group of columns: W4A16 and W8A16.

Codes are unsigned, four-bit codes two a byte with the even column in the low four bits. value = (code - zero) * scale;
without zero points zero is 8 (4 bits) or 128 (8 bits). Affine groups have value = scale * code + bias, with scales and
biases of either sign. Scales are bf16, f16 or f32, as the checkpoint stores them, and biases of the same dtype.
Groups run along a row: of 32, 64 or 128 columns, or whole rows. The last group of a row may be shorter.
Sources: GPTQ (arXiv 2210.17323), AWQ (arXiv 2306.00978), compressed-tensors 0.20 (`pack-quantized`),
MLX 0.31 (`affine`: its kernels compute scale * code + bias in f32, or in the dtype of the scales; here in f32).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.reference.quantize import block_amax, blocks_of, fitted, linear_scales, spread
from moe_mk.quant.blocked import WHOLE, BlockedScheme, Element
from moe_mk.quant.int8 import TYPICAL_WIDTH
from moe_mk.quant.tensor import QuantTensor

GROUPS = (32, 64, 128, WHOLE)
"""Columns that share a scale."""
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Grouped(BlockedScheme):
    """Integers of 4 or 8 bits, one scale for `columns` values of a row.

    has_zeros, has_biases: whether groups have zero points (uint8), or biases (as scales), in `QuantTensor.zeros`.
    """

    name: str
    bits: int
    columns: int
    has_zeros: bool = False
    rows: int = 1
    has_biases: bool = False
    family = "wna16"
    scale_dtype, scale_dtypes, stored_scale_dtypes = torch.bfloat16, SCALE_DTYPES, SCALE_DTYPES
    """Scales that are computed here are bf16; those of checkpoints keep their dtype."""

    @property
    def is_symmetric(self) -> bool:
        """Whether a group has neither a zero point nor a bias."""
        return not (self.has_zeros or self.has_biases)

    @property
    def element(self) -> Element:
        """Unsigned codes; `largest` is the distance of the last code from the zero."""
        largest = 2 ** (self.bits - 1) - 1 if self.is_symmetric else 2**self.bits - 1
        return Element(f"uint{self.bits}", torch.uint8, float(largest), 0.0, 1.0, per_byte=8 // self.bits)

    @property
    def middle(self) -> int:
        """The zero of symmetric groups."""
        return int(2 ** (self.bits - 1))

    @property
    def relative_rms(self) -> float:
        """The spacing is amax / 7 or 127, or else the range / 15 or 255, for all values of a group.

        Hidden rows have a longer tail than normals, see `Int8Block`; it matters for whole rows only.
        """
        n = min(self.columns, TYPICAL_WIDTH)
        crest = math.log(n) if self.columns == WHOLE else math.sqrt(2.0 * math.log(2.0 * n))
        return (1.0 if self.is_symmetric else 2.0) * crest / self.element.largest / math.sqrt(12.0)

    def num_bytes(self, rows: int, columns: int) -> int:
        tall, wide = self.scale_shape(rows, columns)
        return super().num_bytes(rows, columns) + tall * wide * (self.has_zeros + 2 * self.has_biases)

    def quantize(self, x: Tensor) -> QuantTensor:
        """Quantise (rows, columns), with any leading dimensions, each group by its own extremes.

        Scales are rounded up to bf16, so that no extreme is clipped. A zero point is the code of 0, and the
        range of every group includes 0. A bias is the extreme farther from 0, and its code 0: where that is the
        greatest value, the scale is negative. Raises ShapeError for an odd number of columns of four bits.
        """
        n, k = x.shape[-2:]
        self.expect_even(k)
        wide = x.to(torch.float32)
        if self.is_symmetric:
            scales = _rounded_up(linear_scales(block_amax(wide, self.block), self.element.largest))
            codes = (wide / spread(scales, n, k, self.block)).round() + self.middle
            return QuantTensor(self.pack(codes), scales, self)
        (low, high), top = _extremes(wide, self.block), self.element.largest
        if self.has_biases:
            scales, biases = _rounded_up(linear_scales(high - low, top)), torch.where(-low > high, low, high)
            scales, biases = torch.where(-low > high, scales, -scales), biases.to(torch.bfloat16)
            codes = (wide - spread(biases, n, k, self.block)) / spread(scales, n, k, self.block)
            return QuantTensor(self.pack(codes.round()), scales, self, zeros=biases)
        # The zero point is rounded by up to half a code: one code less for the range keeps both extremes.
        scales = _rounded_up(linear_scales(high - low, top - 1.0))
        zeros = (-low / scales.to(torch.float32)).round().nan_to_num(0.0)
        codes = (wide / spread(scales, n, k, self.block)).round() + spread(zeros, n, k, self.block)
        return QuantTensor(self.pack(codes), scales, self, zeros=zeros.to(torch.uint8))

    def dequantize(self, q: QuantTensor, dtype: torch.dtype) -> Tensor:
        """(code - zero) * scale, or scale * code + bias, each operation in f32; rounded once more."""
        if self.has_biases and q.zeros is not None:
            biases = spread(q.zeros, q.shape[-2], q.shape[-1], self.sides_of(q))
            return (self.codes(q).to(torch.float32) * self.spread_scales(q) + biases).to(dtype)
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


def grouped(bits: int, group: int, *, zeros: bool = False, biases: bool = False) -> Grouped:
    """The scheme of a group size, WHOLE for whole rows. Raises ShapeError for sizes and bits that are not supported."""
    if (name := kind_of(bits, group, zeros=zeros, biases=biases)) not in GROUPED:
        sizes = ", ".join("whole rows" if size == WHOLE else str(size) for size in GROUPS)
        raise ShapeError(f"{bits}-bit weights with groups of {group} are not supported; use 4 or 8 bits and {sizes}")
    return GROUPED[name]


def kind_of(bits: object, group: object, *, zeros: bool = False, biases: bool = False) -> str:
    """The name of a scheme in settings: int4_g32, int8_row_zp, int4_g64_affine, ..."""
    return f"int{bits}_{'row' if group == WHOLE else f'g{group}'}{'_zp' if zeros else ''}{'_affine' if biases else ''}"


GROUPED: Mapping[str, Grouped] = {
    name: Grouped(name, bits, group, zeros, has_biases=biases)
    for bits in (4, 8)
    for zeros, biases in ((False, False), (True, False), (False, True))
    for group in (GROUPS[:3] if biases else GROUPS)
    for name in (kind_of(bits, group, zeros=zeros, biases=biases),)
}
"""All schemes by name: int4_g32, int4_g64, int4_g128, int4_row, the same with _zp, groups with _affine, and int8."""
AFFINE = frozenset(name for name, scheme in GROUPED.items() if scheme.has_biases)
