"""Chrome traces: events by hand, rows that nest, and clocks of several hosts."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.lab.trace.chrome import chrome_trace, rows_of, shifts, write_chrome_trace
from moe_mk.trace import Span


def span(stage: str, start: float, end: float) -> Span:
    return Span(stage, start, end, end - start)


def events_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def is_nested(spans: list[dict[str, Any]]) -> bool:
    """Whether of any two spans one is inside the other, or they are apart; in whole nanoseconds."""
    ends = [(round(s["ts"] * 1e3), round((s["ts"] + s["dur"]) * 1e3)) for s in spans]
    return all(
        b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)
        for number, (a, b) in enumerate(ends)
        for c, d in ends[number + 1 :]
    )


def test_events_by_hand(tmp_path: Path) -> None:
    # Rank 0: dispatch 10.0 .. 10.3 s with shared 10.1 .. 10.2 in it. Rank 1: dispatch 10.05 .. 10.25 s.
    rank0 = [Span("shared", 10.1, 10.2, 0.1), Span("dispatch", 10.0, 10.3, 0.2)]
    write_chrome_trace(tmp_path / "out.json", [rank0, [span("dispatch", 10.05, 10.25)]], [9.0, 9.001])
    trace = json.loads((tmp_path / "out.json").read_text())
    shared, dispatch, other = events_of(trace)
    assert (shared["name"], shared["pid"], shared["tid"]) == ("shared", 0, 0)
    assert shared["ts"] == pytest.approx(1e5) and shared["dur"] == pytest.approx(1e5)
    assert dispatch["ts"] == 0.0 and dispatch["args"]["own_us"] == pytest.approx(2e5)
    assert (other["pid"], other["ts"]) == (1, pytest.approx(5e4))
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {
        ("process_name", 0, 0): "rank 0",
        ("thread_name", 0, 0): "batch 0",
        ("process_name", 1, 0): "rank 1",
        ("thread_name", 1, 0): "batch 0",
    }


def test_spans_that_cross_stand_on_rows_of_their_own() -> None:
    # a 0..4 holds b 1..2; c 3..6 crosses a; d 7..8 is apart from all; e starts where d ends.
    spans = [span("b", 1, 2), span("a", 0, 4), span("c", 3, 6), span("d", 7, 8), span("e", 8, 9)]
    assert rows_of(spans) == [0, 0, 1, 0, 0]
    assert rows_of([]) == []


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=12))
def test_every_row_is_nested(pairs: list[tuple[int, int]]) -> None:
    trace = chrome_trace([[span("x", start, start + length) for start, length in pairs]])
    events = events_of(trace)
    assert len(events) == len(pairs)
    for row in {event["tid"] for event in events}:
        assert is_nested([event for event in events if event["tid"] == row])


def test_clocks_of_one_host_are_left_alone_and_others_meet() -> None:
    assert shifts([5.0, 5.4]) == [0.0, 0.0] and shifts([]) == []
    assert shifts([5.0, 905.0]) == [0.0, -900.0]
    assert [event["ph"] for event in chrome_trace([[], []])["traceEvents"]] == ["M", "M"]
    for one, other in ((5.0, 905.0), (905.0, 5.0)):  # the earliest span is that of the second rank
        far = chrome_trace([[span("a", one + 1.5, one + 2.0)], [span("a", other + 1.0, other + 2.0)]], [one, other])
        assert [event["ts"] for event in events_of(far)] == pytest.approx([5e5, 0.0])
