"""Who owns which weights and which batch: five ways to lay one layer out over a grid of devices.

    data            every device all weights                     a shard of the batch each
    model           a slice of the weights each                  the whole batch everywhere
    model+data      sqrt(W) slices, copied sqrt(W) times         a shard for each row of the grid
    expert+data     an expert each                               a shard of the batch each
    expert+model+data  sqrt(W) experts in sqrt(W) slices each    a shard for each row of the grid

Source: Fedus, Zoph and Shazeer 2021, Switch Transformers (arXiv 2101.03961), figure 9, for sixteen cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Literal, get_args

from moe_mk.errors import ConfigError
from moe_mk.registry import did_you_mean

Strategy = Literal["data", "model", "model+data", "expert+data", "expert+model+data"]


@dataclass(frozen=True)
class Owned:
    """What one device holds."""

    expert: int
    """Of `Layout.experts`."""
    slice: int
    """Of `Layout.slices`."""
    shard: int
    """Of `Layout.shards`."""


@dataclass(frozen=True)
class Layout:
    """The table of a strategy; entry d is device d."""

    strategy: Strategy
    experts: int
    """Different experts; 1 is a dense layer."""
    slices: int
    """Parts that an expert is cut into."""
    shards: int
    """Parts of the batch."""
    owned: tuple[Owned, ...]

    def owners(self, *, expert: int = 0, slice_: int = 0) -> frozenset[int]:
        """The devices that hold a slice of an expert."""
        return frozenset(d for d, own in enumerate(self.owned) if (own.expert, own.slice) == (expert, slice_))

    def readers(self, shard: int) -> frozenset[int]:
        """The devices that hold a shard of the batch."""
        return frozenset(d for d, own in enumerate(self.owned) if own.shard == shard)

    @property
    def copies(self) -> int:
        """Devices that hold the same weights."""
        return len(self.owned) // (self.experts * self.slices)

    def lines(self) -> Iterator[str]:
        """A line for each device."""
        for device, own in enumerate(self.owned):
            weights = f"expert {own.expert} of {self.experts}, slice {own.slice} of {self.slices}"
            yield f"{device:3d}  {weights:<32}  batch {own.shard} of {self.shards}"


def layout(strategy: str, devices: int) -> Layout:
    """The table of one strategy; raises ConfigError for an unknown one, or devices that make no square grid."""
    if strategy not in get_args(Strategy):
        raise ConfigError(f"no layout is called {strategy!r}{did_you_mean(strategy, get_args(Strategy))}")
    side = isqrt(max(devices, 0))
    if devices < 1 or (strategy.endswith("model+data") and side * side != devices):
        near = f"{side * side or 1} or {(side + 1) ** 2}"
        raise ConfigError(f"{strategy} lays out a square grid of devices, {devices} are none; use {near}")
    grid = [divmod(device, side) for device in range(devices)]
    tables: dict[str, tuple[int, int, int, list[Owned]]] = {
        "data": (1, 1, devices, [Owned(0, 0, d) for d in range(devices)]),
        "model": (1, devices, 1, [Owned(0, d, 0) for d in range(devices)]),
        "model+data": (1, side, side, [Owned(0, column, row) for row, column in grid]),
        "expert+data": (devices, 1, devices, [Owned(d, 0, d) for d in range(devices)]),
        "expert+model+data": (side, side, side, [Owned(row, column, row) for row, column in grid]),
    }
    experts, slices, shards, owned = tables[strategy]
    return Layout(strategy, experts, slices, shards, tuple(owned))  # type: ignore[arg-type]
