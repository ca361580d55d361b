"""What a device can do, as data: the oracle asks a profile, never the hardware, so any device can be imagined."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moe_mk.config.base import Settings


class DeviceProfile(Settings):
    """One kind of device and the links between its ranks. Rates are sustained, not peak advertising."""

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
