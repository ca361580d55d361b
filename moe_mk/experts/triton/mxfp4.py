"""MXFP4 weights as the Triton kernels decode them to FP8: words of codes, a shift per group, a scale per 128 x 128.

`kernel_format.py` defines both. The conversion is exact where the scales of all groups of a block, except groups of
zeros, are within a factor of 2^11. Otherwise it is refused: no weight is rounded. It can be reversed bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.triton.tile import BLOCK
from moe_mk.quant.tensor import QuantTensor

LARGEST_SHIFT = 11
UNSHIFTED = 122
"""The E8M0 code of a group with shift 0 in a block with scale 1: the kernels decode shift 0 to 2^-5."""
NAN_SCALE = 0xFF
"""E8M0."""
GROUPS, GROUP_BYTES = 4, 16
"""Groups of a row in a step, and bytes of 32 codes."""
WORDS = 16
"""Of eight codes, in a step of a row."""


def fp8_parts(q: QuantTensor, width: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Words (n, width) as bytes, shifts (steps, n, 4) and f32 scales (ceil(n / 128), steps) of a matrix (n, k).

    width: bytes of all steps of a row. None if a block needs a larger shift, or if a scale is NaN. Shifts of groups of
    zeros are arbitrary; they wrap around in a byte, so that their scales can be restored.
    """
    assert q.scales is not None
    n, steps = len(q.values), width // (GROUPS * GROUP_BYTES)
    stored = q.scales.contiguous().view(torch.uint8)
    # In whole blocks of rows and columns. Padding is zeros, which count for nothing.
    shape = (-1, BLOCK, steps, GROUPS)
    codes = _zero_padded(stored, -n % BLOCK, steps * GROUPS).to(torch.int16).view(shape)
    magnitudes = _zero_padded(q.values & 0x77, -n % BLOCK, width)
    used = magnitudes.view(*shape, GROUP_BYTES).amax(dim=4) > 0
    highest = torch.where(used, codes, -1).amax(dim=(1, 3))
    lowest = torch.where(used, codes, NAN_SCALE).amin(dim=(1, 3))
    base = torch.where(highest < 0, UNSHIFTED, highest - LARGEST_SHIFT)
    if bool((stored == NAN_SCALE).any()) or bool((lowest < base).any()):
        return None
    shifts = (codes - base[:, None, :, None]).to(torch.uint8).view(-1, steps, GROUPS)[:n]
    scales = torch.exp2((base - UNSHIFTED).to(torch.float64)).to(torch.float32)
    return in_words(q.values, width), shifts.permute(1, 0, 2), scales


def stored_parts(words: Tensor, shifts: Tensor, scales: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The inverse of `fp8_parts`: values of `columns` columns, and the E8M0 codes (n, steps x 4) of all steps."""
    base = torch.frexp(scales.to(torch.float64)).exponent - 1 + UNSHIFTED
    rows = base.repeat_interleave(BLOCK, dim=0)[: len(words)]
    codes = (shifts.permute(1, 0, 2) + rows[:, :, None]).to(torch.uint8)
    return _out_of_words(words, columns), codes.flatten(1)


def in_words(packed: Tensor, width: int) -> Tensor:
    """(n, k / 2) bytes of adjacent columns to (n, width) bytes of words of eight codes."""
    codes = e2m1.unpack(_zero_padded(packed, 0, width))
    halves = codes.view(len(codes), -1, 2, WORDS, 4)
    magnitudes = (halves & 7).transpose(2, 3).reshape(len(codes), -1, WORDS, 8)
    signs = (halves[:, :, 0] & 8) << 4 | halves[:, :, 1] & 8
    return (magnitudes[..., ::2] | magnitudes[..., 1::2] << 4 | signs).flatten(1)


def _out_of_words(words: Tensor, columns: int) -> Tensor:
    each = words.view(len(words), -1, WORDS, 4)
    magnitudes = torch.stack((each & 7, each >> 4 & 7), dim=4).view(len(words), -1, WORDS, 2, 4).transpose(2, 3)
    signs = torch.stack((each >> 4 & 8, each & 8), dim=2)
    return e2m1.pack((magnitudes | signs).flatten(1)[:, :columns])


def _zero_padded(part: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(part, (0, columns - part.shape[1], 0, rows))
