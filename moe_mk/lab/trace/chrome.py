"""Spans of all ranks as a Chrome trace: one process a rank, so that a viewer shows what overlapped what, and where.

Opens in chrome://tracing, in Perfetto (ui.perfetto.dev) and in every other reader of the Trace Event Format (complete
events "X", metadata "M"; times in microseconds). Within a rank, spans that overlap without one lying inside the other,
such as those of two micro-batches, stand on rows of their own: the format has no other way to show them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_mk.files import write_text
from moe_mk.trace.recorder import Span

MICROSECONDS = 1e6
ONE_CLOCK_S = 1.0
"""Ranks of one host read one clock, those of several read clocks that began at other times."""


def chrome_trace(spans_of_W: Sequence[Sequence[Span]], met_W: Sequence[float] | None = None) -> dict[str, Any]:
    """The trace as JSON; zero is the earliest start.

    met_W: the clock of each rank just after a barrier. Only where those lie further apart than any meeting
    takes are ranks moved onto the clock of the first one, as well as the meeting shows it.
    """
    shift_W = shifts(met_W or [0.0] * len(spans_of_W))
    zero = min((s.start + shift for own, shift in zip(spans_of_W, shift_W, strict=True) for s in own), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, (spans, shift) in enumerate(zip(spans_of_W, shift_W, strict=True)):
        rows = rows_of(spans)
        events.append(_name("process_name", f"rank {rank}", rank, 0))
        events += [_name("thread_name", f"batch {row}", rank, row) for row in sorted(set(rows))]
        events += [_event(span, rank, row, shift - zero) for span, row in zip(spans, rows, strict=True)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(file: Path, spans_of_W: Sequence[Sequence[Span]], met_W: Sequence[float] | None = None) -> None:
    """Write the trace of all ranks. Raises OSError."""
    write_text(file, json.dumps(chrome_trace(spans_of_W, met_W)) + "\n")


def rows_of(spans: Sequence[Span]) -> list[int]:
    """The row of each span: the first in which every span contains it or is disjoint from it."""
    row_of: dict[int, int] = {}
    rows: list[list[Span]] = []
    order = sorted(range(len(spans)), key=lambda index: (spans[index].start, -spans[index].end))
    for index in order:
        span = spans[index]
        fits = (n for n, row in enumerate(rows) if all(o.end <= span.start or o.end >= span.end for o in row))
        number = next(fits, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(span)
        row_of[index] = number
    return [row_of[index] for index in range(len(spans))]


def shifts(met_W: Sequence[float]) -> list[float]:
    """Seconds to add to each rank's clock."""
    if not met_W or max(met_W) - min(met_W) < ONE_CLOCK_S:
        return [0.0] * len(met_W)
    return [met_W[0] - met for met in met_W]


def _event(span: Span, rank: int, row: int, shift: float) -> dict[str, Any]:
    return {
        "name": span.stage,
        "cat": "moe",
        "ph": "X",
        "pid": rank,
        "tid": row,
        "ts": (span.start + shift) * MICROSECONDS,
        "dur": (span.end - span.start) * MICROSECONDS,
        "args": {"own_us": span.own * MICROSECONDS},
    }


def _name(kind: str, name: str, rank: int, row: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
