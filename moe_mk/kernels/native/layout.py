"""The layout of a packed projection: the format of its codes, its logical shape, and its scales."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import ceil

import torch

from moe_mk.errors import ShapeError
from moe_mk.kernels.reference.ggml_blocks import BLOCK_TYPES

TILE, PAIR, STEP, SCALE_BLOCK = 16, 32, 32, 128


class Format(IntEnum):
    """The format of packed weights: `Format` of csrc/abi.h."""

    FP8 = 0
    """e4m3 with f32 scales of blocks or of whole outputs."""
    BF16 = 1
    INT8 = 2
    """Signed bytes with f32 scales of blocks or of whole outputs."""
    MXFP8 = 3
    """e4m3, one power-of-two scale (E8M0) per 32 inputs of an output."""
    MXFP4 = 4
    """e2m1, two per byte, scales as MXFP8."""
    NVFP4 = 5
    """e2m1, two per byte, one e4m3 scale per 16 inputs of an output, and one global f32 scale."""
    INT4 = 6
    """Unsigned, two per byte, a scale and optionally a zero point per group of inputs of an output."""
    INT8_GROUPS = 7
    """Unsigned bytes, as INT4."""
    Q4_K = 8
    """Super-blocks of 256 inputs of ggml: scales and minima of 32 inputs."""
    Q5_K = 9
    Q6_K = 10
    """As Q4_K, with scales of 16 inputs and no minima."""
    INT5 = 11
    """As INT4, with biases, from ggml blocks."""

    @property
    def bits(self) -> int:
        four = dict.fromkeys((Format.MXFP4, Format.NVFP4, Format.INT4, Format.Q4_K), 4)
        return {Format.BF16: 16, Format.Q5_K: 5, Format.INT5: 5, Format.Q6_K: 6, **four}.get(self, 8)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor of codes; four-bit codes are stored two per byte, the even input in the low bits."""
        if self.bits < 8 or self is Format.INT8_GROUPS:
            return torch.uint8
        return {Format.BF16: torch.bfloat16, Format.INT8: torch.int8}.get(self, torch.float8_e4m3fn)

    @property
    def group(self) -> int:
        """Inputs of one output that share a one-byte scale; 0: not supported."""
        return {Format.MXFP8: 32, Format.MXFP4: 32, Format.NVFP4: 16}.get(self, 0)

    @property
    def has_parts(self) -> bool:
        """Whether the f32 sum of a group is multiplied by its scale, less a minimum: csrc/part_scales.h."""
        return self >= Format.INT4

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales of blocks or groups of one byte; of formats with parts, of their bytes."""
        if self.has_parts:
            return torch.uint8
        if self.group == 0:
            return torch.float32
        return torch.float8_e4m3fn if self is Format.NVFP4 else torch.float8_e8m0fnu


class BlockType(IntEnum):
    """The ggml blocks that can be packed, by the numbers of `ggml_type`."""

    Q4_0 = 2
    Q4_1 = 3
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14

    @property
    def inputs(self) -> int:
        """Inputs of a block."""
        return BLOCK_TYPES[self.name.lower()].values

    @property
    def num_bytes(self) -> int:
        return BLOCK_TYPES[self.name.lower()].num_bytes

    @property
    def format(self) -> Format:
        return _BLOCK_FORMATS[self]


_BLOCK_FORMATS = {
    BlockType.Q4_0: Format.INT4,
    BlockType.Q4_1: Format.INT4,
    BlockType.Q5_1: Format.INT5,
    BlockType.Q8_0: Format.INT8_GROUPS,
    BlockType.Q4_K: Format.Q4_K,
    BlockType.Q5_K: Format.Q5_K,
    BlockType.Q6_K: Format.Q6_K,
}
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class PartScales:
    """Scales of INT4, INT5 and INT8_GROUPS.

    group: inputs of an output that share a scale: 32, 64 or a multiple of 128; 0: all. dtype: bf16, f16 or f32.
    zeros: whether a group has a zero point; else it is 8 (INT4) or 128. biases: whether a group has a bias instead, of
    the dtype of its scale: weights are scale * code + bias.
    """

    group: int
    dtype: torch.dtype
    zeros: bool = False
    biases: bool = False

    def __post_init__(self) -> None:
        if self.group not in (0, 32, 64) and (self.group < 0 or self.group % SCALE_BLOCK):
            raise ShapeError(
                f"groups of {self.group} inputs cannot be packed; use 32, 64, a multiple of 128 or 0 (all)"
            )
        if self.dtype not in _SCALE_TYPES:
            raise ShapeError(f"scales are {self.dtype}, expected one of {', '.join(map(str, _SCALE_TYPES))}")

    @property
    def type_code(self) -> int:
        """Return the `ScaleType` of csrc/abi.h."""
        return _SCALE_TYPES[self.dtype]

    def of_row(self, num_inputs: int) -> int:
        """Groups of one output."""
        return ceil(num_inputs / self.group) if self.group else 1


@dataclass(frozen=True)
class MatrixLayout:
    """The logical shape of one projection and how it is packed.

    num_outputs: output columns of ONE half when gated (I), else all of them. num_inputs: k; even for four-bit codes.
    gated: packed from two sources, gate and up, whose tiles alternate.
    by_output: FP8 and INT8 with one f32 scale per output (or for all outputs) instead of blocks.
    parts: scales of grouped integers. block_type: the ggml blocks it is packed from; their size divides num_inputs.
    Raises ShapeError for a format with parts that has neither of them, and for partial blocks.
    """

    num_outputs: int
    num_inputs: int
    gated: bool
    format: Format
    by_output: bool = False
    parts: PartScales | None = None
    block_type: BlockType | None = None

    def __post_init__(self) -> None:
        if self.block_type is not None and self.num_inputs % self.block_type.inputs:
            whole = f"blocks of {self.block_type.inputs} inputs, which do not divide {self.num_inputs}"
            raise ShapeError(f"{self.block_type.name} has {whole}")
        if self.block_type is not None and self.block_type.format is not self.format:
            raise ShapeError(f"{self.block_type.name} blocks are packed as {self.block_type.format.name}")
        if (self.parts is not None) != (self.format in (Format.INT4, Format.INT5, Format.INT8_GROUPS)):
            raise ShapeError(f"{self.format.name} {'needs' if self.parts is None else 'has no'} scales of groups")
        if self.format >= Format.Q4_K and self.block_type is None:
            raise ShapeError(f"{self.format.name} is packed from ggml blocks; give their type")

    @classmethod
    def of_blocks(cls, num_outputs: int, num_inputs: int, gated: bool, block_type: BlockType) -> MatrixLayout:
        """The layout of a projection in ggml blocks."""
        biases = block_type in (BlockType.Q4_1, BlockType.Q5_1)
        parts = PartScales(32, torch.float16, biases=biases) if block_type.inputs == STEP else None
        return cls(num_outputs, num_inputs, gated, block_type.format, parts=parts, block_type=block_type)

    @property
    def pairs(self) -> int:
        """Pairs of 16-column tiles."""
        return ceil(self.num_outputs / (TILE if self.gated else PAIR))

    @property
    def steps(self) -> int:
        """Packing steps of 32 inputs."""
        return ceil(self.num_inputs / STEP)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert's packed values, padding included."""
        return self.pairs * self.steps * PAIR * STEP * self.format.bits // 8

    @property
    def source_shape(self) -> tuple[int, int]:
        """Shape of the tensor of one source."""
        if self.block_type is not None:
            return self.num_outputs, self.num_inputs // self.block_type.inputs * self.block_type.num_bytes
        return self.num_outputs, self.num_inputs * min(self.format.bits, 8) // 8

    @property
    def blocks(self) -> int:
        """Scale blocks along k."""
        return ceil(self.num_inputs / SCALE_BLOCK)

    @property
    def groups(self) -> int:
        """Groups along k with a one-byte scale each, padding included."""
        return self.steps * STEP // self.format.group if self.format.group else 0

    @property
    def part(self) -> int:
        """Inputs of an output whose sum is scaled at a time, in formats with parts; 0: another format."""
        if self.format is Format.Q6_K:
            return 16
        if not self.format.has_parts:
            return 0
        group = 32 if self.parts is None else self.parts.group or self.steps * STEP
        return min(group, SCALE_BLOCK)

    @property
    def row_order(self) -> tuple[int, bool]:
        """Return the properties on which rows in INT8 parts depend: inputs of a part, and the order of their codes."""
        return self.part, self.format is not Format.INT8_GROUPS

    @property
    def slot_zeros(self) -> int:
        """Zero points of one expert, a byte each."""
        parts = self.parts
        return self.pairs * PAIR * parts.of_row(self.num_inputs) if parts is not None and parts.zeros else 0

    @property
    def slot_scales(self) -> int:
        """Scales of one expert's blocks (f32), groups (bytes) or parts (bytes)."""
        if self.parts is not None:
            scales = self.pairs * PAIR * self.parts.of_row(self.num_inputs)
            return scales * self.parts.dtype.itemsize * (1 + self.parts.biases)
        if self.block_type is not None:
            each = self.block_type.num_bytes - self.block_type.inputs * self.format.bits // 8
            return self.pairs * PAIR * (self.num_inputs // self.block_type.inputs) * each
        if self.groups:
            return self.pairs * self.groups * PAIR
        return 0 if self.by_output or self.format is Format.BF16 else self.pairs * 2 * self.blocks

    @property
    def parts_of_slot(self) -> tuple[tuple[int, torch.dtype], ...]:
        """Elements and dtypes of values, scales, output scales and zero points of one expert; 0: none."""
        of_blocks = torch.uint8 if self.format.group or self.format.has_parts else torch.float32
        scales = (self.slot_scales, of_blocks), (self.slot_output_scales, torch.float32)
        return (self.slot_bytes, torch.uint8), *scales, (self.slot_zeros, torch.uint8)

    @property
    def slot_output_scales(self) -> int:
        """f32 factors of one expert's outputs."""
        return self.pairs * PAIR if self.by_output or self.format is Format.NVFP4 else 0
