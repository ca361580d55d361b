"""Count activations close to zero, to measure the sparsity of a model's gated experts on its own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.shapes import expect

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NearZero:
    """A count of activations close to zero."""

    near_zero: int
    total: int
    threshold: float
    """Absolute values up to this one are close to zero."""

    @property
    def share(self) -> float:
        """Fraction of all values; 0 if there are none."""
        return self.near_zero / self.total if self.total else 0.0

    def __add__(self, other: NearZero) -> NearZero:
        """The sum of two counts; raises ConfigError if their thresholds differ."""
        if other.threshold != self.threshold:
            raise ConfigError(f"counts under {self.threshold} and {other.threshold} do not add up")
        return NearZero(self.near_zero + other.near_zero, self.total + other.total, self.threshold)

    def __str__(self) -> str:
        return f"{self.near_zero:,} of {self.total:,} ({100 * self.share:.1f} %) at most {self.threshold:g}"


def count_near_zero(values: Tensor, threshold: float) -> NearZero:
    """Count the elements of a float tensor whose size is at most a threshold; NaN is never close to zero.

    Waits for the device. Raises ShapeError for another dtype, ConfigError for a threshold below 0.
    """
    if not threshold >= 0:
        raise ConfigError(f"threshold={threshold} must be at least 0")
    expect("values", values.reshape(-1), "X", FLOATS)
    return NearZero(int((values.abs() <= threshold).sum()), values.numel(), threshold)
