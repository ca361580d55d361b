"""The blocks of GGUF files as they are in the file: scales, minima and codes of a block are adjacent bytes of a row.

`QuantTensor.values` is uint8 (..., n, bytes of a row), without separate scales; the scheme converts between bytes and
columns. A new type is an entry of `kernels.reference.ggml_blocks`, which has the sources. MXFP4, which GGUF stores in
another order, is converted exactly to the scheme of other checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.reference.ggml_blocks import (
    BLOCK_TYPES,
    MXFP4_BYTES,
    MXFP4_CODES,
    BlockType,
    Split,
    divided,
    of_q3_k,
)
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.microscaling import MXFP4
from moe_mk.quant.tensor import QuantScheme, QuantTensor


@dataclass(frozen=True)
class Gguf(QuantScheme):
    """One block type of ggml."""

    name: str
    family = "gguf"

    @property
    def blocks(self) -> BlockType:
        """Sizes and conversions of the block."""
        return BLOCK_TYPES[self.name]

    @property
    def block(self) -> tuple[int, int]:
        """(1, columns of a block): a row may be cut between blocks only."""
        return 1, self.blocks.values

    @property
    def group(self) -> int:
        """Columns under one scale."""
        return self.blocks.group

    @property
    def relative_rms(self) -> float:
        """Codes are uniform over a spacing of the group's range; scales of super-blocks are rounded to six bits."""
        crest, bits = math.sqrt(2.0 * math.log(2.0 * self.group)), self.blocks.bits
        levels = 254.0 if bits == 8 else 2.0**bits - self.blocks.has_minima
        return 2.0 * crest / levels / math.sqrt(12.0)

    def held_columns(self, columns: int) -> int:
        """Bytes of a row. Raises ShapeError if the columns do not fill whole blocks."""
        if columns % self.blocks.values:
            raise ShapeError(f"{self.name} has blocks of {self.blocks.values} values, which do not divide {columns}")
        return columns // self.blocks.values * self.blocks.num_bytes

    def logical_columns(self, held: int) -> int:
        """Columns of a row of bytes. Raises ShapeError if the bytes are no whole blocks."""
        if held % self.blocks.num_bytes:
            raise ShapeError(f"a row of {held} B is no whole number of {self.name} blocks of {self.blocks.num_bytes} B")
        return held // self.blocks.num_bytes * self.blocks.values

    def quantize(self, x: Tensor) -> QuantTensor:
        """Quantise (rows, columns), with any leading dimensions, to scales from the extremes of each group.

        This is not the search that llama.cpp runs, which weights errors by importance. NaN and infinity become NaN
        scales where the type has f16 scales alone, and are to be rejected before. Raises ShapeError for partial blocks.
        """
        held = self.held_columns(x.shape[-1])
        packed = self.blocks.pack(divided(x.to(torch.float32), -1, self.blocks.values))
        return QuantTensor(packed.flatten(-2).reshape(*x.shape[:-1], held), None, self)

    def split(self, q: QuantTensor) -> Split:
        """Codes int8 (..., n, k), f32 scales and f32 minima (..., n, k / group), or None for types without minima.

        value = scale * code - minimum, in f32, each operation rounded.
        """
        return self.blocks.split(divided(q.values, -1, self.blocks.num_bytes))

    def factors(self, q: QuantTensor) -> Tensor:
        """The f16 factors of all blocks, copied: d, and dmin of types with minima."""
        return torch.cat(self.blocks.factors(divided(q.values, -1, self.blocks.num_bytes)), dim=-1)

    def dequantize(self, q: QuantTensor, dtype: torch.dtype) -> Tensor:
        """The values in f32 exactly as the `gguf` package computes them, rounded once more to the dtype."""
        codes, scales, minima = self.split(q)
        wide = divided(codes.to(torch.float32), -1, self.group) * scales.unsqueeze(-1)
        if minima is not None:
            wide -= minima.unsqueeze(-1)
        return wide.flatten(-2).to(dtype)

    def num_bytes(self, rows: int, columns: int) -> int:
        return rows * self.held_columns(columns)

    def exact(self, q: QuantTensor) -> QuantTensor:
        """Converts to equal values, bit for bit, in the type `blocks.held`, for types that have one with integers."""
        codes, scales, _ = self.split(q)
        if self.blocks.held == "q6_k":
            return replace(q, values=of_q3_k(divided(q.values, -1, self.blocks.num_bytes)).flatten(-2), scheme=Q6_K)
        dtype = torch.float32 if self.blocks.scales else torch.float16
        return QuantTensor(codes.view(torch.uint8) ^ 0x80, scales.to(dtype), GROUPED[self.blocks.held])


GGUF: Mapping[str, Gguf] = {name: Gguf(name) for name in BLOCK_TYPES}
"""All block types by name."""
Q6_K = GGUF["q6_k"]


def mxfp4_of_gguf(rows: Tensor) -> QuantTensor:
    """MXFP4 rows of a GGUF file, uint8 (..., n, bytes), in the scheme of other MXFP4 checkpoints, exactly.

    Raises ShapeError if the bytes are no whole blocks.
    """
    if rows.shape[-1] % MXFP4_BYTES:
        raise ShapeError(f"a row of {rows.shape[-1]} B is no whole number of MXFP4 blocks of {MXFP4_BYTES} B")
    blocks = divided(rows, -1, MXFP4_BYTES)
    values = e2m1.pack(MXFP4_CODES.get(blocks).flatten(-2))
    return QuantTensor(values, blocks[..., 0].contiguous().view(torch.float8_e8m0fnu), MXFP4)
