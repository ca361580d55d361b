"""How a grouped GEMM is cut: data that tuning writes and a backend reads, no kernel and no triton in it."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128
"""Rows and columns of a weight that share a scale, columns of an activation row that do."""
SHARED_MEMORY = 232_448
"""Bytes of shared memory that one program may have on sm_90."""


@dataclass(frozen=True)
class Tile:
    """One way to run both GEMMs for a range of rows an expert."""

    rows: int
    """Token rows of a tile."""
    swap: bool
    """Whether the weights are the left operand: their 128 rows fill the matrix unit however few tokens there are."""
    warps: int
    stages: int
    """Steps of the reduction whose operands are on their way at once."""
    engine: str = "triton"
    """Which kernels: "triton", or "gluon" where a producer warp and the multiplying warps are told apart by hand."""

    def __post_init__(self) -> None:
        rows = {("triton", True): (16, 32, 64), ("triton", False): (16, 32, 64, 128)}
        rows |= {("gluon", True): (8, 16, 32), ("gluon", False): (128,)}
        if self.rows not in rows.get((self.engine, self.swap), ()):
            raise ValueError(f"no kernel multiplies {self}; rows of a tile by (engine, swap): {rows}")
        if self.warps not in (4, 8) or not 1 <= self.stages <= 8:
            raise ValueError(f"{self} needs 4 or 8 warps and 1 to 8 stages")
        if self.shared_bytes > SHARED_MEMORY:
            text = f"{self} keeps {self.shared_bytes} B on their way, a program may have {SHARED_MEMORY}"
            raise ValueError(f"{text}; at most {SHARED_MEMORY * self.stages // self.shared_bytes} stages fit")

    @property
    def shared_bytes(self) -> int:
        """Bytes on their way at once: two blocks of 128 weight rows and the token rows, 128 bytes of each, a stage."""
        return self.stages * (2 * BLOCK + self.rows) * 128
