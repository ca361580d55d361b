"""Tile parameters of the grouped GEMMs, written by tuning; this module does not import triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BLOCK = 128
"""Rows and columns of a weight block with one scale, and columns of an activation group."""
SHARED_MEMORY = 232_448
"""Bytes of shared memory available to one program on sm_90."""


@dataclass(frozen=True)
class Tile:
    """The parameters of both GEMMs for a range of rows per expert."""

    rows: int
    """Token rows of a tile."""
    swap: bool
    """Whether the weights are the left operand: their 128 rows fill the matrix unit however few tokens there are."""
    warps: int
    stages: int
    """Pipeline stages: steps of the reduction whose operands are loaded ahead."""
    engine: str = "triton"
    """The kernels: "triton", or "gluon" with explicitly specialised producer and multiplier warps."""

    def __post_init__(self) -> None:
        rows = {("triton", True): (16, 32, 64), ("triton", False): (16, 32, 64, 128)}
        rows |= {("gluon", True): (8, 16, 32), ("gluon", False): (64, 128)}
        if self.rows not in rows.get((self.engine, self.swap), ()):
            raise ValueError(f"no kernel multiplies {self}; rows of a tile by (engine, swap): {rows}")
        if self.warps not in (4, 8) or not 1 <= self.stages <= 8:
            raise ValueError(f"{self} needs 4 or 8 warps and 1 to 8 stages")
        if self.shared_bytes > SHARED_MEMORY:
            text = f"{self} needs {self.shared_bytes} B of shared memory, a program has {SHARED_MEMORY}"
            raise ValueError(f"{text}; at most {SHARED_MEMORY * self.stages // self.shared_bytes} stages fit")

    @property
    def shared_bytes(self) -> int:
        """Bytes of all stages, each with two blocks of 128 weight rows and the token rows, 128 bytes per row."""
        return self.stages * (2 * BLOCK + self.rows) * 128


@dataclass(frozen=True)
class Target:
    """What Triton 3.6 makes of the grouped GEMMs for one architecture. A test compiles them and compares."""

    name: str
    engines: tuple[str, ...]
    """Engines with kernels that compile for this architecture."""
    spilling: tuple[int, ...] = ()
    """Rows of the built-in FP8 tiles that spill registers."""

    def __str__(self) -> str:
        spills = f"; FP8 tiles of {' and '.join(map(str, self.spilling))} rows spill registers" if self.spilling else ""
        return f"compiled generically for {self.name}{spills}"


TARGETS: Mapping[int, Target] = {
    9: Target("sm_90", ("triton", "gluon")),
    # Gluon's kernels use warpgroup products of Hopper. The Triton ones compile to generic code that was not tuned.
    10: Target("sm_100", ("triton",), spilling=(32, 128)),
}
"""By major compute capability. Kernels of other architectures are refused: tiles need the shared memory of these."""
NOT_COMPILING: Mapping[str, str] = {
    "gfx942": "the Triton kernels do not compile for gfx942: all of them use programmatic dependent launch, and tiles "
    "of 64 and more rows assembly, both of NVIDIA GPUs"
}
"""Other architectures that were tried, and why they have no kernels. A test compiles for them."""
