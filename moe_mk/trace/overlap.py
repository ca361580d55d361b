"""The part of communication time that overlapped with computation, from spans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from moe_mk.trace.recorder import Span

COMMUNICATION = frozenset({"dispatch", "combine"})
WORK = frozenset({"experts", "shared"})

Range = tuple[float, float]


def hidden_share(
    spans: Sequence[Span], *, communication: Collection[str] = COMMUNICATION, work: Collection[str] = WORK
) -> float | None:
    """The part of communication time during which experts computed too, from 0 to 1; None without communication.

    Time covered by two communication spans counts once. 0: no overlap; 1: communication is fully hidden.
    """
    under_way = merged((s.start, s.end) for s in spans if s.stage in communication)
    working = merged((s.start, s.end) for s in spans if s.stage in work)
    whole = sum(end - start for start, end in under_way)
    if whole <= 0:
        return None
    both = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in under_way for begin, stop in working)
    return both / whole


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The union of ranges as sorted, disjoint ranges."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
