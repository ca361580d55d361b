"""Device profiles and the roofline over them. The oracle reads profiles, never the hardware: any device can be planned.

The roofline is the one model of time in the project: an operation takes the longer of its bytes at the memory bandwidth
and its floating-point operations at the rate of the matrix units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from moe_mk.config.base import Settings

BYTES_PER_US = 1e3
"""Bytes a microsecond at 1 GB/s."""
FLOPS_PER_US = 1e6
"""Floating-point operations a microsecond at 1 TFLOP/s."""


class DeviceProfile(Settings):
    """One kind of device and the links between its ranks. Rates are sustained, not peak."""

    name: str
    kind: Literal["cpu", "cuda", "rocm"]
    arch: tuple[int, int] | None = None
    """CUDA compute capability, (9, 0) for Hopper; None where there is none."""
    gfx: str = ""
    """AMD target, such as gfx942."""
    memory_gib: float = Field(gt=0)
    memory_gbs: float = Field(gt=0)
    """Memory bandwidth, GB/s."""
    bf16_tflops: float = Field(gt=0)
    fp8_tflops: float = Field(default=0.0, ge=0)
    """0: no FP8 matrix units."""
    ranks_per_node: int = Field(default=8, ge=1)
    intra_node_gbs: float = Field(gt=0)
    """Bytes one rank can send inside a node, GB/s."""
    inter_node_gbs: float = Field(gt=0)
    """Bytes one rank can send between nodes, GB/s."""
    collective_us: float = Field(default=20.0, ge=0)
    """Fixed cost of one collective, microseconds."""
    launch_us: float = Field(default=4.0, ge=0)
    """Fixed cost of one kernel or operator call, microseconds."""


@dataclass(frozen=True)
class Rates:
    """The rates of one device that the roofline needs: GB/s and TFLOP/s."""

    memory_gbs: float
    fp8_tflops: float
    bf16_tflops: float

    @classmethod
    def of(cls, profile: DeviceProfile) -> Rates:
        """The rates of a profile. A device without FP8 matrix units multiplies FP8 at the bf16 rate."""
        return cls(profile.memory_gbs, profile.fp8_tflops or profile.bf16_tflops, profile.bf16_tflops)

    def memory_us(self, num_bytes: float, efficiency: float = 1.0) -> float:
        """Microseconds to move bytes at a fraction of the memory bandwidth."""
        return num_bytes / (self.memory_gbs * BYTES_PER_US * efficiency)

    def compute_us(self, flops: float, *, fp8: bool, efficiency: float = 1.0) -> float:
        """Microseconds of floating-point operations at a fraction of the FP8 or bf16 rate."""
        return flops / ((self.fp8_tflops if fp8 else self.bf16_tflops) * FLOPS_PER_US * efficiency)
