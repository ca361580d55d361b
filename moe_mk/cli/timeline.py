"""What `--trace` writes: one prefill of all ranks on one time axis, for a viewer of Chrome traces."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_mk.cli.inputs import Batch
from moe_mk.comm.communicator import Communicator, offsets
from moe_mk.errors import ConfigError
from moe_mk.external.device import synchronize
from moe_mk.flight import land
from moe_mk.layer import MoELayer
from moe_mk.trace.chrome import write_chrome_trace
from moe_mk.trace.clock import now
from moe_mk.trace.recorder import STAGES, Recorder, Span


def save_timeline(layer: MoELayer, batch: Batch, team: Communicator, file: Path) -> int:
    """Record one forward of every rank; rank 0 writes the file. All ranks of the team must call this.

    Returns the number of spans. Raises ConfigError if the file cannot be written.
    """
    land(team.gather_count(0, "report"))
    met, recorder = now(), Recorder()
    layer.spans.recorder = recorder
    try:
        with recorder.span("other"):
            layer(batch.x_TH, batch.token_ids_T)
            synchronize(layer.device)
    finally:
        layer.spans.recorder = None
    spans_of_W, met_W = gathered(recorder.spans, met, team)
    if team.rank == 0:
        try:
            write_chrome_trace(file, spans_of_W, met_W)
        except OSError as problem:
            raise ConfigError(f"--trace {file} cannot be written: {problem}") from problem
    return sum(map(len, spans_of_W))


def gathered(spans: list[Span], met: float, team: Communicator) -> tuple[list[list[Span]], list[float]]:
    """The spans of every rank, and what its clock said when all had met."""
    rows = [[STAGES.index(span.stage), span.start, span.end, span.own] for span in spans]
    mine = torch.tensor([[-1, met, met, 0.0], *rows], dtype=torch.float64, device="cpu")
    counts = land(team.gather_count(len(mine), "report"))
    everyone, starts = land(team.all_gather(mine, counts, "report")).tolist(), offsets(counts)
    parts = [everyone[starts[rank] : starts[rank + 1]] for rank in range(team.size)]
    spans_of_W = [[Span(STAGES[int(stage)], *times) for stage, *times in part[1:]] for part in parts]
    return spans_of_W, [part[0][1] for part in parts]
