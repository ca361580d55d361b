"""The common base of schemes with scales: elements of one format, and one scale per block of rows x columns.

A side of WHOLE spans the matrix: (1, WHOLE) is one scale per row (output channel of a weight, token of activations),
(WHOLE, WHOLE) one for the matrix. Stacked matrices (gate above up) have one such scale per equal part of the rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.reference.quantize import block_amax, blocks_of, divided, spread
from moe_mk.quant.tensor import QuantScheme, QuantTensor

SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.bfloat16, torch.float16)
"""Dtypes of the scales of FP8 and INT8 in files."""
WHOLE = 2**31 - 1
"""A block side that is as long as the matrix."""


@dataclass(frozen=True)
class Element:
    """A number format of one element, before its scale."""

    name: str
    dtype: torch.dtype
    """Dtype of the tensor that holds the values."""
    largest: float
    relative_spacing: float
    """Spacing of adjacent values, relative to mantissas in [1, 2); 0 for integers."""
    step: float
    """Spacing of adjacent values at zero."""
    per_byte: int = 1
    """Values that share whole elements of a tensor, along a row."""
    elements: int = 1
    """Elements that they share: 1; 3 bytes for four values of six bits."""

    def encode(self, x: Tensor) -> Tensor:
        """f32 numbers to the nearest values, ties to even, saturating; NaN becomes the format's NaN, if it has one.

        Derived classes pack other numbers of bits.
        """
        if self.per_byte == 2:
            return e2m1.pack(e2m1.encode(x))
        x = x.clamp(-self.largest, self.largest)
        return (x.round() if self.relative_spacing == 0 else x).to(self.dtype)

    def decode(self, values: Tensor) -> Tensor:
        """Values to f32, exactly."""
        return e2m1.decode(e2m1.unpack(values)) if self.per_byte == 2 else values.to(torch.float32)


E4M3 = Element("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-3, 2.0**-9)
INT8 = Element("int8", torch.int8, 127.0, 0.0, 1.0)
E2M1 = Element("e2m1", torch.uint8, e2m1.E2M1_MAX, 2.0**-1, 0.5, per_byte=2)


class BlockedScheme(QuantScheme):
    """Values of one element format with one scale per block."""

    rows: int
    columns: int

    @property
    @abstractmethod
    def element(self) -> Element:
        """The format of the values."""

    @property
    @abstractmethod
    def scale_dtype(self) -> torch.dtype:
        """The format of the scales."""

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes in which scales are held: that of the scheme, unless it keeps those of the checkpoint."""
        return (self.scale_dtype,)

    stored_scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = SCALE_DTYPES
    """The dtypes of scales in files and in engines, which are converted to one of `scale_dtypes`."""

    @property
    def per_byte(self) -> int:
        return self.element.per_byte

    def held_columns(self, columns: int) -> int:
        return columns * self.element.elements // self.per_byte

    def logical_columns(self, held: int) -> int:
        return held * self.per_byte // self.element.elements

    is_static: ClassVar[bool] = False
    """Whether the scale is part of the scheme, so that none is transported with the values."""

    @property
    def block(self) -> tuple[int, int]:
        return self.rows, self.columns

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of blocks of a (rows, columns) tensor, partial ones included."""
        return blocks_of(rows, columns, self.block)

    def value_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the tensor that holds the values of (rows, columns)."""
        self.expect_even(columns)
        return rows, self.held_columns(columns)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of values, of one scale per block (partial ones included), and of the global scale."""
        tall, wide = (0, 0) if self.is_static else self.scale_shape(rows, columns)
        values = math.prod(self.value_shape(rows, columns))
        return values + tall * wide * self.scale_dtype.itemsize + 4 * (self.has_global_scale and rows > 0)

    def sides_of(self, q: QuantTensor) -> tuple[int, int]:
        """The sides of a block in a tensor; rows of WHOLE are divided by the number of scales."""
        assert q.scales is not None
        n, tall = q.shape[-2], q.scales.shape[-2]
        return (max(-(-n // tall), 1) if self.rows == WHOLE and tall else self.rows), self.columns

    def spread_scales(self, q: QuantTensor) -> Tensor:
        """The f32 scales, repeated as far as needed to broadcast to the elements."""
        assert q.scales is not None
        n, k = q.shape[-2:]
        scales = spread(q.scales, n, k, self.sides_of(q))
        if q.global_scale is None:
            return scales
        parts = q.global_scale.shape[-2]
        return scales * spread(q.global_scale, n, k, (-(-n // max(parts, 1)), WHOLE))

    def by_amax(self, x: Tensor, scales_of: Callable[[Tensor], Tensor]) -> QuantTensor:
        """Quantise (rows, columns), with any leading dimensions, each block by its own amax.

        scales_of: scales of the largest magnitudes of the blocks, in f32. Raises ShapeError, see `expect_even`.
        """
        self.expect_even(x.shape[-1])
        x = x.to(torch.float32)
        scales = scales_of(block_amax(x, self.block))
        values = self.element.encode(divided(x, scales, self.block))
        return QuantTensor(values.contiguous(), scales.to(self.scale_dtype), self)

    def dequantize(self, q: QuantTensor, dtype: torch.dtype) -> Tensor:
        """Values times scale in f32, rounded once."""
        return (self.element.decode(q.values) * self.spread_scales(q)).to(dtype)

    def expect_even(self, columns: int) -> None:
        """Raise ShapeError if the columns do not fill whole bytes."""
        if columns % self.per_byte:
            shared = "a byte" if self.element.elements == 1 else f"in {self.element.elements} bytes"
            remedy = "be even" if self.per_byte == 2 else f"be a multiple of {self.per_byte}"
            raise ShapeError(f"{self.name} holds {self.per_byte} values {shared}; {columns} columns must {remedy}")


def expected_error(element: Element, scale_of_amax: float, values_in_block: int) -> float:
    """Root mean square error of one element relative to that of its numbers, for normals under one scale a block.

    Rounding errors are uniform over a spacing, which is relative to the number for floats, and fixed near zero and for
    integers (scale_of_amax * amax). The largest of n normals is about sqrt(2 ln 2n), never more on average.
    """
    crest = math.sqrt(2.0 * math.log(2.0 * max(values_in_block, 2)))
    floor = element.step * scale_of_amax * crest / math.sqrt(12.0)
    return math.hypot(element.relative_spacing / math.sqrt(24.0), floor)
