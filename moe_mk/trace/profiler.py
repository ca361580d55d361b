"""Stages as ranges of torch.profiler, so that the timeline of the host program shows the stages of a layer by name.

with profiled(layer.spans, layer.name), torch.profiler.profile() as profile:
    layer(hidden_states)
# moe_mk.layer 3.dispatch, moe_mk.layer 3.experts, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_mk.trace.recorder import Recorder, Spans


class ProfilerRecorder(Recorder):
    """A recorder that also opens a profiler range for each stage."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """One stage. Ranges of flights that interleave may close in another order than they opened."""
        with torch.profiler.record_function(f"moe_mk.{self.name}.{stage}"), super().span(stage):
            yield


@contextmanager
def profiled(spans: Spans, name: str) -> Iterator[Recorder]:
    """Open a profiler range for every stage of a layer; the previous recorder is restored afterwards."""
    before, spans.recorder = spans.recorder, ProfilerRecorder(name)
    try:
        yield spans.recorder
    finally:
        spans.recorder = before
