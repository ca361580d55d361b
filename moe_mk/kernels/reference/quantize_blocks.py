"""Quantise weights to FP8 e4m3 with one scale per block of rows x columns, and dequantise.

Reads w (n, k), writes values (n, k) fp8 and scales (ceil(n / rows), ceil(k / columns)) f32. Blocks at the lower and
right edge may be smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.kernels.reference.quantize_rows import FP8_MAX, scales_of


def quantize_blocks(w: Tensor, block: tuple[int, int], *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise each block of a weight by its own largest magnitude; the scale multiplies in dequantisation."""
    (n, k), (rows, columns) = w.shape, block
    tall, wide = -(-n // rows), -(-k // columns)
    padded = w.to(torch.float32)
    if (tall * rows, wide * columns) != (n, k):
        padded = torch.nn.functional.pad(padded, (0, wide * columns - k, 0, tall * rows - n))
    blocks = padded.reshape(tall, rows, wide, columns)
    scales = scales_of(blocks.abs().amax(dim=(1, 3)), power_of_two=power_of_two)
    values = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.reshape(tall * rows, wide * columns)[:n, :k].contiguous(), scales


def dequantize_blocks(values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Multiply each block by its scale in f32 and round once to `dtype`. Leading dimensions are preserved."""
    (n, k), (rows, columns) = values.shape[-2:], block
    spread = scales.to(torch.float32).repeat_interleave(rows, dim=-2)[..., :n, :]
    spread = spread.repeat_interleave(columns, dim=-1)[..., :k]
    return (values.to(torch.float32) * spread).to(dtype)
