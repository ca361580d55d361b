"""A flight: an operation with communication in it, as a generator that can be suspended while data moves.

A flight yields `InFlight` at every yield point, where its caller may run something else, and returns its result at the
end. `wait` runs a flight to its end; `runner/` has the schedules that use the time between yield points.

Contract: every rank makes the same number of yields per call, with zero tokens too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True)
class InFlight:
    """Reason for which a flight waits at a yield point: "dispatch", "combine", ..."""

    what: str


Flight = Generator[InFlight, None, T]


def wait(flight: Flight[T]) -> T:
    """Run a flight to its end without overlap; returns its result and raises what it raises."""
    while True:
        try:
            next(flight)
        except StopIteration as end:
            return cast(T, end.value)


def cancel(flights: Iterable[Flight[Any]]) -> None:
    """Close flights that will not be finished, so that they release what they hold. Suppresses what they raise."""
    for flight in flights:
        with suppress(Exception):  # the caller is handling an error of its own already
            flight.close()


def interleave(flights: Sequence[Flight[T]]) -> list[T]:
    """Advance every flight to its next yield point in turn until all have ended; results in the order of `flights`.

    If one raises, the others are cancelled and the exception propagates.
    """
    results: dict[int, T] = {}
    flying = dict(enumerate(flights))
    try:
        while flying:
            for index, flight in list(flying.items()):
                try:
                    next(flight)
                except StopIteration as end:
                    results[index] = cast(T, end.value)
                    del flying[index]
    except BaseException:
        cancel(flying.values())
        raise
    return [results[index] for index in range(len(flights))]
