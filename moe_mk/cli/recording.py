"""What `moe-mk run --record-trace` writes: the routing of the two forwards that are verified, of all batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_mk.cli.inputs import RunSettings
from moe_mk.flight import land
from moe_mk.layer import MoELayer
from moe_mk.trace.routing import Phase, RoutingTrace, TracedForward, TraceFacts
from moe_mk.trace.routing_recorder import RoutingRecorder


class Recorded:
    """Listens to a layer on every rank, if a trace is asked for; then the first rank has what all of them routed."""

    def __init__(self, layer: MoELayer, ep_rank: int, settings: RunSettings, batches: int) -> None:
        """batches: of different tokens; one where all ranks bring the same."""
        config, self.layer, self.settings = settings.config, layer, settings
        self.facts = TraceFacts(
            config.model.num_experts, config.router.top_k, config.router.num_expert_group, batches, config.model.name
        )
        self.recorder = RoutingRecorder(self.facts, rank=ep_rank if batches > 1 else 0)

    @contextmanager
    def step(self, phase: Phase, token_ids_T: Tensor | None = None) -> Iterator[None]:
        """Record the forwards within as one step."""
        if self.settings.record_trace is None:
            yield
            return
        self.recorder.next_step(phase, token_ids_T)
        with self.recorder.listening({self.settings.layer: self.layer}):
            yield

    def save(self) -> bool:
        """Bring the steps of all batches together; whether this rank wrote the file. All ranks must call it."""
        assert self.settings.record_trace is not None
        mine = list(self.recorder.take().forwards())
        if self.facts.num_ranks > 1:
            mine = [forward for each in mine for forward in self._of_all_ranks(each)]
        writes = self.layer.ep.rank == 0 and self.layer.tp.rank == 0
        if writes:
            RoutingTrace.of(self.facts, mine).write(self.settings.record_trace)
        return writes

    def _of_all_ranks(self, mine: TracedForward) -> list[TracedForward]:
        ep, device = self.layer.ep, self.layer.device
        counts = land(ep.gather_count(len(mine.ids_TK), "report"))
        assert mine.weights_TK is not None

        def gathered(rows: Tensor, dtype: torch.dtype) -> list[Tensor]:
            sent = rows.to(device=device, dtype=dtype)
            return list(torch.split(land(ep.all_gather(sent, counts, "report")).cpu(), counts))

        ids, weights = gathered(mine.ids_TK, torch.int32), gathered(mine.weights_TK, torch.float32)
        known: list[Tensor | None] = [None] * len(ids)
        if mine.token_ids_T is not None:
            known = [ids_T1.flatten() for ids_T1 in gathered(mine.token_ids_T[:, None], torch.int64)]
        parts = enumerate(zip(ids, weights, known, strict=True))
        return [TracedForward(mine.step, mine.layer, rank, mine.phase, *tensors) for rank, tensors in parts]
