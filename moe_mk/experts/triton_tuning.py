"""Kernel parameters as data: which tile serves how many rows an expert, measured where a file says so.

`configs/tuned/<device>/triton/<case>.json` holds points of one tuned case. Between two points the nearer one on a
logarithmic scale serves; outside the tuned range nothing is extrapolated and the built-in table serves.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moe_mk.config.shipped import config_folder
from moe_mk.errors import ConfigError
from moe_mk.kernels.triton.tile import Tile

LOGGER = logging.getLogger(__name__)

BUILT_IN: tuple[tuple[float, Tile], ...] = (
    (8.0, Tile(rows=16, swap=True, warps=4, stages=5)),
    (20.0, Tile(rows=32, swap=True, warps=4, stages=4)),
    (80.0, Tile(rows=64, swap=False, warps=8, stages=4)),
    (math.inf, Tile(rows=128, swap=False, warps=8, stages=3)),
)
"""Mean rows an expert up to which a tile serves; it holds 1.6 times as many, so that few experts need two."""


@dataclass(frozen=True)
class Case:
    """What a tuned file is valid for."""

    hidden_size: int
    intermediate_size: int
    num_slots: int
    compute: str
    """Name of the scheme that activations are rounded to."""

    @property
    def file_name(self) -> str:
        """Such as H7168_I2048_L256_fp8_1x128.json."""
        return f"H{self.hidden_size}_I{self.intermediate_size}_L{self.num_slots}_{self.compute}.json"


@dataclass(frozen=True)
class Point:
    """One measurement: the fastest tile at a mean number of rows an expert."""

    rows_an_expert: float
    tile: Tile
    microseconds: float
    """Of w13 and w2 together."""


@dataclass(frozen=True)
class Tuned:
    """What tuning found on one device, by rows an expert; empty: nothing was measured."""

    points: tuple[Point, ...] = ()

    def point(self, rows_an_expert: float) -> Point | None:
        """The measured point nearest on a logarithmic scale; None outside the measured range."""
        if not self.points or not self.points[0].rows_an_expert <= rows_an_expert <= self.points[-1].rows_an_expert:
            return None
        return min(self.points, key=lambda point: abs(math.log(point.rows_an_expert / rows_an_expert)))

    def tile(self, rows_an_expert: float) -> Tile:
        """The measured tile inside the tuned range, the built-in one outside."""
        point = self.point(rows_an_expert)
        if point is not None:
            return point.tile
        return next(tile for most, tile in BUILT_IN if rows_an_expert <= most)

    def microseconds(self, rows_an_expert: float) -> float | None:
        """Measured time, a straight line between neighbouring points on logarithmic scales; None outside the range."""
        if self.point(rows_an_expert) is None:
            return None
        upper = next(i for i, point in enumerate(self.points) if point.rows_an_expert >= rows_an_expert)
        high, low = self.points[upper], self.points[max(upper - 1, 0)]
        if high.rows_an_expert == low.rows_an_expert:
            return high.microseconds
        share = math.log(rows_an_expert / low.rows_an_expert) / math.log(high.rows_an_expert / low.rows_an_expert)
        return float(low.microseconds * (high.microseconds / low.microseconds) ** share)


def tuned_file(device: str, case: Case, folder: Path | None = None) -> Path:
    """Where the tuned points of a case on a device lie."""
    return (folder or config_folder() / "tuned") / device / "triton" / case.file_name


def load_tuned(device: str, case: Case, folder: Path | None = None, *, log: bool = True) -> Tuned:
    """Read the points of a case; a missing file is logged in one line and gives none.

    Raises ConfigError for a file that does not hold points.
    """
    file = tuned_file(device, case, folder)
    if not file.is_file():
        if log:
            _say_missing(file, device)
        return Tuned()
    try:
        return Tuned(_points(json.loads(file.read_text(encoding="utf-8"))["points"]))
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"{file} holds no tuned tiles: {type(problem).__name__}: {problem}; run tools/gpu.py"
        ) from None


@cache
def _say_missing(file: Path, device: str) -> None:
    """Once a process: every layer of a model asks for the same file."""
    LOGGER.info("no tuned tiles for %s on %s (%s); the built-in table serves", file.name, device, file)


def as_json(points: Sequence[Point], about: Mapping[str, Any]) -> str:
    """A tuned file: what it was measured with, and the points in order."""
    ordered = sorted(points, key=lambda point: point.rows_an_expert)
    return json.dumps({**about, "points": [asdict(point) for point in ordered]}, indent=2) + "\n"


def _points(given: Any) -> tuple[Point, ...]:
    made = [
        Point(float(p["rows_an_expert"]), Tile(**p["tile"]), float(p["microseconds"]))
        for p in sorted(given, key=lambda p: float(p["rows_an_expert"]))
    ]
    for point in made:
        if not (point.rows_an_expert > 0 and point.microseconds > 0):
            raise ValueError(f"rows and microseconds must be positive: {point}")
    return tuple(made)
