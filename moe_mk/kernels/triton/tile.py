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
