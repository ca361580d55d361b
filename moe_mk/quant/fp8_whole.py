"""FP8 e4m3 with scales of whole rows or whole tensors, and with a static scale that is not transported.

A weight: FP8_CHANNEL (one scale an output channel) or FP8_TENSOR. Activations: FP8_TOKEN (dynamic, one scale a token),
FP8_DYNAMIC_TENSOR (one scale for all rows of a call, so that rows depend on each other and cannot be dispatched), or a
static scale from calibration, with saturation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.quant.blocked import E4M3, WHOLE
from moe_mk.quant.fp8_block import Fp8, Fp8Block
from moe_mk.quant.tensor import QuantTensor

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
