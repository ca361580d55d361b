"""The ways to spend a flight's waiting time. This package alone decides; nothing below knows of overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from moe_mk.flight import Flight, InFlight, interleave, land

X = TypeVar("X")
Y = TypeVar("Y")


def run_alone(flight: Flight[X]) -> X:
    """Wait, doing nothing meanwhile."""
    return land(flight)


def run_dual(flights: Sequence[Flight[X]]) -> list[X]:
    """Dual-batch overlap, for any number of micro-batches: while one is in flight, the next computes.

    All ranks must bring the same number of flights; one without tokens still makes every hop.
    """
    return interleave(flights)


def run_with(flight: Flight[X], meanwhile: Callable[[], Y], during: str = "dispatch") -> tuple[X, Y]:
    """Do `meanwhile` once while the flight is at `during`; return both results."""
    return land(alongside(flight, meanwhile, during))


def alongside(flight: Flight[X], meanwhile: Callable[[], Y], during: str = "dispatch") -> Flight[tuple[X, Y]]:
    """A flight whose first hop called `during` is spent on `meanwhile`; without such a hop it is done at the end."""
    extra: list[Y] = []
    while True:
        try:
            hop: InFlight = next(flight)
        except StopIteration as landed:
            return cast(X, landed.value), extra[0] if extra else meanwhile()
        if not extra and hop.what == during:
            extra.append(meanwhile())
        yield hop
