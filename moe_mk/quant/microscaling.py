"""Microscaling formats: 32 values along a row share a power of two in one byte (E8M0).

MXFP8 has e4m3 values, MXFP4 e2m1 values, two a byte, the even column in the low four bits.
Source: OCP Microscaling formats v1.0. Scales are rounded up here, so that no amax clips (`power_of_two_scales`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.kernels.reference.quantize import power_of_two_scales
from moe_mk.quant.blocked import E2M1, E4M3, BlockedScheme, Element, expected_error
from moe_mk.quant.tensor import QuantTensor

GROUP = 32


@dataclass(frozen=True)
class Microscaled(BlockedScheme):
    """Small floats with one E8M0 scale per 32 values of a row."""

    name: str
    format: Element
    rows: int = 1
    columns: int = GROUP
    scale_dtype = torch.float8_e8m0fnu
    stored_scale_dtypes = torch.float8_e8m0fnu, torch.uint8

    @property
    def family(self) -> str:
        return self.name

    @property
    def element(self) -> Element:
        return self.format

    @property
    def relative_rms(self) -> float:
        """A scale is amax / largest rounded up to a power of two: on average, as a mean square over one octave."""
        octave = math.sqrt(3.0 / (2.0 * math.log(2.0)))
        return expected_error(self.element, octave / self.element.largest, self.columns)

    def quantize(self, x: Tensor) -> QuantTensor:
        """Each group by its own amax. Raises ShapeError for an odd number of columns where two values share a byte."""
        return self.by_amax(x, lambda amax: power_of_two_scales(amax, self.element.largest))


MXFP8 = Microscaled("mxfp8", E4M3)
MXFP4 = Microscaled("mxfp4", E2M1)
