"""What was measured on a device: how its cases are called, where their files lie, and how they are read.

`configs/tuned/<device>/<experts>/<case>.json`. Between two points the nearer one on a logarithmic scale serves. Outside
the tuned range nothing is extrapolated.
"""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_mk.config.shipped import config_folder
from moe_mk.errors import ConfigError
from moe_mk.files import read_json
from moe_mk.quant.fp8_block import FP8_1x128, FP8_128x128
from moe_mk.quant.int8 import INT8_CHANNEL, INT8_TOKEN
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import NVFP4
from moe_mk.quant.tensor import QuantScheme

LOGGER = logging.getLogger(__name__)

MOST_TOKENS = 2**31 - 1
Value = int | bool | str
Candidate = Mapping[str, Value]
WEIGHTS: Mapping[str, QuantScheme] = {
    "fp8": FP8_128x128, "int8": INT8_CHANNEL, "mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4,
}  # fmt: skip
ACTIVATIONS: Mapping[str, QuantScheme] = {"fp8": FP8_1x128, "int8": INT8_TOKEN}
"""By the names of the options of `moe-mk tune`; "plain" is the layer's dtype in both."""


def case_name(shape: tuple[int, int, int, int | str], weights: QuantScheme, compute: QuantScheme) -> str:
    """Of a file, without the ending. shape: hidden size, intermediate size, slots, top_k ("*" for a pattern)."""
    hidden, inner, slots, top_k = shape
    return f"H{hidden}_I{inner}_L{slots}_K{top_k}_{weights.name}_{compute.name}"


def tune_command(experts: str, shape: tuple[int, int, int, int], weights: QuantScheme, compute: QuantScheme) -> str:
    """The command that measures a case. shape: hidden size, intermediate size, slots, top_k."""
    hidden, inner, slots, top_k = shape
    formats = f"--weights {_option(WEIGHTS, weights)} --activations {_option(ACTIVATIONS, compute)}"
    return f"moe-mk tune {experts} --hidden {hidden} --intermediate {inner} --slots {slots} --top-k {top_k} {formats}"


def _option(named: Mapping[str, QuantScheme], scheme: QuantScheme) -> str:
    return next((name for name, each in named.items() if each.family == scheme.family), "plain")


@dataclass(frozen=True)
class TunedPoint:
    """The fastest parameters at one number of tokens."""

    tokens: int
    parameters: Candidate
    microseconds: float
    """Of one run of the experts."""


@dataclass(frozen=True)
class Measured:
    """All points of a case, by tokens; empty: nothing was measured."""

    points: tuple[TunedPoint, ...] = ()

    def at(self, tokens: int) -> TunedPoint | None:
        """The measured point nearest on a logarithmic scale; None outside the tuned range."""
        found = nearest([point.tokens for point in self.points], tokens)
        return None if found is None else self.points[found]

    def microseconds(self, tokens: int) -> float | None:
        """A straight line between neighbouring points on logarithmic scales; None outside the tuned range."""
        return between([(point.tokens, point.microseconds) for point in self.points], tokens)


def nearest(places: Sequence[float], at: float) -> int | None:
    """Which place is nearest on a logarithmic scale, the first of equals; None outside. places: positive, ascending."""
    if not places or not places[0] <= at <= places[-1]:
        return None
    return min(range(len(places)), key=lambda index: abs(math.log(places[index] / at)))


def between(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """The height of a line of (place, height) on logarithmic scales; None outside. points: positive, ascending."""
    if not points or not points[0][0] <= at <= points[-1][0]:
        return None
    upper = bisect_left(points, at, key=lambda point: point[0])
    (high_at, high), (low_at, low) = points[upper], points[max(upper - 1, 0)]
    if high_at in (at, low_at):
        return high
    share = math.log(at / low_at) / math.log(high_at / low_at)
    return float(low * (high / low) ** share)


def top_k_in(name: str, pattern: str) -> int | None:
    """The number that stands in a name where `case_name` left a * in a pattern; None if it is no name of that case."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    return int(found[1]) if found else None


def tuned_path(device: str, experts: str, case: str, folder: Path | None = None) -> Path:
    """Where the points of a case lie. device: as people call it, made fit for a file name."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", device).strip("_")
    return (folder or config_folder() / "tuned") / safe / experts / f"{case}.json"


def load_measured(path: Path, command: str) -> Measured:
    """Read points; a missing file is one line in the log with the command that writes it, and gives none.

    Raises ConfigError for a file that holds no points.
    """
    if not path.is_file():
        LOGGER.info("no tuned parameters in %s; built-in ones serve. To measure: %s", path, command)
        return Measured()
    try:
        given = read_json(path)["points"]
        return Measured(_points(given))
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise ConfigError(f"{path} holds no tuned points: {type(problem).__name__}: {problem}; run {command}") from None


def _points(given: Any) -> tuple[TunedPoint, ...]:
    points = [TunedPoint(int(p["tokens"]), dict(p["parameters"]), float(p["microseconds"])) for p in given]
    for point in points:
        if not 1 <= point.tokens <= MOST_TOKENS or not 0 < point.microseconds < math.inf:
            raise ValueError(f"tokens and microseconds must be positive, tokens no more than {MOST_TOKENS}")
    if len({point.tokens for point in points}) != len(points):
        raise ValueError("two points have the same number of tokens")
    return tuple(sorted(points, key=lambda point: point.tokens))
