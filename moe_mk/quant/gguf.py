"""The blocks of GGUF files as they are in the file: scales, minima and codes of a block are adjacent bytes of a row.

`QuantTensor.values` is uint8 (..., n, bytes of a row), without separate scales; the scheme converts between bytes and
columns. MXFP4, which GGUF stores in another order, is converted exactly to the scheme of other checkpoints.
Source: see `kernels.reference.ggml_blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.reference.ggml_blocks import (
    BLOCK_TYPES,
    MXFP4_BYTES,
    BlockType,
    Split,
    divided,
    join_mxfp4,
    split_mxfp4,
)
from moe_mk.quant.microscaling import MXFP4
from moe_mk.quant.tensor import QuantScheme, QuantTensor


@dataclass(frozen=True)
class Gguf(QuantScheme):
    """One block type of ggml."""

    name: str
    levels: float
    """Steps of a code between the extremes of a group, for the error that is expected of it."""

    @property
    def blocks(self) -> BlockType:
        """Sizes and conversions of the block."""
        return BLOCK_TYPES[self.name]

    @property
    def family(self) -> str:
        """gguf, whatever the block."""
        return "gguf"

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
        crest = math.sqrt(2.0 * math.log(2.0 * self.group))
        return 2.0 * crest / self.levels / math.sqrt(12.0)

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
        blocks = divided(q.values, -1, self.blocks.num_bytes)
        found = [blocks[..., at : at + 2].contiguous().view(torch.float16) for at in self.blocks.halves]
        return torch.cat(found, dim=-1)

    def dequantize(self, q: QuantTensor, dtype: torch.dtype) -> Tensor:
        """The values in f32 exactly as the `gguf` package computes them, rounded once more to the dtype."""
        codes, scales, minima = self.split(q)
        wide = divided(codes.to(torch.float32), -1, self.group) * scales.unsqueeze(-1)
        if minima is not None:
            wide -= minima.unsqueeze(-1)
        return wide.flatten(-2).to(dtype)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the blocks."""
        return rows * self.held_columns(columns)


Q4_0 = Gguf("q4_0", 16.0)
Q8_0 = Gguf("q8_0", 254.0)
Q4_K = Gguf("q4_k", 15.0)
Q5_K = Gguf("q5_k", 31.0)
Q6_K = Gguf("q6_k", 64.0)
GGUF: Mapping[str, Gguf] = {scheme.name: scheme for scheme in (Q4_0, Q8_0, Q4_K, Q5_K, Q6_K)}
"""All block types by name."""


def mxfp4_of_gguf(rows: Tensor) -> QuantTensor:
    """MXFP4 rows of a GGUF file, uint8 (..., n, bytes), in the scheme of other MXFP4 checkpoints, exactly.

    Raises ShapeError if the bytes are no whole blocks.
    """
    if rows.shape[-1] % MXFP4_BYTES:
        raise ShapeError(f"a row of {rows.shape[-1]} B is no whole number of MXFP4 blocks of {MXFP4_BYTES} B")
    values, scales = split_mxfp4(rows)
    return QuantTensor(values, scales, MXFP4)


def mxfp4_to_gguf(q: QuantTensor) -> Tensor:
    """The inverse of `mxfp4_of_gguf`. Raises ShapeError for other schemes and for partial blocks."""
    if q.scheme != MXFP4 or q.scales is None or q.shape[-1] != q.scales.shape[-1] * MXFP4.columns:
        raise ShapeError(f"{q.scheme.name} of {tuple(q.shape)} is no MXFP4 of whole blocks of {MXFP4.columns}")
    return join_mxfp4(q.values, q.scales)
