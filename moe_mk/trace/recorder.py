"""Records which stage ran when, so that times add up: each moment is charged to the span opened last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import local
from typing import cast

from moe_mk.trace.clock import now
from moe_mk.trace.ledger import Ledger

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
    """What is open in one thread."""

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

    def own_seconds(self) -> dict[str, float]:
        """Seconds spent in each stage itself; in one thread they add up to the time in which any span was open."""
        total: dict[str, float] = defaultdict(float)
        for span in self.spans:
            total[span.stage] += span.own
        return dict(total)

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
