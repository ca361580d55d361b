"""Records which stage ran when, so that times add up: each moment is charged to the span opened last.

The ledger holds which object ran each stage, how often and on how many bytes, written by the code that runs.
`hidden_share` is the part of communication time that overlapped with computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import Array, c_int64
from dataclasses import dataclass
from functools import cached_property
from threading import local
from typing import cast

from moe_mk.trace.clock import now

STAGES = ("route", "quantise", "dispatch", "permute", "experts", "reduce", "combine", "shared", "late_reduce", "other")


@dataclass(frozen=True)
class Span:
    """One stage of one forward, in seconds of the recorder's clock."""

    stage: str
    start: float
    end: float
    own: float
    """Seconds spent in this stage itself: not in spans opened later, such as shared experts while rows travel."""


class _Open(local):
    """Open spans of one thread."""

    def __init__(self) -> None:
        self.own: list[list[float]] = []
        """The seconds charged so far to each open span, in order of opening."""
        self.charged_until = 0.0


class Recorder:
    """Collects spans. Each moment of a thread is charged to the span opened last of those still open in it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open = _Open()

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Time what runs within. Flights of several micro-batches may close in another order than they opened."""
        own = [0.0]
        start = self._charge()
        self._open.own.append(own)
        try:
            yield
        finally:
            end = self._charge()
            self._open.own = [other for other in self._open.own if other is not own]
            self.spans.append(Span(stage, start, end, own[0]))

    def _charge(self) -> float:
        """Charge the time since the last opening or closing; returns the time now."""
        time, here = now(), self._open
        if here.own:
            here.own[-1][0] += time - here.charged_until
        here.charged_until = time
        return time


_SILENT: defaultdict[str, AbstractContextManager[None]] = defaultdict(nullcontext)


class Spans:
    """Where the parts of one layer report their stages; silent, and almost free, until a recorder is set."""

    recorder: Recorder | None
    span: Callable[[str], AbstractContextManager[None]]
    """A context that times a stage; without a recorder, one that does nothing, made once per stage."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self.ledger = Ledger()
        """What ran, always kept: a few numbers a forward."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "recorder":
            self.span = _SILENT.__getitem__ if value is None else cast(Recorder, value).span


@dataclass(frozen=True)
class Entry:
    """One object at one stage."""

    calls: int = 0
    num_bytes: int = 0
    """Of rows that went in and came out, values and scales."""


@dataclass(frozen=True)
class WorkMeter:
    """Counters that native calls of a layer keep: how often each of some stages has run, and on how many rows."""

    stages: tuple[tuple[str, type, int], ...]
    """The stage, the class of the object and the bytes of a row, in the order of `LayerWork` of csrc/exchange.h."""

    @cached_property
    def words(self) -> Array[c_int64]:
        """int64 [stages, 2]: runs and rows; they only grow."""
        return (c_int64 * (2 * len(self.stages)))()

    @cached_property
    def _before(self) -> list[int]:
        """Return the counts read before: calls of another thread may count meanwhile, so nothing is reset."""
        return [0] * (2 * len(self.stages))

    def read(self) -> Iterator[tuple[str, type, int, int]]:
        """Yield the counts since the last call: stage, class, bytes, runs."""
        before, after = self._before[:], self.words[:]
        self._before[:] = after
        new = [a - b for a, b in zip(after, before, strict=True)]
        for (stage, who, row_bytes), runs, rows in zip(self.stages, new[::2], new[1::2], strict=True):
            if runs:
                yield stage, who, rows * row_bytes, runs


class Ledger:
    """Entries by (stage, class). Sizes of tensors only: nothing waits for a device."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, type], list[int]] = {}
        self._meters: dict[WorkMeter, WorkMeter] = {}

    @property
    def entries(self) -> Mapping[tuple[str, type], Entry]:
        """Return the stages that have run, in the order in which they first did."""
        for meter in self._meters:
            for stage, who, num_bytes, runs in meter.read():
                self.ran(stage, who, num_bytes, runs)
        return {key: Entry(*sums) for key, sums in self._sums.items()}

    def meter(self, stages: tuple[tuple[str, type, int], ...]) -> WorkMeter:
        """The meter of native calls with these stages; read when the entries are."""
        made = WorkMeter(stages)
        return self._meters.setdefault(made, made)

    def ran(self, stage: str, who: type, num_bytes: int, runs: int = 1) -> None:
        """Note that an object of a class has done a stage."""
        sums = self._sums.get((stage, who))
        if sums is None:
            sums = self._sums[stage, who] = [0, 0]
        sums[0] += runs
        sums[1] += num_bytes

    def clear(self) -> None:
        _ = self.entries  # the meters are read
        self._sums.clear()


COMMUNICATION = frozenset({"dispatch", "combine"})

WORK = frozenset({"experts", "shared"})

Range = tuple[float, float]


def hidden_share(spans: Sequence[Span]) -> float | None:
    """The part of communication time during which experts computed too, from 0 to 1; None without communication.

    Time covered by two communication spans counts once. 0: no overlap; 1: communication is fully hidden.
    """
    under_way = merged((s.start, s.end) for s in spans if s.stage in COMMUNICATION)
    working = merged((s.start, s.end) for s in spans if s.stage in WORK)
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
