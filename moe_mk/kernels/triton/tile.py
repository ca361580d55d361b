"""Tile parameters of the grouped GEMMs, written by tuning; this module does not import triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_mk.registry import Records, more_backends

BLOCK = 128
"""Rows and columns of a weight block with one scale, and columns of an activation group."""
SHARED_MEMORY = 232_448
"""Bytes of shared memory available to one program on sm_90."""


@dataclass(frozen=True)
class Engine:
    """Kernels of the grouped GEMMs; another distribution adds one by an entry point of `moe_mk.triton_engines`.

    rows: of its tiles, by `Tile.swap`. archs: major compute capabilities that they compile for; empty: all of TARGETS.
    gemms: both GEMMs for the experts of a call (`kernels.triton.experts.Experts`) and the columns of its rows; None
    where the Triton kernel is to serve. tried: rows, swap, warps and stages of the tiles that tuning measures.
    """

    name: str
    rows: Mapping[bool, tuple[int, ...]]
    archs: frozenset[int] = frozenset()
    gemms: Callable[[Any, int], tuple[Callable[..., None] | None, Callable[..., None] | None]] = lambda *_: (None, None)
    tried: tuple[tuple[int, bool, int, int], ...] = ()


TRITON = Engine("triton", {True: (16, 32, 64), False: (16, 32, 64, 128)})
ENGINES: Mapping[str, Engine] = Records(Engine, "moe_mk.triton_engines", {TRITON.name: TRITON})


def engines_for(major: int | None) -> tuple[str, ...]:
    """Engines whose kernels compile for a major compute capability; None: all of them."""
    return tuple(name for name, each in ENGINES.items() if major is None or not each.archs or major in each.archs)


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
    engine: str = TRITON.name
    """The kernels, a name of `ENGINES`."""

    def __post_init__(self) -> None:
        rows = {} if self.engine not in ENGINES else ENGINES[self.engine].rows
        if self.rows not in rows.get(self.swap, ()):
            known = {(name, swap): of for name, each in ENGINES.items() for swap, of in each.rows.items()}
            raise ValueError(f"no kernel multiplies {self}; rows of a tile by (engine, swap): {known}{more_backends()}")
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
    """The grouped GEMMs as Triton 3.6 compiles them for one architecture. A test compiles and compares them."""

    name: str
    spilling: tuple[int, ...] = ()
    """Rows of the built-in FP8 tiles that spill registers."""

    def __str__(self) -> str:
        spills = f"; FP8 tiles of {' and '.join(map(str, self.spilling))} rows spill registers" if self.spilling else ""
        return f"compiled generically for {self.name}{spills}"


TARGETS: Mapping[int, Target] = {
    9: Target("sm_90"),
    # The kernels compile to generic code that was not tuned.
    10: Target("sm_100", spilling=(32, 128)),
}
"""By major compute capability. Kernels of other architectures are refused: tiles need the shared memory of these."""
NOT_COMPILING: Mapping[str, str] = {
    "gfx942": "the Triton kernels do not compile for gfx942: all of them use programmatic dependent launch, and tiles "
    "of 64 and more rows assembly, both of NVIDIA GPUs"
}
"""Other architectures that were tried, and why they have no kernels. A test compiles for them."""
