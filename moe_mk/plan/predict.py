"""How long an exchange takes on a fabric: a line through what is published of it, or its bytes at the links' rate.

    t = alpha + remote bytes / beta        least squares, where two rows or more with several nodes are published

A prediction names its sources and the error of the line on its own rows, which is zero for two rows. `left_out` is the
error on a row that was not fitted: a row at either end is an extrapolation, and errs most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_mk.config.device import BYTES_PER_US
from moe_mk.errors import ConfigError
from moe_mk.plan.exchange import Exchange
from moe_mk.plan.links import Direction, LinkProfile, Measured, Mode

"""Bytes a microsecond of one GB/s."""


@dataclass(frozen=True)
class Line:
    """Microseconds of so many remote bytes."""

    alpha_us: float
    gbs: float

    def us(self, remote_bytes: float) -> float:
        """alpha + bytes / beta."""
        return self.alpha_us + remote_bytes / (self.gbs * BYTES_PER_US)

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Least squares through (bytes, us); raises ConfigError if time does not grow with bytes."""
        x, y = np.array(points, np.float64).T if points else np.zeros((2, 0))
        if len(np.unique(x)) < 2:
            raise ConfigError(f"a line needs two different amounts of bytes, got {len(np.unique(x))}")
        slope, alpha = np.polyfit(x, y, 1)
        if slope <= 0:
            raise ConfigError("the published times do not grow with the bytes: no line explains them")
        return cls(float(alpha), 1.0 / (float(slope) * BYTES_PER_US))

    def errors(self, points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
        """Of each point: predicted over measured, minus one."""
        return tuple(self.us(num_bytes) / us - 1.0 for num_bytes, us in points)


@dataclass(frozen=True)
class Prediction:
    """One direction of an exchange."""

    us: float
    num_bytes: float
    """All bytes of a rank, those inside its node too."""
    remote_bytes: float
    basis: str
    """What the time stands on."""

    @property
    def logical_gbs(self) -> float:
        """All bytes over time, as benchmarks report it."""
        return self.num_bytes / (self.us * BYTES_PER_US)

    @property
    def remote_gbs(self) -> float:
        """What really crosses nodes over time."""
        return self.remote_bytes / (self.us * BYTES_PER_US)


def predict(profile: LinkProfile, exchange: Exchange, mode: Mode, direction: Direction) -> Prediction:
    """The time of one direction, by the best that is known of the fabric."""
    moved, remote = exchange.num_bytes(mode, direction), exchange.remote_bytes(mode, direction)
    if exchange.nodes == 1:
        row = next((row for row in profile.rows(mode) if row.ranks == exchange.ranks), None)
        rate = None if row is None else _logical(row, exchange_of(profile, row), direction)
        if rate is not None:
            return Prediction(moved / (rate * BYTES_PER_US), moved, remote, f"bytes at the published {rate:.0f} GB/s")
        return Prediction(
            moved / (profile.intra_gbs * BYTES_PER_US), moved, remote, f"bytes at {profile.intra_gbs:g} GB/s in a node"
        )
    points = points_of(profile, mode, direction)
    try:
        line = Line.fit(points)
    except ConfigError as problem:
        legs = remote / profile.inter_gbs + (moved - remote) / profile.intra_gbs
        return Prediction(legs / BYTES_PER_US, moved, remote, f"bytes at the rates of the links ({problem})")
    worst = max(abs(error) for error in line.errors(points))
    known = f"a line within {100 * worst:.1f} % of {len(points)} rows"
    known += _unseen(points)
    basis = f"{line.alpha_us:.1f} us + bytes at {line.gbs:.1f} GB/s, {known}"
    return Prediction(line.us(remote), moved, remote, basis)


def _unseen(points: Sequence[tuple[float, float]]) -> str:
    """The error of the fit on rows that it has not seen."""
    if len(points) < 3:
        return ""
    try:
        worst = max(abs(error) for error in left_out(points))
    except ConfigError:
        return "; without one of them no line explains the others"
    return f", and within {100 * worst:.1f} % of each row that is left out of the fit"


def points_of(profile: LinkProfile, mode: Mode, direction: Direction) -> list[tuple[float, float]]:
    """(remote bytes, microseconds) of every published row with several nodes; where only GB/s are given, derived."""
    points = []
    for row in profile.rows(mode):
        exchange = exchange_of(profile, row)
        us, gbs = row.us(direction), row.gbs(direction)
        if us is None and gbs is not None:
            us = exchange.num_bytes(mode, direction) / (gbs * BYTES_PER_US)
        if exchange.nodes > 1 and us is not None:
            points.append((exchange.remote_bytes(mode, direction), us))
    return points


def left_out(points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Of each point: the error of the line through all the others. Needs three points."""
    lines = [Line.fit([*points[:i], *points[i + 1 :]]) for i in range(len(points))]
    return tuple(line.errors([point])[0] for line, point in zip(lines, points, strict=True))


def exchange_of(profile: LinkProfile, row: Measured) -> Exchange:
    """What a published row measured: the benchmarks of DeepEP and UCCL-EP, DeepSeek-V3's layer.

    4096 tokens, four groups and as many experts as divide over the ranks; or 128 tokens of which up to ten of the 1024
    choices are masked.
    """
    experts = 256 // row.ranks * row.ranks
    base = Exchange(4096, row.ranks, profile.ranks_per_node, num_experts=experts)
    return base if row.mode == "throughput" else replace(base, tokens=128, dropped=10, nodes_kept=None)


def _logical(row: Measured, exchange: Exchange, direction: Direction) -> float | None:
    us = row.us(direction)
    return exchange.num_bytes(row.mode, direction) / (us * BYTES_PER_US) if us is not None else row.gbs(direction)
