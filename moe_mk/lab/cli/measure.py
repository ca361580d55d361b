"""Stage times of a layer: the median of each stage over separately recorded forward passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from moe_mk.comm.communicator import Communicator
from moe_mk.external.device import synchronize
from moe_mk.flight import wait
from moe_mk.lab.cli.inputs import Batch
from moe_mk.layer import MoELayer
from moe_mk.trace.recorder import STAGES, Recorder

SHOWN = ("route", "quantise", "dispatch", "experts", "combine", "shared", "other")
FOLDED = {"permute": "experts", "reduce": "experts", "late_reduce": "combine"}


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of each stage, and of the forward pass, each on its slowest rank."""

    stages: dict[str, float]
    total: float
    tokens: tuple[int, ...] = ()
    """Of each batch."""

    def for_tokens(self, tokens: Sequence[int]) -> StageTimes:
        """Return the times with the numbers of tokens."""
        return replace(self, tokens=tuple(tokens))


StageSample = dict[str, float]
"""Seconds of each of SHOWN, and "total"."""


def time_stages(layer: MoELayer, batch: Batch, team: Communicator, repeats: int) -> StageTimes:
    """Run a layer `repeats` times after one warm-up; every rank of the team must call this with the same repeats."""
    layer(batch.x_TH, batch.token_ids_T)
    return stage_times([sample_of(layer, lambda: layer(batch.x_TH, batch.token_ids_T)) for _ in range(repeats)], team)


def stage_times(samples: Sequence[StageSample], team: Communicator) -> StageTimes:
    """The median of each stage over samples, on its slowest rank; every rank of the team must call this."""
    mine = [median(sample[stage] for sample in samples) for stage in (*SHOWN, "total")]
    row = torch.tensor([mine], dtype=torch.float64, device="cpu")
    slowest = wait(team.all_gather(row, [1] * team.size, "report")).amax(dim=0)
    times = dict(zip((*SHOWN, "total"), (slowest * 1e3).tolist(), strict=True))
    total = times.pop("total")
    return StageTimes(times, total)


def recorded_by(layer: MoELayer, call: Callable[[], object]) -> Recorder:
    """The spans of one call of a layer; "other" is all of it."""
    recorder = Recorder()
    layer.spans.recorder = recorder
    try:
        with recorder.span("other"):
            call()
            synchronize(layer.device)
    finally:
        layer.spans.recorder = None
    return recorder


def sample_of(layer: MoELayer, call: Callable[[], object]) -> StageSample:
    """The stages of one call of a layer."""
    recorder = recorded_by(layer, call)
    own = own_seconds(recorder)
    seconds = dict.fromkeys(SHOWN, 0.0)
    for stage in STAGES:
        seconds[FOLDED.get(stage, stage)] += own.get(stage, 0.0)
    seconds["total"] = max(span.end - span.start for span in recorder.spans)
    return seconds


def own_seconds(recorder: Recorder) -> dict[str, float]:
    """Seconds spent in each stage itself; in one thread they add up to the time in which any span was open."""
    total: dict[str, float] = defaultdict(float)
    for span in recorder.spans:
        total[span.stage] += span.own
    return dict(total)
