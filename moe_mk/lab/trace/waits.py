"""Who waited for whom, from the spans of a trace: a rank that begins a stage later makes all others wait in it.

    rank 0   [ dispatch ---------------------------- ]      waits for rank 1 from its begin to the begin of rank 1,
    rank 1                      [ dispatch --------- ]      and both need the rest to move and receive rows
    rank 2   .....[ dispatch ----------------------- ]

The k-th span of a stage on each rank is the k-th call. Spans hold when a rank reached a call and when it left it, so
that the matrix is valid for every transport. It does not show which path between two ranks was slow: for messages of
one pair see `moe_mk.lab.plan.timeline`, and `proxy.watch` of `one_sided_network`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from moe_mk.errors import ConfigError
from moe_mk.files import read_json

STAGES = ("dispatch", "combine")
NOTICEABLE = 3.0
"""A rank is named if it costs so many times what the median rank does."""
LEAST_SHARE = 0.1
"""And at least this part of the time that the ranks spend in the stages."""

Calls = Mapping[str, Sequence[Sequence[tuple[float, float]]]]
"""Of each stage: for each rank the begin and end of every call, in microseconds."""


@dataclass(frozen=True)
class Waits:
    """The waits of all calls of some stages."""

    waited_WW: tuple[tuple[float, ...], ...]
    """[r][s]: microseconds in which rank r was in a call that rank s had not begun."""
    rest_W: tuple[float, ...]
    """Of each rank: microseconds in calls that all ranks had begun, in which rows move."""
    calls: int

    @property
    def caused_W(self) -> tuple[float, ...]:
        """Microseconds that all others waited for each rank."""
        return tuple(sum(row[rank] for row in self.waited_WW) for rank in range(len(self.waited_WW)))

    @property
    def late(self) -> list[int]:
        """Ranks that others wait for, worst first: they are slow before the calls."""
        return _outliers(self.caused_W, sum(map(sum, self.waited_WW)) + sum(self.rest_W))

    @property
    def slow_to_receive(self) -> list[int]:
        """Ranks that need longer than the others once all have begun, worst first."""
        return _outliers(self.rest_W, sum(self.rest_W))


def _outliers(of_W: Sequence[float], whole: float) -> list[int]:
    if len(of_W) < 2 or whole <= 0:
        return []
    found = []
    for rank, us in enumerate(of_W):
        usual = median(other for number, other in enumerate(of_W) if number != rank)
        if us > NOTICEABLE * usual and us > LEAST_SHARE * whole:
            found.append(rank)
    return sorted(found, key=lambda rank: -of_W[rank])


def waits_of(calls: Calls, stages: Iterable[str] = STAGES) -> Waits:
    """The wait matrix of some stages. Raises ConfigError for fewer than two ranks, or ranks with other calls."""
    chosen = [stage for stage in stages if stage in calls]
    ranks = max((len(calls[stage]) for stage in chosen), default=0)
    if ranks < 2:
        raise ConfigError(f"the trace has {ranks} ranks with spans of {', '.join(stages)}; waits need two")
    waited_WW, rest_W, count = [[0.0] * ranks for _ in range(ranks)], [0.0] * ranks, 0
    for stage in chosen:
        numbers = [len(each) for each in calls[stage]]
        if len(set(numbers)) > 1:
            raise ConfigError(f"ranks have {numbers} spans of {stage}; record the same calls on all ranks")
        for call in zip(*calls[stage], strict=True):
            count += 1
            last = max(begin for begin, _ in call)
            for rank, (begin, end) in enumerate(call):
                for other, (theirs, _) in enumerate(call):
                    waited_WW[rank][other] += max(0.0, min(theirs, end) - begin)
                rest_W[rank] += max(0.0, end - max(last, begin))
    return Waits(tuple(map(tuple, waited_WW)), tuple(rest_W), count)


def calls_of_trace(file: Path) -> Calls:
    """The calls in a Chrome trace that `moe-mk run --trace` or `lab.trace.chrome` has written. Raises ConfigError."""
    try:
        trace = read_json(file)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{file} cannot be read as a trace: {problem}") from problem
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"{file} is no Chrome trace: it has no list of traceEvents")
    spans: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    ranks: set[int] = set()
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            rank, begin, took = event.get("pid"), event.get("ts"), event.get("dur")
            if isinstance(rank, int) and isinstance(begin, int | float) and isinstance(took, int | float):
                ranks.add(rank)
                spans[str(event.get("name"))][rank].append((float(begin), float(begin) + float(took)))
    return {stage: [sorted(of_rank.get(rank, [])) for rank in sorted(ranks)] for stage, of_rank in spans.items()}
