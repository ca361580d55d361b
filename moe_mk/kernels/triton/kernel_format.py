"""Weight formats of the grouped GEMMs, shared by host code and kernels; this module does not import triton.

    plain         bf16 times bf16
    fp8           FP8 times FP8, both with scales of 128 columns
    int8          INT8 times INT8 in int32, one scale per row on both sides, applied at the end
    int8_block    INT8 times INT8, one scale per 128 x 128 weights after every 128 terms, one per token at the end
    fp8_row       FP8 times FP8, scales as int8
    mxfp4         weights e2m1 with power-of-two scales per 32 columns, decoded to FP8; otherwise as fp8
    w_fp8         weights e4m3 with one scale per 128 x 128, rows bf16
    w_int8_block  weights INT8, the same
    w_int8        weights INT8 with one scale per row, rows bf16
    w_fp8_row     weights e4m3, the same
    w_mxfp8       weights e4m3, one power-of-two scale per 32 columns, rows bf16
    w_mxfp4       weights e2m1, the same
    w_nvfp4       weights e2m1, one e4m3 scale per 16 columns, and one scale per row
    w_int4        weights INT4, one bf16, f16 or f32 scale per 32, 64 or 128 columns, rows bf16; code 8 is zero
    w_int4_zero   the same with a zero point for each scale
    w_int8_group  weights INT8, the same; code 128 is zero
    w_int8_zero   the same with a zero point for each scale

With zero points, a scale and its zero point are one word: the upper 19 bits of the f32 scale, which bf16 and f16 scales
do not exceed, and the zero point in the lowest byte.

Four-bit weights are interleaved at load: a byte holds columns j and j + 64 of a step of 128, so that the low and the
high bits are contiguous column blocks. Group scales are stored step by step.

Weights of mxfp4 are stored as 8 codes per word of 32 bits, those of columns 4 w ... 4 w + 3 and of 64 + 4 w ... of a
step: their magnitudes in this order in the lower three bits of each half-byte, so that 16 bits select four bytes of a
table; the signs of the first four in bits 7, 15, 23 and 31, of the others four bits lower. A code times 2^(s - 5) is
exact in e4m3 for a shift s of 0 to 11 (0.5 x 2^-5 is the smallest normal number, 6 x 2^6 = 384). The shifts are stored
in place of the group scales; a block of 128 x 128 has the f32 power of two that remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelFormat:
    """The storage of weights and the kind of their products."""

    name: str
    step: int
    """Columns of one step of the reduction."""
    per_byte: int = 1
    """Values in one element of the weight's tensor."""
    group: int = 0
    """Columns per scale of a group; 0 without groups."""
    row_scales: bool = False
    """Whether every weight row has a scale, applied at the end."""
    block_scales: bool = False
    """Whether the scales of groups are shifts, below f32 scales of 128 x 128 weights."""

    @property
    def by_token(self) -> bool:
        """Whether token rows and hidden rows are codes with one scale per row."""
        return self.name in ("int8", "int8_block", "fp8_row")

    @property
    def by_group(self) -> bool:
        """Whether token rows and hidden rows are FP8 codes with one scale per 128 columns."""
        return self.name in ("fp8", "mxfp4")

    @property
    def integer(self) -> bool:
        """Whether weights are unsigned integers with scales of groups."""
        return self.name in ("w_int4", "w_int4_zero", "w_int8_group", "w_int8_zero")

    @property
    def has_zeros(self) -> bool:
        """Whether scales are words that contain a zero point."""
        return self.name in ("w_int4_zero", "w_int8_zero")

    @property
    def box(self) -> int:
        """Elements of the weight's tensor in one step of a row."""
        return self.step // self.per_byte

    @property
    def row_box(self) -> int:
        """Columns of one load of token rows: the two halves of packed weights are multiplied separately in bf16."""
        return self.step if self.by_group else self.box

    @property
    def groups(self) -> int:
        """Scales of one row in one step."""
        return self.step // self.group if self.group else 0


KERNEL_FORMATS: Mapping[str, KernelFormat] = {
    format.name: format
    for format in (
        KernelFormat("plain", 64),
        KernelFormat("fp8", 128),
        KernelFormat("int8", 128, row_scales=True),
        KernelFormat("int8_block", 128),
        KernelFormat("fp8_row", 128, row_scales=True),
        KernelFormat("mxfp4", 128, per_byte=2, group=32, block_scales=True),
        KernelFormat("w_fp8", 64),
        KernelFormat("w_int8_block", 64),
        KernelFormat("w_int8", 64, row_scales=True),
        KernelFormat("w_fp8_row", 64, row_scales=True),
        KernelFormat("w_mxfp8", 64, group=32),
        KernelFormat("w_mxfp4", 128, per_byte=2, group=32),
        KernelFormat("w_nvfp4", 128, per_byte=2, group=16, row_scales=True),
        KernelFormat("w_int4", 128, per_byte=2, group=32),
        KernelFormat("w_int4_zero", 128, per_byte=2, group=32),
        KernelFormat("w_int8_group", 64, group=32),
        KernelFormat("w_int8_zero", 64, group=32),
    )
}
