"""How much of one kind of stage was hidden behind another, from spans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from moe_mk.trace.recorder import Span

JOURNEYS = frozenset({"dispatch", "combine"})
WORK = frozenset({"experts", "shared"})

Range = tuple[float, float]


def hidden_share(
    spans: Sequence[Span], *, journeys: Collection[str] = JOURNEYS, work: Collection[str] = WORK
) -> float | None:
    """The part of the time with a journey under way in which work was done too, from 0 to 1; None without journeys.

    Time in which two journeys are under way counts once. 0: one after the other; 1: journeys that nobody waits for.
    """
    under_way = merged((s.start, s.end) for s in spans if s.stage in journeys)
    working = merged((s.start, s.end) for s in spans if s.stage in work)
    whole = sum(end - start for start, end in under_way)
    if whole <= 0:
        return None
    both = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in under_way for begin, stop in working)
    return both / whole


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same time as ranges that do not touch, in order."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
