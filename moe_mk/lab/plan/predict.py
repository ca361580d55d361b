"""How long an exchange takes on a fabric: a line through what is published of it, or of others with the same links.

    own rows      t = alpha + remote bytes / beta        where two rows with several nodes are published of a profile
    same links    t = max(near, far)                     near, far = alpha + bytes / beta, constants of a kind of link

Constants of a kind of link are fitted to the rows that profiles mark with `fits`, dispatch and combine apart between
nodes and together inside one. Every other row is held out: `held_out` predicts it from constants that were fitted to
other tables, and a table that holds fitted rows from the tables that are left. A prediction names its sources and its
errors on rows that it was not fitted to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np

from moe_mk.config.device import BYTES_PER_US
from moe_mk.errors import ConfigError
from moe_mk.lab.plan.exchange import Exchange
from moe_mk.lab.plan.links import Direction, Leg, LinkProfile, Measured, Mode, link_profile, shipped_links

DIRECTIONS: tuple[Direction, ...] = ("dispatch", "combine")


@dataclass(frozen=True)
class Line:
    """Microseconds of so many remote bytes."""

    alpha_us: float
    gbs: float

    def us(self, remote_bytes: float) -> float:
        """alpha + bytes / beta."""
        return self.alpha_us + remote_bytes / (self.gbs * BYTES_PER_US)

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]], *, relative: bool = False) -> Line:
        """Least squares through (bytes, us); raises ConfigError if time does not grow with bytes.

        relative: squares of errors in proportion to the time, for points of very different times.
        """
        x, y = np.array(points, np.float64).T if points else np.zeros((2, 0))
        if len(np.unique(x)) < 2:
            raise ConfigError(f"a line needs two different amounts of bytes, got {len(np.unique(x))}")
        slope, alpha = np.polyfit(x, y, 1, w=1.0 / y if relative else None)
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
        """Return the bytes that cross nodes, divided by time, in GB/s."""
        return self.remote_bytes / (self.us * BYTES_PER_US)


def predict(profile: LinkProfile, exchange: Exchange, mode: Mode, direction: Direction) -> Prediction:
    """The time of one direction, by the best that is known of the fabric."""
    moved, remote = exchange.num_bytes(mode, direction), exchange.remote_bytes(mode, direction)
    if exchange.nodes == 1:
        row = next((row for row in profile.rows(mode) if row.ranks == exchange.ranks), None)
        rate = None
        if row is not None and (us := row.us(direction)) is not None:
            rate = exchange_of(profile, row).num_bytes(mode, direction) / (us * BYTES_PER_US)
        elif row is not None:
            rate = row.gbs(direction)
        if rate is not None:
            return Prediction(moved / (rate * BYTES_PER_US), moved, remote, f"bytes at the published {rate:.0f} GB/s")
        if shared := by_kind(profile, exchange, mode, direction):
            return shared
        return Prediction(
            moved / (profile.intra_gbs * BYTES_PER_US), moved, remote, f"bytes at {profile.intra_gbs:g} GB/s in a node"
        )
    points = points_of(profile, mode, direction)
    try:
        line = Line.fit(points)
    except ConfigError as problem:
        if not points and (shared := by_kind(profile, exchange, mode, direction)):
            return shared
        legs = remote / profile.inter_gbs + (moved - remote) / profile.intra_gbs
        return Prediction(legs / BYTES_PER_US, moved, remote, f"bytes at the rates of the links ({problem})")
    worst = max(abs(error) for error in line.errors(points))
    known = f"a line within {100 * worst:.1f} % of {len(points)} rows"
    known += _unseen(points)
    basis = f"{line.alpha_us:.1f} us + bytes at {line.gbs:.1f} GB/s, {known}"
    return Prediction(line.us(remote), moved, remote, basis)


def by_kind(profile: LinkProfile, exchange: Exchange, mode: Mode, direction: Direction) -> Prediction | None:
    """The time by the constants of the profile's links; None where nothing is known of one that is needed."""
    found = _slower_leg(profile, exchange, mode, direction, without="")
    if found is None:
        return None
    us, leg, line, tables = found
    where = "inside nodes" if leg == "near" else "between nodes"
    basis = f"{line.alpha_us:.1f} us + bytes {where} at {line.gbs:.1f} GB/s, fitted to {', '.join(tables)}"
    kind = profile.near if leg == "near" else profile.far
    errors = [each.error for each in held_out(leg, kind) if not each.is_fitted]
    if errors:
        worst = max(errors, key=abs)
        basis += (
            f"; of {len(errors)} values of other tables that no constant was fitted to "
            f"{sum(abs(error) <= GOAL for error in errors)} are met within {100 * GOAL:.0f} %, "
            f"median {100 * median(map(abs, errors)):.1f} %, worst {100 * worst:+.0f} %"
        )
    moved, remote = exchange.num_bytes(mode, direction), exchange.remote_bytes(mode, direction)
    return Prediction(us, moved, remote, basis)


GOAL = 0.2
"""The error within which a held-out value counts as met."""


@dataclass(frozen=True)
class HeldOut:
    """A published value, and what constants predict that were fitted to other tables."""

    profile: LinkProfile
    row: Measured
    direction: Direction
    published_us: float
    predicted_us: float
    is_fitted: bool
    """Whether constants of `plan exchange` are fitted to other rows of its table."""

    @property
    def error(self) -> float:
        """Predicted over published, minus one."""
        return self.predicted_us / self.published_us - 1.0


