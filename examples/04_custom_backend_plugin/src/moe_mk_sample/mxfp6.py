"""MXFP6 (e3m2): 32 values along a row share a power of two; four values of six bits fill three bytes.

A value is a sign, three bits of exponent with a bias of 3 and two bits of mantissa; there is no infinity and no NaN.
The first value of four is in the low bits. Source: OCP Microscaling formats v1.0.
"""

import torch
from torch import Tensor

from moe_mk.quant.blocked import Element
from moe_mk.quant.kinds import StoredFormat
from moe_mk.quant.microscaling import Microscaled

SHIFTS = (0, 6, 12, 18)


class SixBits(Element):
    """Values of six bits, packed."""

    def encode(self, x: Tensor) -> Tensor:
        """f32 numbers (..., C) to bytes (..., 3C / 4), to the nearest value, ties to even, saturating."""
        exponent = torch.frexp(x).exponent.clamp(min=-1) - 1  # of the value; subnormals have the least one, -2
        spacing = torch.ldexp(torch.ones_like(x), exponent - 2)
        size = ((x.abs() / spacing).round() * spacing).clamp(max=self.largest)
        exponent = torch.where(size > 0, torch.frexp(size).exponent.clamp(min=-1), -1) + 2  # as stored, from 1 on
        mantissa = torch.ldexp(size, 5 - exponent).to(torch.int32)  # of 2 bits, with the leading one of a normal
        codes = (torch.signbit(x).to(torch.int32) << 5) | (((exponent - 1) << 2) + mantissa)
        words = sum(codes[..., at::4] << shift for at, shift in enumerate(SHIFTS))
        return torch.stack([(words >> shift) & 255 for shift in (0, 8, 16)], dim=-1).flatten(-2).to(torch.uint8)

    def decode(self, values: Tensor) -> Tensor:
        """Bytes (..., 3C / 4) to f32 numbers (..., C), exactly."""
        octets = values.view(torch.uint8).unflatten(-1, (-1, 3)).to(torch.int32)
        words = octets[..., 0] | (octets[..., 1] << 8) | (octets[..., 2] << 16)
        codes = torch.stack([(words >> shift) & 63 for shift in SHIFTS], dim=-1).flatten(-2)
        exponent, mantissa = (codes >> 2) & 7, codes & 3
        mantissa = torch.where(exponent > 0, mantissa + 4, mantissa).to(torch.float32)
        size = torch.ldexp(mantissa, exponent.clamp(min=1) - 5)
        return torch.where(codes >= 32, -size, size)


E3M2 = SixBits("e3m2", torch.uint8, largest=28.0, relative_spacing=2.0**-2, step=2.0**-4, per_byte=4, elements=3)
MXFP6 = StoredFormat(Microscaled("mxfp6_e3m2", E3M2))
"""A value of model.quant.weights; activations stay in the layer's dtype."""
