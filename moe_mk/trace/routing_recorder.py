"""Records routings while layers serve: copies on the device, brought to the host only when they are asked for.

recorder = RoutingRecorder(TraceFacts(num_experts=256, top_k=8), rank=0)
with recorder.listening({3: layer}):
    for batch in batches:
        recorder.next_step("decode")
        layer(batch)
recorder.take().write("trace.safetensors")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.tokens import Routing
from moe_mk.trace.routing import RoutingTrace
from moe_mk.trace.routing_file import CHUNK
from moe_mk.trace.routing_forward import Phase, TracedForward, TraceError, TraceFacts, number_of
from moe_mk.trace.routing_pack import id_dtype


class RoutedLayer(Protocol):
    """A layer whose routing can be recorded, such as `MoELayer`."""

    on_routing: Callable[[Routing], None] | None
    """Called with the logical routing of every forward."""


class RoutingRecorder:
    """Collects what the layers of one rank route. Each forward costs a copy of its ids, and of its weights.

    Nothing waits for the device before `take`. A forward that is replayed from a CUDA graph calls no hook and leaves
    no record: record before capture, or without graphs.
    """

    def __init__(self, facts: TraceFacts, *, rank: int = 0, weights: bool = True) -> None:
        """rank: of the tokens, in [0, facts.num_ranks). weights: keep routing weights too. Raises ConfigError."""
        if wrong := facts.problems() or [f"rank={rank} is none of {facts.num_ranks}"] * (
            not 0 <= rank < facts.num_ranks
        ):
            raise ConfigError("routing cannot be recorded: " + "; ".join(wrong))
        self.facts, self.rank, self.weights = facts, rank, weights
        self.step, self._begun = 0, False
        self._phase: Phase = "prefill"
        self._token_ids_T: Tensor | None = None
        self._forwards: list[TracedForward] = []

    def next_step(self, phase: Phase, token_ids_T: Tensor | None = None, *, step: int | None = None) -> None:
        """Say what the forwards that follow belong to.

        step: its number, if not the next one. token_ids_T: the vocabulary's numbers of its tokens.
        """
        number_of(phase)
        self._phase, self._token_ids_T = phase, None if token_ids_T is None else token_ids_T.clone()
        self.step = self.step + self._begun if step is None else step
        self._begun = True

    @contextmanager
    def listening(self, layers: Mapping[int, RoutedLayer]) -> Iterator[Self]:
        """Record these layers, by number, within the block. Raises ConfigError if one of them is recorded already."""
        taken = [number for number, layer in layers.items() if layer.on_routing is not None]
        if taken:
            raise ConfigError(f"layers {taken} are recorded already; end that recording first")
        try:
            for number, layer in layers.items():
                layer.on_routing = self._listener(number)
            yield self
        finally:
            for layer in layers.values():
                layer.on_routing = None

    def record(self, layer: int, routing: Routing) -> None:
        """Keep one routing of one layer. Raises TraceError if it is of another model."""
        if routing.ids_TK.shape[1] != self.facts.top_k:
            raise TraceError(f"layer {layer} routes to {routing.ids_TK.shape[1]} experts, facts say {self.facts.top_k}")
        ids_TK = routing.ids_TK.detach().to(id_dtype(self.facts.num_experts), copy=True)
        weights_TK = routing.weights_TK.detach().to(torch.float32, copy=True) if self.weights else None
        known = self._token_ids_T
        if known is not None and len(known) != len(ids_TK):
            raise TraceError(f"layer {layer} routed {len(ids_TK)} tokens, next_step() was called with {len(known)}")
        self._forwards.append(TracedForward(self.step, layer, self.rank, self._phase, ids_TK, weights_TK, known))
        self._begun = True

    def take(self) -> RoutingTrace:
        """What was recorded so far, on the host; the recorder starts over with the step it is at."""
        taken, self._forwards = self._forwards, []
        return RoutingTrace.of(self.facts, taken)

    def _listener(self, number: int) -> Callable[[Routing], None]:
        return lambda routing: self.record(number, routing)


class TraceFolder:
    """A trace on disk that grows: every chunk is a whole trace of its own, written once."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        """The folder is made if it is not there; raises TraceError if it holds chunks already, or cannot be made."""
        self.folder, self.num_chunks = Path(folder), 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise TraceError(f"trace folder {folder} cannot be made: {problem}") from problem
        if present := sorted(self.folder.glob("chunk-*.safetensors")):
            raise TraceError(f"trace folder {folder} holds {len(present)} chunks already; take another folder")

    def append(self, trace: RoutingTrace) -> None:
        """Write the next chunk; `RoutingTrace.read(folder)` joins them. A trace without forwards is left out."""
        if trace.num_forwards:
            trace.write(self.folder / CHUNK.format(self.num_chunks))
            self.num_chunks += 1
