"""Quantise activations to FP8 e4m3, one scale for every group of columns of a row.

Reads x (m, k), writes values (m, k) fp8 and scales (m, ceil(k / group)) f32. The last group may be shorter.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0
AMAX_FLOOR = 1e-10


def quantize_rows(x: Tensor, group: int, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise each 1 x group piece of a row by its own largest magnitude.

    scale = max(|x|, 1e-10) / 448 in f32, rounded up to a power of two for UE8M0; value = e4m3(x / scale), to nearest
    even. An amax never clips: the rounded scale is at least the exact one.
    Source: DeepSeek-V3 technical report, section 3.3.2 (fine-grained quantisation, 1x128 tiles).
    """
    m, k = x.shape
    groups = -(-k // group)
    padded = x.to(torch.float32)
    if groups * group != k:
        padded = torch.nn.functional.pad(padded, (0, groups * group - k))
    pieces = padded.reshape(m, groups, group)
    scales = scales_of(pieces.abs().amax(dim=2), power_of_two=power_of_two)
    values = (pieces / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.reshape(m, groups * group)[:, :k].contiguous(), scales


def scales_of(amax: Tensor, *, power_of_two: bool) -> Tensor:
    """Convert largest magnitudes (f32) to scales; zeros get the lower bound."""
    scales = amax.clamp_min(AMAX_FLOOR) / FP8_MAX
    return round_up_to_power_of_two(scales) if power_of_two else scales


def round_up_to_power_of_two(scales: Tensor) -> Tensor:
    """The smallest power of two that is not below each positive f32, exactly: by its exponent, not by log2.

    Infinity and NaN are preserved, so that blocks with them dequantise to NaN.
    """
    mantissa, exponent = torch.frexp(scales)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(scales.isfinite(), torch.ldexp(torch.ones_like(scales), exponent), scales)
