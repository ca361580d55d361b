"""Spans on a clock of ours: own times add up, however spans close; and their names in torch's profiler."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.lab.cli.measure import own_seconds
from moe_mk.trace import Recorder, Spans
from moe_mk.trace.profiler import profiled


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("moe_mk.trace.recorder.now", made)
    return made


def test_a_nested_span_is_charged_to_the_inner_one(clock: Clock) -> None:
    # dispatch 100 .. 110; shared experts run in it from 102 to 105: dispatch itself takes 7.
    recorder = Recorder()
    with recorder.span("dispatch"):
        clock.time = 102.0
        with recorder.span("shared"):
            clock.time = 105.0
        clock.time = 110.0
    shared, dispatch = recorder.spans
    assert (shared.stage, shared.start, shared.end, shared.own) == ("shared", 102.0, 105.0, 3.0)
    assert (dispatch.stage, dispatch.start, dispatch.end, dispatch.own) == ("dispatch", 100.0, 110.0, 7.0)
    assert own_seconds(recorder) == {"shared": 3.0, "dispatch": 7.0}


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), max_size=12), st.randoms(use_true_random=False))
def test_own_times_add_up_to_the_outermost_span_in_any_order_of_closing(
    steps: list[tuple[int, str]], random: object
) -> None:
    choose: Callable[[int], int] = random.randrange  # type: ignore[attr-defined]
    clock = Clock()
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as outermost:
        patch.setattr("moe_mk.trace.recorder.now", clock)
        outermost.enter_context(recorder.span("forward"))
        flying = []
        for wait, stage in steps:
            clock.time += wait
            span = recorder.span(stage)
            span.__enter__()
            flying.append(span)
            clock.time += choose(4)
            if choose(2):
                flying.pop(choose(len(flying))).__exit__(None, None, None)
        while flying:
            clock.time += choose(4)
            flying.pop(choose(len(flying))).__exit__(None, None, None)
        outermost.close()
    forward = recorder.spans[-1]
    assert forward.stage == "forward" and all(0 <= span.own <= span.end - span.start for span in recorder.spans)
    assert sum(own_seconds(recorder).values()) == forward.end - forward.start


def test_a_span_that_fails_is_recorded_and_closed(clock: Clock) -> None:
    def fail() -> None:
        clock.time += 1.0
        raise ValueError("boom")

    recorder = Recorder()
    with pytest.raises(ValueError, match="boom"), recorder.span("outer"), recorder.span("inner"):
        fail()
    assert [span.stage for span in recorder.spans] == ["inner", "outer"]
    with recorder.span("next"):
        clock.time += 1.0
    assert own_seconds(recorder) == {"inner": 1.0, "outer": 0.0, "next": 1.0}


def test_nobody_listens_until_a_recorder_is_set(clock: Clock) -> None:
    spans = Spans()
    with spans.span("route"):
        clock.time += 1.0
    spans.recorder = Recorder()
    with spans.span("route"):
        clock.time += 2.0
    assert own_seconds(spans.recorder) == {"route": 2.0}


def names_of(profile: torch.profiler.profile) -> set[str]:
    return {event.name for event in profile.events() if event.name.startswith("moe_mk.")}


def test_every_stage_is_a_range_of_the_profiler() -> None:
    spans, before = Spans(), Recorder()
    spans.recorder = before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with profiled(spans, "layer 3") as recorder:
            with spans.span("dispatch"):
                torch.ones(4).sum()
            with spans.span("experts"):
                torch.ones(4).sum()
        with spans.span("combine"):
            torch.ones(4).sum()
    assert names_of(profile) == {"moe_mk.layer 3.dispatch", "moe_mk.layer 3.experts"}
    assert [span.stage for span in recorder.spans] == ["dispatch", "experts"]
    assert spans.recorder is before and [span.stage for span in before.spans] == ["combine"]


def test_ranges_end_when_a_stage_fails() -> None:
    spans = Spans()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(ZeroDivisionError), profiled(spans, "x"), spans.span("experts"):
            raise ZeroDivisionError
        with spans.span("combine"):
            torch.ones(4).sum()
    assert names_of(profile) == {"moe_mk.x.experts"} and spans.recorder is None
