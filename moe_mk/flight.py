"""A flight: work that can be left alone for a while.

Whatever takes time on a wire is a generator. It yields `InFlight` whenever its caller could do something else, and
returns its result when it has landed. A caller with nothing else to do calls `land`. Nobody but `runner/` decides who
uses the waiting time.

House law: every rank makes the same number of hops per call, with zero tokens too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True)
class InFlight:
    """What is on its way right now: "dispatch", "combine", ..."""

    what: str


Flight = Generator[InFlight, None, T]


def land(flight: Flight[T]) -> T:
    """Wait for a flight, doing nothing meanwhile."""
    while True:
        try:
            next(flight)
        except StopIteration as landed:
            return cast(T, landed.value)


def give_up(flights: Iterable[Flight[Any]]) -> None:
    """End flights that will not land, so that what they hold is free. Says nothing of what fails on the way."""
    for flight in flights:
        with suppress(Exception):  # whoever gives up has a failure of its own to tell
            flight.close()


def interleave(flights: Sequence[Flight[T]]) -> list[T]:
    """Advance every flight by one hop in turn until all have landed.

    One that fails ends the others too, so that what they hold is free for the next call, whoever keeps them.
    """
    results: dict[int, T] = {}
    flying = dict(enumerate(flights))
    try:
        while flying:
            for index, flight in list(flying.items()):
                try:
                    next(flight)
                except StopIteration as landed:
                    results[index] = cast(T, landed.value)
                    del flying[index]
    except BaseException:
        give_up(flying.values())
        raise
    return [results[index] for index in range(len(flights))]
