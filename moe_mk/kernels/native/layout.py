"""The layout of a packed projection: the format of its codes, its logical shape, and its scales."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import ceil

import torch

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

    @property
    def bits(self) -> int:
        """Width of a code."""
        return {Format.BF16: 16, Format.MXFP4: 4, Format.NVFP4: 4}.get(self, 8)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor of codes; four-bit codes are stored two per byte, the even input in the low bits."""
        if self.bits == 4:
            return torch.uint8
        return {Format.BF16: torch.bfloat16, Format.INT8: torch.int8}.get(self, torch.float8_e4m3fn)

    @property
    def group(self) -> int:
        """Inputs of one output that share a one-byte scale; 0: not supported."""
        return {Format.MXFP8: 32, Format.MXFP4: 32, Format.NVFP4: 16}.get(self, 0)

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales of blocks or groups."""
        if self.group == 0:
            return torch.float32
        return torch.float8_e4m3fn if self is Format.NVFP4 else torch.float8_e8m0fnu


@dataclass(frozen=True)
class MatrixLayout:
    """The logical shape of one projection and how it is packed.

    num_outputs: output columns of ONE half when gated (I), else all of them. num_inputs: k; even for four-bit codes.
    gated: packed from two sources, gate and up, whose tiles alternate.
    block: inputs covered by one f32 scale, a multiple of 32 up to 128.
    by_output: FP8 and INT8 with one f32 scale per output (or for all outputs) instead of blocks.
    """

    num_outputs: int
    num_inputs: int
    gated: bool
    format: Format
    block: int = SCALE_BLOCK
    by_output: bool = False

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
        return self.num_outputs, self.num_inputs * min(self.format.bits, 8) // 8

    @property
    def blocks(self) -> int:
        """Scale blocks along k."""
        return ceil(self.steps / (self.block // STEP))

    @property
    def groups(self) -> int:
        """Groups along k with a one-byte scale each, padding included."""
        return self.steps * STEP // self.format.group if self.format.group else 0

    @property
    def slot_scales(self) -> int:
        """Scales of one expert's blocks (f32) or groups (bytes)."""
        if self.groups:
            return self.pairs * self.groups * PAIR
        return 0 if self.by_output or self.format is Format.BF16 else self.pairs * 2 * self.blocks

    @property
    def slot_output_scales(self) -> int:
        """f32 factors of one expert's outputs."""
        return self.pairs * PAIR if self.by_output or self.format is Format.NVFP4 else 0
