"""Kernel parameters as data: which tile serves how many rows an expert, measured where a file says so.

`configs/tuned/NVIDIA_<device>/triton/<case>.json` holds points of one tuned case, as `moe-mk tune triton` writes them
(by tokens, one file for each top_k) or the queue of the GPU (by rows an expert). Between two points the nearer one on a
logarithmic scale serves; outside the tuned range nothing is extrapolated and the built-in table serves.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moe_mk.config.shipped import config_folder
from moe_mk.config.tuned import between, nearest, top_k_in
from moe_mk.errors import ConfigError
from moe_mk.files import read_json
from moe_mk.kernels.triton.tile import Tile

LOGGER = logging.getLogger(__name__)

BUILT_IN: tuple[tuple[float, Tile], ...] = (
    (8.0, Tile(rows=16, swap=True, warps=4, stages=5)),
    (20.0, Tile(rows=32, swap=True, warps=4, stages=4)),
    (80.0, Tile(rows=64, swap=False, warps=8, stages=4)),
    (math.inf, Tile(rows=128, swap=False, warps=8, stages=3)),
)
"""Mean rows an expert up to which a tile serves; it holds 1.6 times as many, so that few experts need two."""
DECODED: tuple[tuple[float, Tile], ...] = (
    *BUILT_IN[:2],
    (80.0, Tile(rows=64, swap=True, warps=8, stages=4)),
    BUILT_IN[-1],
)
"""The same for weights that are decoded in registers: as the left operand they need not go through shared memory."""
CANDIDATES: tuple[Tile, ...] = (
    *(Tile(16, True, 4, stages) for stages in (4, 5)),
    *(Tile(32, True, warps, stages) for warps in (4, 8) for stages in (3, 4)),
    *(Tile(64, False, warps, stages) for warps in (4, 8) for stages in (3, 4)),
    Tile(64, True, 8, 4),
    *(Tile(128, False, 8, stages) for stages in (2, 3)),
    *(Tile(rows, True, 4, stages, "gluon") for rows in (8, 16, 32) for stages in (4, 6)),
    *(Tile(128, False, 4, stages, "gluon") for stages in (3, 4)),
)
"""What tuning tries."""
CHOICES = 8
"""Experts a token is taken to visit where only its number of tokens is known."""


@dataclass(frozen=True)
class Case:
    """What a tuned file is valid for."""

    hidden_size: int
    intermediate_size: int
    num_slots: int
    weights: str
    """Name of the scheme of the weights."""
    compute: str
    """Name of the scheme that activations are rounded to."""

    @property
    def file_name(self) -> str:
        """Such as H7168_I2048_L256_fp8_128x128_fp8_1x128.json."""
        shape = f"H{self.hidden_size}_I{self.intermediate_size}_L{self.num_slots}"
        return f"{shape}_{self.weights}_{self.compute}.json"

    def choices_of(self, file: Path) -> int | None:
        """The top_k of a session's file of this case; None for other files, those without a top_k among them."""
        shape = f"H{self.hidden_size}_I{self.intermediate_size}_L{self.num_slots}"
        return top_k_in(file.name, f"{shape}_K*_{self.weights}_{self.compute}.json")


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
    built_in: tuple[tuple[float, Tile], ...] = BUILT_IN
    """What serves outside."""

    def point(self, rows_an_expert: float) -> Point | None:
        """The measured point nearest on a logarithmic scale; None outside the measured range."""
        found = nearest([point.rows_an_expert for point in self.points], rows_an_expert)
        return None if found is None else self.points[found]

    def tile(self, rows_an_expert: float) -> Tile:
        """The measured tile inside the tuned range, the built-in one outside."""
        point = self.point(rows_an_expert)
        if point is not None:
            return point.tile
        return next(tile for most, tile in self.built_in if rows_an_expert <= most)

    def microseconds(self, rows_an_expert: float) -> float | None:
        """Measured time, a straight line between neighbouring points on logarithmic scales; None outside the range."""
        return between([(point.rows_an_expert, point.microseconds) for point in self.points], rows_an_expert)


def sensible(tile: Tile, rows_an_expert: float) -> bool:
    """Whether a tile is worth trying: neither eight times too small nor, beyond the small ones, mostly empty."""
    rows = rows_an_expert
    return tile.rows >= min(rows / 8, 128) and (tile.rows <= 32 or tile.rows <= 8 * rows)


def only(tile: Tile) -> Tuned:
    """One tile for every number of rows."""
    return Tuned((Point(2.0**-30, tile, 1.0), Point(2.0**30, tile, 1.0)))


def tile_of(parameters: Mapping[str, Any]) -> Tile:
    """A tile by the names of its fields. Raises ConfigError for one that no kernel has, or that does not fit."""
    try:
        return Tile(**parameters)
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"{dict(parameters)} is no tile of the Triton experts: {problem}") from None


def tuned_file(device: str, case: Case, folder: Path | None = None) -> Path:
    """Where the tuned points of a case on a device lie. device: of a profile (h200), or as torch calls it."""
    root = folder or config_folder() / "tuned"
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", device if device.lower().startswith("nvidia") else f"NVIDIA_{device}")
    there = [each.name for each in root.iterdir() if each.name.lower() == name.lower()] if root.is_dir() else []
    return root / (there[0] if there else name.upper()) / "triton" / case.file_name


def load_tuned(
    device: str,
    case: Case,
    folder: Path | None = None,
    *,
    log: bool = True,
    built_in: tuple[tuple[float, Tile], ...] = BUILT_IN,
) -> Tuned:
    """Read the points of a case from all its files; none is logged in one line and gives no points.

    Raises ConfigError for a file that does not hold points.
    """
    file = tuned_file(device, case, folder)
    sessions = {each: case.choices_of(each) for each in sorted(file.parent.glob("*.json"))}
    points = _read(file, None, case) if file.is_file() else ()
    for each, choices in sessions.items():
        points += _read(each, choices, case) if choices is not None else ()
    if not points and log:
        _say_missing(file, device)
    return Tuned(tuple(sorted(points, key=lambda point: point.rows_an_expert)), built_in)


def _read(file: Path, choices: int | None, case: Case) -> tuple[Point, ...]:
    """The points of one file; those of a session count tokens, each of which has `choices` experts."""
    try:
        given = read_json(file)["points"]
        if choices is None:
            return _points(given)
        share = choices / case.num_slots
        return _points(
            {"rows_an_expert": p["tokens"] * share, "tile": p["parameters"], "microseconds": p["microseconds"]}
            for p in given
        )
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise ConfigError(
            f"{file} holds no tuned tiles: {type(problem).__name__}: {problem}; run moe-mk tune triton"
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
