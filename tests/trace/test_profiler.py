"""Stages show in torch's profiler by their names, and a recorder that was there before is there again."""

from __future__ import annotations

import torch

from moe_mk.trace.profiler import profiled
from moe_mk.trace.recorder import Recorder, Spans


def names_of(profile: torch.profiler.profile) -> set[str]:
    return {event.name for event in profile.events() if event.name.startswith("moe_mk.")}


def test_every_stage_is_a_range() -> None:
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, profiled(spans, "x"):
        try:
            with spans.span("experts"):
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    assert names_of(profile) == {"moe_mk.x.experts"} and spans.recorder is None
