"""Stages as ranges of torch.profiler, so that a layer's parts show in the host's own timeline by their names.

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
    """Times stages as any recorder does, and opens a profiler range for each."""

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
    """Let a layer's stages open profiler ranges; whoever listened before listens again afterwards."""
    before, spans.recorder = spans.recorder, ProfilerRecorder(name)
    try:
        yield spans.recorder
    finally:
        spans.recorder = before
