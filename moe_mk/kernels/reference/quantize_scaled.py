"""Largest magnitudes to scales, for the formats whose scale is f32, a power of two (E8M0), or FP8 under a global scale.

Reads the largest magnitude of each block (f32), writes its scale (f32 that the scale's own format holds exactly). A
block of zeros gets a scale of 1 or the smallest there is, never 0. NaN or infinity in a block makes its scale NaN,
so that the block dequantises to NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.kernels.reference.quantize_rows import round_up_to_power_of_two

SMALLEST_POWER = 2.0**-126
"""The smallest E8M0 scale written here: 2^-127 is legal, but no normal f32."""
SMALLEST_E4M3, LARGEST_E4M3 = 2.0**-9, 448.0


def linear_scales(amax: Tensor, largest: float) -> Tensor:
    """amax / largest in f32: symmetric integers."""
    return _visible(torch.where(amax > 0, (amax / largest).clamp_min(torch.finfo(torch.float32).tiny), 1.0), amax)


def power_of_two_scales(amax: Tensor, largest: float) -> Tensor:
    """The smallest power of two at which an amax does not clip, as E8M0 holds it.

    Source: OCP Microscaling formats v1.0, section 6.3, which rounds the exponent down and lets the largest values of a
    block saturate; rounding up, as DeepSeek's UE8M0 does, never clips.
    """
    finite = torch.where(torch.isfinite(amax) & (amax > 0), amax / largest, 1.0)
    return _visible(round_up_to_power_of_two(finite.clamp_min(SMALLEST_POWER)), amax)


def global_scales(amax: Tensor, largest: float) -> Tensor:
    """One f32 scale of a whole matrix, so that its largest block gets the largest FP8 scale.

    Source: NVIDIA's description of NVFP4: the second level maps a tensor's range to 6 x 448.
    """
    return linear_scales(amax, largest * LARGEST_E4M3)


def fp8_scales(amax: Tensor, largest: float, global_scale: Tensor | float) -> Tensor:
    """amax / largest / global scale, rounded to e4m3 and kept positive; beyond 448 it saturates."""
    exact = (amax / largest / global_scale).clamp(SMALLEST_E4M3, LARGEST_E4M3)
    return _visible(exact.to(torch.float8_e4m3fn).to(torch.float32), amax)


def _visible(scales: Tensor, amax: Tensor) -> Tensor:
    return torch.where(torch.isfinite(amax), scales, torch.nan)
