"""What happened to tiles, in the order in which it happened: events, the intervals they make, and which overlapped.

That one interval overlaps another is read from the order of events, which is exact on any machine under any load; how
much of the time was hidden is read from the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_mk.runner.tile_plan import Kind, Step
from moe_mk.trace.clock import now
from moe_mk.trace.overlap import hidden_share
from moe_mk.trace.recorder import Span

STAGES: dict[Kind, str] = {"D": "dispatch", "M": "experts", "C": "combine", "S": "onward"}


@dataclass(frozen=True)
class Event:
    """A step begins or ends."""

    step: Step
    what: Literal["begins", "ends"]
    seconds: float

    def __str__(self) -> str:
        return f"{self.step} {self.what}"


@dataclass(frozen=True)
class Interval:
    """From the first event of a journey, or of experts, to its last: places in the order of events, and seconds."""

    name: str
    """D2, M0, ..."""
    first: int
    last: int
    start: float
    end: float

    def overlaps(self, other: Interval) -> bool:
        """Whether each begins before the other has ended."""
        return self.first < other.last and other.first < self.last


class TileRecord:
    """Events of one rank; several threads may note them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(self, step: Step, what: Literal["begins", "ends"]) -> None:
        """Something happens now. A list's append is one operation: places are an order that all threads agree on."""
        self.events.append(Event(step, what, now()))

    def intervals(self) -> list[Interval]:
        """What has begun and ended, by its beginning. A journey lasts from its issue until it is received."""
        found: dict[str, list[int]] = {}
        for place, event in enumerate(self.events):
            found.setdefault(event.step.journey, []).append(place)
        bounds = [(name, places[0], places[-1]) for name, places in found.items() if len(places) > 1]
        return [Interval(n, a, b, self.events[a].seconds, self.events[b].seconds) for n, a, b in bounds]

    def overlaps(self) -> list[tuple[str, str]]:
        """Pairs of intervals of different tiles that overlapped, such as (D1, M0)."""
        all_of_them = self.intervals()
        return [
            (one.name, other.name)
            for number, one in enumerate(all_of_them)
            for other in all_of_them[number + 1 :]
            if one.name[1:] != other.name[1:] and one.overlaps(other)
        ]

    def spans(self) -> list[Span]:
        """The intervals as spans of a trace, see `trace.chrome`."""
        return [Span(_stage(i.name), i.start, i.end, i.end - i.start) for i in self.intervals()]

    def hidden_share(self) -> float | None:
        """The part of the time on the way, from 0 to 1, in which experts computed; None if nothing travelled."""
        return hidden_share(self.spans())


def _stage(name: str) -> str:
    return next(stage for kind, stage in STAGES.items() if name.startswith(kind))
