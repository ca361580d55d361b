"""Unquantised numbers as a scheme without scales, so that callers handle schemes only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.quant.tensor import QuantScheme, QuantTensor


@dataclass(frozen=True)
class Plain(QuantScheme):
    """Unquantised values of one floating-point dtype."""

    name: str
    dtype: torch.dtype
    block = None

    @property
    def relative_rms(self) -> float:
        """A rounding error is uniform over one spacing; relative to mantissas in [1, 2) that is eps / sqrt(24)."""
        return torch.finfo(self.dtype).eps / math.sqrt(24.0)

    def quantize(self, x: Tensor) -> QuantTensor:
        return QuantTensor(x.to(self.dtype), None, self)

    def dequantize(self, q: QuantTensor, dtype: torch.dtype) -> Tensor:
        return q.values.to(dtype)

    def num_bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self.dtype.itemsize


BF16 = Plain("bf16", torch.bfloat16)
FP16 = Plain("fp16", torch.float16)
FP32 = Plain("fp32", torch.float32)

_OF_DTYPE = {scheme.dtype: scheme for scheme in (BF16, FP16, FP32)}


def plain(dtype: torch.dtype) -> Plain:
    """The unquantised scheme of a floating dtype; raises UnsupportedError for one that no layer computes in."""
    if dtype not in _OF_DTYPE:
        raise UnsupportedError(f"no layer computes in {dtype}", [f"use one of {', '.join(map(str, _OF_DTYPE))}"])
    return _OF_DTYPE[dtype]
