"""Tuned kernel parameters: case names, file locations, and one loader for all experts backends.

`configs/tuned/<device>/<experts>/<case>.json`. Between two measured points the nearer one on a logarithmic scale is
used. Outside the measured range the built-in parameters of the backend are used; nothing is extrapolated.
"""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from moe_mk.config.shipped import config_folder
from moe_mk.errors import ConfigError
from moe_mk.files import read_json
from moe_mk.quant.fp8 import FP8_1x128, FP8_128x128
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.kinds import FORMATS, KINDS
from moe_mk.quant.tensor import QuantScheme

LOGGER = logging.getLogger(__name__)

MOST_TOKENS = 2**31 - 1
MALFORMED = (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What reading a file of another content raises."""
P = TypeVar("P")
Value = int | bool | str
Candidate = Mapping[str, Value]
WEIGHTS: Mapping[str, QuantScheme] = {"fp8": FP8_128x128} | {
    kind: FORMATS[kind].scheme for kind in KINDS if kind == FORMATS[kind].scheme.family
}
ACTIVATIONS: Mapping[str, QuantScheme] = {"fp8": FP8_1x128, "int8": INT8_TOKEN}
"""By the names of the options of `moe-mk tune`; "plain" is the layer's dtype in both."""


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
class Case:
    """The shape and formats for which a tuned file is valid, without top_k."""

    hidden_size: int
    intermediate_size: int
    num_slots: int
    weights: str
    """Name of the scheme of the weights."""
    compute: str
    """Name of the scheme that activations are rounded to."""

    def name(self, top_k: int | str) -> str:
        """Of a file, without the ending: such as H7168_I2048_L256_K8_fp8_128x128_fp8_1x128. top_k: * for a pattern."""
        shape = f"H{self.hidden_size}_I{self.intermediate_size}_L{self.num_slots}_K{top_k}"
        return f"{shape}_{self.weights}_{self.compute}"


@dataclass(frozen=True)
class Point(Generic[P]):
    """One measurement: the fastest parameters at a mean number of rows per expert."""

    rows_an_expert: float
    parameters: P
    microseconds: float
    """Of one run of the experts."""


@dataclass(frozen=True)
class Tuned(Generic[P]):
    """Measured parameters of one case on one device, by mean rows per expert; empty: nothing was measured."""

    points: tuple[Point[P], ...]
    built_in: tuple[tuple[float, P], ...]
    """The parameters outside the measured range: (largest number of rows per expert, parameters), the last inf."""

    @classmethod
    def fixed(cls, parameters: P) -> Tuned[P]:
        """A table with equal parameters for every number of rows."""
        ends = (Point(2.0**-30, parameters, 1.0), Point(2.0**30, parameters, 1.0))
        return cls(ends, ((math.inf, parameters),))

    @classmethod
    def load(
        cls,
        folder: Path,
        case: Case,
        parse: Callable[[Mapping[str, Any]], P],
        built_in: tuple[tuple[float, P], ...],
        command: str,
        missing: Path | None = None,
    ) -> Tuned[P]:
        """Read the points of a case from its files for every top_k, in the folder of one device and backend.

        parse: makes parameters from their names. command: measures the case. missing: the file that one line per
        process reports if there are no points; None: nothing is logged. Raises ConfigError for a file without valid
        points.
        """
        pattern, points = case.name("*"), list[Point[P]]()
        for file in sorted(folder.glob("*.json")):
            top_k = top_k_in(file.stem, pattern)
            if top_k is not None:
                share = top_k / case.num_slots
                points += [
                    Point(each.tokens * share, _parsed(parse, each, file), each.microseconds)
                    for each in load_measured(file, command)
                ]
        if not points and missing is not None:
            _log_missing(missing, command)
        return cls(tuple(sorted(points, key=lambda point: point.rows_an_expert)), built_in)

    def point(self, rows_an_expert: float) -> Point[P] | None:
        """The measured point nearest on a logarithmic scale; None outside the measured range."""
        found = nearest([point.rows_an_expert for point in self.points], rows_an_expert)
        return None if found is None else self.points[found]

    def at(self, rows_an_expert: float) -> P:
        """The measured parameters inside the measured range, the built-in ones outside."""
        point = self.point(rows_an_expert)
        if point is not None:
            return point.parameters
        return next(parameters for most, parameters in self.built_in if rows_an_expert <= most)

    def microseconds(self, rows_an_expert: float) -> float | None:
        """Measured time, interpolated linearly on logarithmic scales; None outside the measured range."""
        return between([(point.rows_an_expert, point.microseconds) for point in self.points], rows_an_expert)


def _parsed(parse: Callable[[Mapping[str, Any]], P], point: TunedPoint, file: Path) -> P:
    try:
        return parse(point.parameters)
    except ConfigError as problem:
        raise ConfigError(f"{file}, {point.tokens} tokens: {problem}") from None


@cache
def _log_missing(file: Path, command: str) -> None:
    """Log a missing file once per process: every layer of a model reads the same one."""
    LOGGER.info("no tuned parameters in %s; the built-in ones are used. To measure: %s", file, command)


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
    """The number that stands in a name where `Case.name` left a * in a pattern; None if it is no name of that case."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    return int(found[1]) if found else None


def tuned_path(device: str, experts: str, case: str, folder: Path | None = None) -> Path:
    """Where the points of a case lie. device: as people call it, made fit for a file name."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", device).strip("_")
    return (folder or config_folder() / "tuned") / safe / experts / f"{case}.json"


def load_measured(path: Path, command: str) -> tuple[TunedPoint, ...]:
    """Read points, by tokens. command: measures them. Raises ConfigError for a file that holds none."""
    try:
        return _points(read_json(path)["points"])
    except MALFORMED as problem:
        why = f"{type(problem).__name__}: {problem}; run {command}"
        raise ConfigError(f"{path} holds no tuned points: {why}") from None


def _points(given: Any) -> tuple[TunedPoint, ...]:
    points = [TunedPoint(int(p["tokens"]), dict(p["parameters"]), float(p["microseconds"])) for p in given]
    for point in points:
        if not 1 <= point.tokens <= MOST_TOKENS or not 0 < point.microseconds < math.inf:
            raise ValueError(f"tokens and microseconds must be positive, tokens no more than {MOST_TOKENS}")
    if len({point.tokens for point in points}) != len(points):
        raise ValueError("two points have the same number of tokens")
    return tuple(sorted(points, key=lambda point: point.tokens))
