"""The machines experts are placed on, array types of the balancer, and the error for what cannot be placed.

X layers or rows, W GPUs, P slots of all GPUs, S slots of one, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import lcm
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Doubles = NDArray[np.float64]
Floats = NDArray[np.float32] | NDArray[np.float64]


def tensor_of(load: Tensor | NDArray[np.generic]) -> Tensor:
    """Loads as a tensor. Raises ShapeError for what is no array of real numbers."""
    try:
        tensor = load if isinstance(load, Tensor) else torch.from_numpy(np.asarray(load))
    except (TypeError, ValueError) as problem:
        raise ShapeError(f"a load must be an array of numbers, [layers, experts]: {problem}") from problem
    if tensor.is_complex():
        raise ShapeError(f"a load is {tensor.dtype}; tokens are counted in real numbers")
    return tensor


class InfeasiblePlacement(ConfigError):
    """No placement satisfies the request; holds the requested value, the limit, and the next feasible value."""

    def __init__(self, message: str, *, asked: int, limit: int, next_feasible: int | None = None) -> None:
        self.asked, self.limit, self.next_feasible, self.message = asked, limit, next_feasible, message
        super().__init__(
            message if next_feasible is None else f"{message}; the next value that works is {next_feasible}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        named: dict[str, Any] = {"asked": self.asked, "limit": self.limit, "next_feasible": self.next_feasible}
        return partial(InfeasiblePlacement, **named), (self.message,)


Division = tuple[str, int, str, int]


def check_divisions(*divisions: Division, at_least: Division | None = None) -> None:
    """Raise InfeasiblePlacement naming every pair that does not divide; (what, size, by_what, parts) each.

    It has the next feasible value where one of the numbers alone is at fault.
    """
    problems: list[tuple[str, str, int, int]] = []
    for what, size, by_what, parts in divisions:
        if parts < 1:
            problems.append((f"{by_what}={parts} must be at least 1", by_what, parts, 1))
        elif size < 1 or size % parts:
            problems.append((f"{what}={size} does not divide by {by_what}={parts}", what, size, parts))
    if at_least is not None and at_least[1] < at_least[3]:
        what, size, by_what, least = at_least
        problems.append((f"{what}={size} are fewer than {by_what}={least}", what, size, least))
    if problems:
        message = "; ".join(text for text, *_ in problems)
        _, name, asked, limit = problems[0]
        upward = _next_feasible(name, asked, divisions, at_least)
        raise InfeasiblePlacement(message, asked=asked, limit=limit, next_feasible=upward)


def _next_feasible(name: str, asked: int, divisions: Sequence[Division], at_least: Division | None) -> int | None:
    """The smallest value of one number, from what was asked, with which all sizes divide; None if there is none."""
    least = at_least[3] if at_least is not None and at_least[0] == name else 1
    first, period = max(asked, least, 1), lcm(*(parts for what, _, _, parts in divisions if what == name and parts > 0))

    def fits(value: int) -> bool:
        sizes = [(value if what == name else n, value if by == name else parts) for what, n, by, parts in divisions]
        if at_least is not None:
            size, floor = (value if each == name else n for each, n in (at_least[:2], at_least[2:]))
            sizes.append((1 if size >= floor else 0, 1))
        return all(parts > 0 and size > 0 and size % parts == 0 for size, parts in sizes)

    start = -(-first // period) * period
    largest = min((size for _, size, by, _ in divisions if by == name), default=start)
    return next(filter(fits, range(start, largest + 1, period)[:MOST]), None)


MOST = 65536
"""GPUs, and slots of a GPU; the ranks of a layer are limited alike. So many next feasible values are tried at most."""


@dataclass(frozen=True)
class Topology:
    """GPUs, the nodes they stand in, and what each can hold and do.

    gpus: all of them, dead ones too, so that ranks keep their numbers. Node n holds the n-th equal run of GPUs.
    slots: physical experts per GPU, one number or one per GPU. speeds: relative, 1.0 each if not given.
    alive: False for a GPU that is lost; its slots stay empty.
    """

    gpus: int
    nodes: int = 1
    slots: int | Sequence[int] = 1
    speeds: Sequence[float] | None = None
    alive: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        check_divisions(("gpus", self.gpus, "nodes", self.nodes))
        for name in ("slots", "speeds", "alive"):  # lists are welcome; tuples keep the object hashable
            if isinstance(values := getattr(self, name), Sequence):
                object.__setattr__(self, name, tuple(values))
        wrong: list[str] = []
        given: tuple[tuple[str, int | Sequence[float] | None], ...] = (
            ("slots", self.slots), ("speeds", self.speeds), ("alive", self.alive),
        )  # fmt: skip
        for name, values in given:
            if isinstance(values, Sequence) and len(values) != self.gpus:
                wrong.append(f"{name} has {len(values)} entries for {self.gpus} GPUs")
        slots = self.slots if isinstance(self.slots, Sequence) else (self.slots,)
        if min(slots, default=1) < 0:
            wrong.append(f"slots={self.slots} has a negative entry")
        if self.gpus > MOST or max(slots, default=1) > MOST:
            wrong.append(f"gpus={self.gpus}, slots={max(slots, default=1)}: at most {MOST} each")
        if self.speeds is not None and not all(0 < speed < float("inf") for speed in self.speeds):
            wrong.append(f"speeds={self.speeds} must all be finite and above 0; say alive=False for a lost GPU")
        if self.alive is not None and not any(self.alive):
            wrong.append("no GPU is alive")
        if wrong:
            raise ConfigError("this topology cannot be: " + "; ".join(wrong))

    @cached_property
    def slots_W(self) -> Ints:
        """Slots of each GPU, dead ones included."""
        return np.broadcast_to(np.asarray(self.slots, np.int64), (self.gpus,)).copy()

    @cached_property
    def alive_W(self) -> Bools:
        return np.ones(self.gpus, bool) if self.alive is None else np.asarray(self.alive, bool)

    @cached_property
    def speed_W(self) -> Doubles:
        """Relative speed of each GPU."""
        return np.ones(self.gpus) if self.speeds is None else np.asarray(self.speeds, np.float64)

    @cached_property
    def node_W(self) -> Ints:
        return np.arange(self.gpus) // (self.gpus // self.nodes)

    @cached_property
    def gpu_P(self) -> Ints:
        """GPU of each slot: slots are numbered GPU after GPU."""
        return np.repeat(np.arange(self.gpus), self.slots_W)

    @property
    def num_slots(self) -> int:
        """Slots of all GPUs, dead ones included: the width of phy2log."""
        return int(self.slots_W.sum())

    def live_sites(self) -> Sites:
        """The GPUs that can hold an expert, renumbered from 0."""
        kept = np.flatnonzero(self.alive_W & (self.slots_W > 0))
        return Sites(
            self.slots_W[kept], self.speed_W[kept], self.node_W[kept], np.flatnonzero(np.isin(self.gpu_P, kept))
        )


@dataclass(frozen=True)
class Sites:
    """Living GPUs and their slots as arrays; slot_P gives the numbers that slots have in the topology."""

    slots_W: Ints
    speed_W: Doubles
    node_W: Ints
    slot_P: Ints

    @property
    def num_gpus(self) -> int:
        return len(self.slots_W)

    @property
    def num_slots(self) -> int:
        return int(self.slots_W.sum())

    @cached_property
    def site_P(self) -> Ints:
        return np.repeat(np.arange(self.num_gpus), self.slots_W)

    @cached_property
    def cell_WS(self) -> Ints:
        """Slots of each site, padded with num_slots where a site has fewer than the most."""
        column = np.arange(int(self.slots_W.max()))
        first = np.cumsum(self.slots_W) - self.slots_W
        cells: Ints = np.where(column < self.slots_W[:, None], first[:, None] + column, self.num_slots)
        return cells

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all sites are equally fast and equally large."""
        return bool(np.ptp(self.slots_W) == 0 and np.ptp(self.speed_W) == 0)

    def subset(self, sites: Ints) -> Sites:
        """Some of the sites; slot_P then points into this object's slots."""
        slots = np.flatnonzero(np.isin(self.site_P, sites))
        return Sites(self.slots_W[sites], self.speed_W[sites], self.node_W[sites], slots)

    def capacities(self, load_X: Doubles) -> Doubles:
        """The load of each site [X, W] if all finish at the same time."""
        part: Doubles = self.speed_W / self.speed_W.sum()
        return np.multiply(load_X[:, None], part)