@cache
def held_out(leg: Leg | None = None, kind: str = "") -> tuple[HeldOut, ...]:
    """Every published value with known kinds of links, predicted without the table that it is in.

    leg, kind: only rows inside one node of tables with that near link, or rows of several nodes with that far link.
    """
    found = (each for profile in _tables() for each in _held_out_of(profile))
    return tuple(
        each
        for each in found
        if leg is None or (_serves(each.profile, each.row, leg) and getattr(each.profile, leg) == kind)
    )


def _held_out_of(profile: LinkProfile) -> Iterator[HeldOut]:
    is_fitted = any(row.fits for row in profile.measured)
    for row in profile.measured:
        exchange = exchange_of(profile, row)
        for direction in DIRECTIONS:
            us = published_us(profile, row, direction)
            if us is None:
                continue
            leg = _slower_leg(profile, exchange, row.mode, direction, without=profile.name)
            if leg is None and row.fits is None:  # no other table has such links: other rows of this one
                leg = _slower_leg(profile, exchange, row.mode, direction, without="")
            if leg is not None:
                yield HeldOut(profile, row, direction, us, leg[0], is_fitted)


def _slower_leg(
    profile: LinkProfile, exchange: Exchange, mode: Mode, direction: Direction, *, without: str
) -> tuple[float, Leg, Line, tuple[str, ...]] | None:
    """Microseconds of the slower leg, which it is, its line and the tables that the line is fitted to."""
    near = _constants("near", profile.near, mode, direction, without)
    if near is None:
        return None
    legs: list[tuple[float, Leg, Line, tuple[str, ...]]] = [
        (near[0].us(exchange.near_bytes(mode, direction)), "near", *near)
    ]
    if exchange.nodes > 1:
        far = _constants("far", profile.far, mode, direction, without)
        if far is None:
            return None
        legs.append((far[0].us(exchange.remote_bytes(mode, direction)), "far", *far))
    return max(legs, key=lambda leg: leg[0])


@cache
def _constants(
    leg: Leg, kind: str, mode: Mode, direction: Direction, without: str
) -> tuple[Line, tuple[str, ...]] | None:
    """The line of a kind of link, and the tables that it is fitted to; None where none is published.

    without: a table that is left out. Where that leaves no row that is marked for it, all rows of other tables serve.
    Rows of latency kernels serve for throughput kernels too, not the other way round: a fixed cost of throughput
    kernels is that of a pipeline. Inside a node rows of both kinds are fitted together.
    """
    if not kind:
        return None
    profiles = [profile for profile in _tables() if kind == getattr(profile, leg)]
    others = [profile for profile in profiles if profile.name != without]
    is_left_out = any(row.fits == leg for profile in profiles if profile.name == without for row in profile.measured)
    for marked in (True, False) if is_left_out else (True,):
        found = [
            (p, row) for p in others for row in p.measured if _serves(p, row, leg) and (row.fits == leg or not marked)
        ]
        modes = (None,) if leg == "near" else ((mode, "latency") if mode == "throughput" else (mode,))
        for wanted in modes:
            points, tables = [], []
            for p, row in found:
                if wanted in (None, row.mode):
                    for each in DIRECTIONS if leg == "near" else (direction,):
                        us, exchange = published_us(p, row, each), exchange_of(p, row)
                        if us is not None:
                            size = exchange.near_bytes if leg == "near" else exchange.remote_bytes
                            points.append((size(row.mode, each), us))
                            tables.append(p.name)
            try:
                return Line.fit(points, relative=leg == "near"), tuple(dict.fromkeys(tables))
            except ConfigError:
                continue
    return None


@cache
def _tables() -> tuple[LinkProfile, ...]:
    return tuple(map(link_profile, shipped_links()))


def _serves(profile: LinkProfile, row: Measured, leg: Leg) -> bool:
    return (row.ranks <= profile.ranks_per_node) == (leg == "near")


def published_us(profile: LinkProfile, row: Measured, direction: Direction) -> float | None:
    """Microseconds of a row, derived from its bandwidth where only that is published; None where neither is."""
    us, gbs = row.us(direction), row.gbs(direction)
    if us is None and gbs is not None:
        us = exchange_of(profile, row).num_bytes(row.mode, direction) / (gbs * BYTES_PER_US)
    return us


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
        us = published_us(profile, row, direction)
        if exchange.nodes > 1 and us is not None:
            points.append((exchange.remote_bytes(mode, direction), us))
    return points


def left_out(points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Of each point: the error of the line through all the others. Needs three points."""
    lines = [Line.fit([*points[:i], *points[i + 1 :]]) for i in range(len(points))]
    return tuple(line.errors([point])[0] for line, point in zip(lines, points, strict=True))


def exchange_of(profile: LinkProfile, row: Measured) -> Exchange:
    """Return the exchange of a published row: by default DeepSeek-V3's in the benchmarks of DeepEP and UCCL-EP.

    4096 tokens, four groups and as many experts as divide over the ranks; or 128 tokens of which up to ten of the 1024
    choices are masked.
    """
    per_rank = profile.experts_per_rank or 256 // row.ranks
    tokens = row.tokens or (4096 if row.mode == "throughput" else 128)
    is_latency = row.mode == "latency"
    return Exchange(
        tokens, row.ranks, profile.ranks_per_node, num_experts=per_rank * row.ranks, wire=row.wire,
        nodes_kept=None if is_latency else profile.nodes_kept, dropped=profile.dropped if is_latency else 0,
    )  # fmt: skip
