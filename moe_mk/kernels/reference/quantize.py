"""Quantise activations, and compute scales from the largest magnitudes.

rows      x (m, k) -> values (m, k) fp8 e4m3, scales (m, ceil(k / group)) f32; the last group may be shorter
scales    amax f32 -> scale f32 that the scale's own format holds exactly: f32, a power of two (E8M0), or FP8 under
          a global scale. A block of zeros gets 1 or the smallest scale, never 0; NaN or infinity in a block makes
          its scale NaN, so that the block dequantises to NaN.
blocks    (..., n, k) <-> (..., ceil(n / rows), ceil(k / columns)); at the edges they may be smaller, and a longer side
          than that of the matrix spans it
"""

from __future__ import annotations

import torch
from torch import Tensor

Block = tuple[int, int]


def blocks_of(n: int, k: int, block: Block) -> Block:
    """The numbers of blocks of an (n, k) matrix, partial ones included."""
    return -(-n // block[0]), -(-k // block[1])


def fitted(n: int, k: int, block: Block) -> Block:
    """The sides of a block inside an (n, k) matrix: never longer than it, never zero."""
    return max(1, min(block[0], n)), max(1, min(block[1], k))


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block, in f32."""
    *leading, n, k = x.shape
    rows, columns = fitted(n, k, block)
    tall, wide = blocks_of(n, k, (rows, columns))
    size = x.to(torch.float32).abs()
    if (tall * rows, wide * columns) != (n, k):
        size = torch.nn.functional.pad(size, (0, wide * columns - k, 0, tall * rows - n))
    return size.reshape(*leading, tall, rows, wide, columns).amax(dim=(-3, -1))


def divided(x: Tensor, scales: Tensor, block: Block) -> Tensor:
    """f32 x over the f32 scale of its block; whole blocks need no scale for each number."""
    *leading, n, k = x.shape
    (rows, columns), (tall, wide) = fitted(n, k, block), scales.shape[-2:]
    if (tall * rows, wide * columns) != (n, k):
        return x / spread(scales, n, k, block)
    blocks = x.reshape(*leading, tall, rows, wide, columns)
    return (blocks / scales[..., :, None, :, None]).reshape(x.shape)


def spread(scales: Tensor, n: int, k: int, block: Block) -> Tensor:
    """(..., tall, wide) scales as f32 that broadcast over (..., n, k): a scale of whole rows keeps one column."""
    rows, columns = fitted(n, k, block)
    wide = scales.to(torch.float32)
    if rows > 1:
        wide = wide.repeat_interleave(rows, dim=-2)[..., :n, :]
    if scales.shape[-1] > 1 or columns < k:
        wide = wide.repeat_interleave(columns, dim=-1)[..., :k]
    return wide


FP8_MAX = 448.0

AMAX_FLOOR = 1e-10


def quantize_rows(x: Tensor, group: int, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise each 1 x group piece of a row by its own largest magnitude.

    scale = max(|x|, 1e-10) / 448 in f32, rounded up to a power of two for UE8M0; value = e4m3(x / scale), to nearest
    even. An amax never clips: the rounded scale is at least the exact one.
    Source: DeepSeek-V3 technical report, section 3.3.2 (fine-grained quantisation, 1x128 tiles).
    """
    x = x.to(torch.float32)
    scales = scales_of(block_amax(x, (1, group)), power_of_two=power_of_two)
    values = divided(x, scales, (1, group)).clamp(-FP8_MAX, FP8_MAX)
    return values.to(torch.float8_e4m3fn).contiguous(), scales


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
