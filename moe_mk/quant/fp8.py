"""FP8 e4m3 with one scale per block, for whole rows or tensors, or one static scale that is not transported.

Blocks are 128 x 128 for weights, 1 x 128 for activations. FP8_CHANNEL: one scale an output channel; FP8_TOKEN: one a
token. FP8_DYNAMIC_TENSOR has one for all rows of a call, so that rows depend on each other and cannot be dispatched.

Scales are f32, or UE8M0 (powers of two, one byte each). Values times scale give the number back.
Source: DeepSeek-V3 technical report, section 3.3; UE8M0 as in the OCP Microscaling formats v1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.kernels.reference.quantize import scales_of
from moe_mk.quant.blocked import E4M3, WHOLE, BlockedScheme
from moe_mk.quant.tensor import QuantTensor


class Fp8(BlockedScheme):
    """FP8 e4m3 values, whatever their scales."""

    family, element = "fp8", E4M3

    @property
    def relative_rms(self) -> float:
        """Rounding is uniform over one spacing of 2^-3; relative to mantissas in [1, 2) that is 2^-3 / sqrt(24)."""
        return E4M3.relative_spacing / math.sqrt(24.0)


@dataclass(frozen=True)
class Fp8Block(Fp8):
    """FP8 e4m3 values, one scale for every block of `rows` x `columns`."""

    name: str
    rows: int
    columns: int
    ue8m0: bool = False

    @property
    def scale_dtype(self) -> torch.dtype:
        """float32, or float8_e8m0fnu for power-of-two scales."""
        return torch.float8_e8m0fnu if self.ue8m0 else torch.float32

    def quantize(self, x: Tensor) -> QuantTensor:
        """Each block by its own amax."""
        return self.by_amax(x, lambda amax: scales_of(amax, power_of_two=self.ue8m0))


FP8_128x128 = Fp8Block("fp8_128x128", 128, 128)
FP8_128x128_UE8M0 = Fp8Block("fp8_128x128_ue8m0", 128, 128, ue8m0=True)
FP8_1x128 = Fp8Block("fp8_1x128", 1, 128)
FP8_1x128_UE8M0 = Fp8Block("fp8_1x128_ue8m0", 1, 128, ue8m0=True)


def weight_scheme(block: tuple[int, int], *, ue8m0: bool = False) -> Fp8Block:
    """The weight scheme of a block size; 128 x 128 has the known name, others say their size."""
    rows, columns = block
    if rows < 1 or columns < 1:
        raise ConfigError(f"weight block {rows}x{columns} must have positive sides")
    return Fp8Block(f"fp8_{rows}x{columns}" + ("_ue8m0" if ue8m0 else ""), rows, columns, ue8m0)


def activation_scheme(columns: int, *, ue8m0: bool = False) -> Fp8Block:
    """The per-token activation scheme with groups of `columns`."""
    return weight_scheme((1, columns), ue8m0=ue8m0)


FP8_CHANNEL = Fp8Block("fp8_channel", 1, WHOLE)
FP8_TOKEN = Fp8Block("fp8_token", 1, WHOLE)
FP8_TENSOR = Fp8Block("fp8_tensor", WHOLE, WHOLE)
FP8_DYNAMIC_TENSOR = Fp8Block("fp8_dynamic_tensor", WHOLE, WHOLE)


@dataclass(frozen=True)
class Fp8Static(Fp8):
    """Activations in FP8 with one static scale; values above 448 times the scale saturate."""

    name: str
    scale: float
    hidden_scale: float | None = None
    """Scale of the rows between the two products of an expert; None: the same."""
    rows: int = WHOLE
    columns: int = WHOLE
    scale_dtype = torch.float32
    is_static = True  # the scale is a constant on all ranks

    @property
    def hidden(self) -> Fp8Static:
        """The scheme of the rows between the two products."""
        return self if self.hidden_scale is None else fp8_static(self.hidden_scale)

    def quantize(self, x: Tensor) -> QuantTensor:
        """Divide by the scale and round; NaN stays NaN, large values saturate."""
        return QuantTensor(E4M3.encode(x.to(torch.float32) / self.scale), None, self)

    def dequantize(self, q: QuantTensor, dtype: torch.dtype) -> Tensor:
        return (E4M3.decode(q.values) * self.scale).to(dtype)


def fp8_static(scale: float, hidden_scale: float | None = None) -> Fp8Static:
    """The scheme of calibrated scales: of tokens, and of the rows between an expert's products if different.

    Raises ConfigError for scales that are not positive.
    """
    scales = [scale] if hidden_scale in (None, scale) else [scale, hidden_scale]
    if wrong := [each for each in scales if each is None or not 0 < each < math.inf]:
        raise ConfigError(f"an activation scale must be positive and finite, got {', '.join(map(str, wrong))}")
    inner = "" if len(scales) == 1 else f"_h{hidden_scale:g}"
    return Fp8Static(f"fp8_static_x{scale:g}{inner}", scale, scales[1] if inner else None)
