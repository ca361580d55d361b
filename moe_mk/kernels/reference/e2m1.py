"""Four-bit floats e2m1 and their packing, two a byte.

A code is a sign bit, two exponent bits and a mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; there is no
NaN and no infinity. Source: OCP Microscaling formats v1.0, section 5.3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0


def encode(x: Tensor) -> Tensor:
    """f32 numbers to the nearest codes (uint8, 0 to 15), ties to even; larger values and NaN become 6."""
    size = torch.nan_to_num(x.to(torch.float32).abs(), nan=E2M1_MAX).clamp_max(E2M1_MAX)
    # The spacing of codes is 0.5 below 2, 1 below 4, and 2 above; each further binade has 2 codes.
    binade = (size >= 2.0).to(torch.float32) + (size >= 4.0).to(torch.float32)
    codes = torch.round(size * 2.0 * torch.exp2(-binade)) + 2.0 * binade
    return codes.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """Codes (uint8, 0 to 15) to f32, exactly."""
    grid = (*GRID, *(-value for value in GRID))
    values = torch.tensor(grid, dtype=torch.float32, device=codes.device)
    return values[codes.to(torch.int64)]


def pack(codes: Tensor) -> Tensor:
    """(..., k) codes to (..., k / 2) bytes: the even column in the low four bits. k must be even."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: Tensor) -> Tensor:
    """(..., k / 2) bytes to (..., k) codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
