"""Which experts every token met: recorded once, then replayed into layers, placements and plans.

A trace is a table of forwards and one long list of rows. X forwards, each of one layer on one rank; R rows, one for
every token of every forward:

    forward   step layer rank phase    tokens      rows of ids_RK
    0         0    3     0    prefill  2           0 1
    1         0    3     1    prefill  1           2
    2         1    3     0    decode   0           (a rank without tokens leaves a forward too)

What a routing trace must be before anything is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError, unless_signalled
from moe_mk.lab.trace.routing_file import (
    CHUNK,
    chunks_of,
    id_dtype,
    load,
    pack_ids,
    pack_int,
    pack_token_ids,
    pack_weights,
    save,
    signed_ids,
    unpack_ids,
    unpack_token_ids,
)
from moe_mk.lab.trace.routing_forward import ReplayRouter, TracedForward, TraceError, TraceFacts
from moe_mk.lab.trace.traffic import Choice, NodesPerToken, Slotted, expected_nodes, node_chances, slots_of_map
from moe_mk.placement.balance.topology import Topology
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.rebalance.load import PHASES, Phase, number_of
from moe_mk.tokens import Routing

__all__ = ["PHASES", "Phase", "ReplayRouter", "RoutingTrace", "TraceError", "TraceFacts", "TracedForward"]

COLUMNS = ("step_X", "layer_X", "rank_X", "phase_X", "tokens_X")

MOST = 2**62


def problems_of(facts: TraceFacts, tensors: Mapping[str, Tensor | None]) -> list[str]:
    """List contradictions of tensors, also with the facts. Dtypes first, then shapes, then values."""
    given = {name: value for name, value in tensors.items() if value is not None}
    return _dtypes(facts, given) or _shapes(facts, given) or _values(facts, given)


def problems_of_rows(tensors: Mapping[str, Tensor]) -> list[str]:
    """Why the forwards of a file cannot be laid out row by row: columns that are none, and more tokens than rows."""
    columns = [name for name in (*COLUMNS, "token_ids", "token_start_X") if name in tensors]
    wrong = [f"{name} has {tensors[name].dim()} dimensions, expected 1" for name in columns if tensors[name].dim() != 1]
    if wrong or tensors["ids_RK"].dim() != 2:
        return wrong or [f"ids_RK has shape {tuple(tensors['ids_RK'].shape)}, expected rows of K"]
    tokens_X, rows = tensors["tokens_X"].to(torch.int64), len(tensors["ids_RK"])
    if len(tokens_X) and not (0 <= int(tokens_X.min()) and int(tokens_X.max()) <= rows and int(tokens_X.sum()) <= rows):
        least, most = int(tokens_X.min()), int(tokens_X.max())
        return [f"the forwards need {least} to {most} rows each, ids_RK has {rows} for all of them"]
    return []


def _dtypes(facts: TraceFacts, given: Mapping[str, Tensor]) -> list[str]:
    other = {"phase_X": torch.uint8, "ids_RK": id_dtype(facts.num_experts), "weights_RK": torch.float32}
    expected = {name: other.get(name, torch.int64) for name in given}
    return [f"{name} is {t.dtype}, expected {expected[name]}" for name, t in given.items() if t.dtype != expected[name]]


def _shapes(facts: TraceFacts, given: Mapping[str, Tensor]) -> list[str]:
    columns = {name: tuple(given[name].shape) for name in COLUMNS}
    if set(columns.values()) != {(given["tokens_X"].numel(),)}:
        return [f"columns have different shapes: {columns}"]
    rows = int(given["tokens_X"].sum())
    expected = {"ids_RK": (rows, facts.top_k), "weights_RK": (rows, facts.top_k), "token_ids_R": (rows,)}
    return [
        f"{name} has shape {tuple(given[name].shape)}, the forwards need {shape}"
        for name, shape in expected.items()
        if name in given and tuple(given[name].shape) != shape
    ]


def _values(facts: TraceFacts, given: Mapping[str, Tensor]) -> list[str]:
    limits = {
        "ids_RK": (-1, facts.num_experts),
        "rank_X": (0, facts.num_ranks),
        "phase_X": (0, len(PHASES)),
        "tokens_X": (0, len(given["ids_RK"]) + 1),
        "layer_X": (0, MOST),
    }
    wrong = []
    for name, (low, end) in limits.items():
        value = given[name]
        if value.numel() and not low <= int(value.min()) <= int(value.max()) < end:
            wrong.append(f"{name} holds {int(value.min())} to {int(value.max())}, outside [{low}, {end})")
    return wrong


@dataclass(frozen=True)
class RoutingTrace:
    """Routing decisions of some layers over some steps, in order, on the CPU. Raises TraceError if it makes no sense.

    step_X, layer_X, rank_X, tokens_X: int64. phase_X: uint8, the place of the phase in PHASES.
    ids_RK: int16, or int32 beyond 32768 experts; logical, -1 goes nowhere. weights_RK: f32, or None if not recorded.
    token_ids_R: int64, -1 where unknown, or None.
    """

    facts: TraceFacts
    step_X: Tensor
    layer_X: Tensor
    rank_X: Tensor
    phase_X: Tensor
    tokens_X: Tensor
    ids_RK: Tensor
    weights_RK: Tensor | None = None
    token_ids_R: Tensor | None = None

    def __post_init__(self) -> None:
        if wrong := self.facts.problems() or problems_of(self.facts, _tensors(self)):
            raise TraceError("this routing trace cannot be: " + "; ".join(wrong))

    @classmethod
    def of(cls, facts: TraceFacts, forwards: Sequence[TracedForward]) -> RoutingTrace:
        """Put forwards together. Weights, and token ids, are given for all of them or for none."""
        wide = id_dtype(facts.num_experts)
        nothing = torch.empty((0, facts.top_k), dtype=wide, device="cpu")
        shapes = {tuple(each.ids_TK.shape[1:]) for each in forwards} - {(facts.top_k,)}
        if shapes:
            raise TraceError(f"forwards have rows of {sorted(shapes)}, the facts say top_k={facts.top_k}")
        return cls(
            facts,
            step_X=_column([each.step for each in forwards]),
            layer_X=_column([each.layer for each in forwards]),
            rank_X=_column([each.rank for each in forwards]),
            phase_X=_column([number_of(each.phase) for each in forwards]).to(torch.uint8),
            tokens_X=_column([len(each.ids_TK) for each in forwards]),
            ids_RK=torch.cat([nothing, *(signed_ids(each.ids_TK, wide) for each in forwards)]),
            weights_RK=_all_or_none("weights", [each.weights_TK for each in forwards], torch.float32),
            token_ids_R=_all_or_none("token ids", [each.token_ids_T for each in forwards], torch.int64),
        )

    @classmethod
    def read(cls, path: str | PathLike[str]) -> RoutingTrace:
        """Read a file, or a folder of chunks. Raises TraceError for what is damaged, foreign or from the future."""
        path = Path(path)
        return cls.concat([_read(file) for file in chunks_of(path)]) if path.is_dir() else _read(path)

    def write(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file in the narrowest dtypes that lose nothing. It appears whole or not at all."""
        tensors = {name: pack_int(getattr(self, name)) for name in COLUMNS if name != "phase_X"}
        tensors |= {"phase_X": self.phase_X, "ids_RK": pack_ids(self.ids_RK, self.facts.num_experts)}
        if self.weights_RK is not None:
            tensors["weights_RK"] = pack_weights(self.weights_RK)
        if self.token_ids_R is not None:
            tensors["token_ids"], tensors["token_start_X"] = pack_token_ids(self.token_ids_R, self.tokens_X)
        save(Path(path), asdict(self.facts), tensors)

    @staticmethod
    def concat(traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Join traces of the same model, as they are; raises TraceError where they differ in kind."""
        if not traces:
            raise TraceError("there are no traces to join; pass at least one")
        kinds = {each.facts for each in traces}
        wrong = [f"they are of {len(kinds)} kinds: {'; '.join(sorted(map(str, kinds)))}"] * (len(kinds) > 1)
        for name in ("weights_RK", "token_ids_R"):
            having = sum(getattr(each, name) is not None for each in traces)
            if having not in (0, len(traces)):
                wrong.append(f"{having} of {len(traces)} have {name}; leave it out of the others with without()")
        if wrong:
            raise TraceError("traces cannot be joined: " + "; ".join(wrong))
        return _mapped(traces[0], lambda name, _: torch.cat([getattr(each, name) for each in traces]))

    def without(self, *, weights: bool = False, token_ids: bool = False) -> RoutingTrace:
        """Return the trace without its weights, or its token ids."""
        return replace(
            self, weights_RK=None if weights else self.weights_RK, token_ids_R=None if token_ids else self.token_ids_R
        )

    @property
    def num_forwards(self) -> int:
        """X, the calls that were recorded."""
        return len(self.tokens_X)

    @property
    def num_rows(self) -> int:
        """R: every token once for each layer that saw it."""
        return len(self.ids_RK)

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that occur, ascending: the rows of `loads`."""
        return sorted(set(self.layer_X.tolist()))

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that occur, ascending."""
        return sorted(set(self.step_X.tolist()))

    def filter(
        self,
        *,
        layers: Collection[int] | None = None,
        phase: Phase | None = None,
        ranks: Collection[int] | None = None,
        steps: Collection[int] | None = None,
    ) -> RoutingTrace:
        """The forwards that meet every condition given."""
        keep_X = np.ones(self.num_forwards, bool)
        for column, wanted in ((self.layer_X, layers), (self.rank_X, ranks), (self.step_X, steps)):
            if wanted is not None:
                keep_X &= np.isin(column.numpy(), list(wanted))
        if phase is not None:
            keep_X &= self.phase_X.numpy() == number_of(phase)
        chosen_X = torch.from_numpy(keep_X)
        chosen_R = chosen_X.repeat_interleave(self.tokens_X)
        return _mapped(self, lambda name, value: value[chosen_X if name.endswith("_X") else chosen_R])

    def forwards(self) -> Iterator[TracedForward]:
        """Every forward, in the order of recording."""
        parts = self.tokens_X.tolist()
        rows = [
            [None] * len(parts) if value is None else torch.split(value, parts)
            for value in (self.ids_RK, self.weights_RK, self.token_ids_R)
        ]
        columns = (column.tolist() for column in (self.step_X, self.layer_X, self.rank_X, self.phase_X))
        for step, layer, rank, phase, *tensors in zip(*columns, *rows, strict=True):
            yield TracedForward(step, layer, rank, PHASES[phase], *tensors)

    def router(self, layer: int, rank: int = 0) -> ReplayRouter:
        """A replacement for a layer's router that replays the recording, forward by forward."""
        return ReplayRouter(list(self.filter(layers=[layer], ranks=[rank]).forwards()), layer, rank)

    def loads(self) -> NDArray[np.float64]:
        """Tokens that met each expert, [layers, E], in the order of `layers`: what a plan is made from."""
        loads: NDArray[np.float64] = self.windows(1).sum(0)
        return loads

    def windows(self, count: int) -> NDArray[np.float64]:
        """Loads of `count` runs of steps, as equal as they can be, [count, layers, E]; fewer steps give fewer runs."""
        if count < 1:
            raise ShapeError(f"count={count} windows were asked for, at least 1 is needed")
        steps, layers, num_experts = self.steps, self.layers, self.facts.num_experts
        count = max(min(count, len(steps)), 1)
        window_X = np.searchsorted(steps, self.step_X.numpy()) * count // max(len(steps), 1)
        cell_X = window_X * len(layers) + np.searchsorted(layers, self.layer_X.numpy())
        cell_R = np.repeat(cell_X, self.tokens_X.numpy())
        ids_RK = self.ids_RK.numpy().astype(np.int64)
        keys = (cell_R[:, None] * num_experts + ids_RK)[ids_RK >= 0]
        counted = np.bincount(keys, minlength=count * len(layers) * num_experts).astype(np.float64)
        windows: NDArray[np.float64] = counted.reshape(count, len(layers), num_experts)
        return windows

    def nodes_per_token(
        self, placement: Slotted | ExpertMap, topology: Topology, *, choice: Choice = "near"
    ) -> NodesPerToken:
        """Nodes a token reaches under a placement: the exact expectation over the choice among copies.

        placement: of `layers`, in their order, or one map for all of them. choice: "near" is what layers do, "share"
        draws copies by share alone. Tokens belong to the rank that recorded them if there were as many ranks as there
        are GPUs; else they are dealt out to the living GPUs in turn. Raises ShapeError where sizes differ.
        """
        layers = self.layers
        if isinstance(placement, ExpertMap):
            slots_XP, share_XP = slots_of_map(placement, len(layers))
        else:
            slots_XP, share_XP = placement.phy2log, placement.share
        expected = (len(layers), topology.num_slots)
        if slots_XP.shape != expected:
            raise ShapeError(
                f"the placement has shape {slots_XP.shape}, trace and topology need [layers, slots] = {expected}"
            )
        if int(slots_XP.max(initial=-1)) >= self.facts.num_experts:
            raise ShapeError(f"the placement names expert {slots_XP.max()}, the trace has {self.facts.num_experts}")
        living = np.flatnonzero(topology.alive_W)
        rank_R, layer_R = self._ranks_of_rows(topology), np.repeat(self.layer_X.numpy(), self.tokens_X.numpy())
        everywhere = remote = 0.0
        for x, layer in enumerate(layers):
            mine = np.flatnonzero(layer_R == layer)
            chance = node_chances(slots_XP[x], share_XP[x], self.facts.num_experts, topology, choice)
            ids = self.ids_RK.numpy()[mine].astype(np.int64)
            sums = expected_nodes(ids, rank_R[mine], chance, topology.node_W[living])
            everywhere, remote = everywhere + sums[0], remote + sums[1]
        rows = max(self.num_rows, 1)
        return NodesPerToken(everywhere / rows, remote / rows)

    def _ranks_of_rows(self, topology: Topology) -> NDArray[np.int64]:
        """Who brings each row, counted among the living GPUs."""
        living, tokens_X, rank_X = int(topology.alive_W.sum()), self.tokens_X.numpy(), self.rank_X.numpy()
        rank_R: NDArray[np.int64] = np.repeat(rank_X, tokens_X)
        if self.facts.num_ranks == topology.gpus == living:
            return rank_R
        first_X = np.cumsum(tokens_X) - tokens_X
        dealt_R: NDArray[np.int64] = (rank_R + np.arange(self.num_rows) - np.repeat(first_X, tokens_X)) % living
        return dealt_R


def _read(file: Path) -> RoutingTrace:
    if not file.is_file():
        raise TraceError(f"trace {file} is not there")
    header, tensors = load(file)
    missing = sorted({*COLUMNS, "ids_RK"} - set(tensors))
    unknown = sorted(set(header) ^ {f.name for f in fields(TraceFacts)})
    if missing or unknown:
        raise TraceError(f"trace {file} lacks {missing or 'no tensor'}; its header differs in {unknown or 'nothing'}")
    facts = TraceFacts(**header)  # type: ignore[arg-type]
    columns = {name: tensors[name].to(torch.int64) for name in COLUMNS if name != "phase_X"}
    if wrong := [*facts.problems(), *problems_of_rows(tensors)]:
        raise TraceError(f"trace {file}: " + "; ".join(wrong))
    token_ids_R = None
    if "token_ids" in tensors and "token_start_X" in tensors:
        token_ids_R = unpack_token_ids(tensors["token_ids"], tensors["token_start_X"], columns["tokens_X"])
    weights = tensors.get("weights_RK")
    try:
        return RoutingTrace(
            facts,
            **columns,
            phase_X=tensors["phase_X"],
            ids_RK=unpack_ids(tensors["ids_RK"], facts.num_experts),
            weights_RK=None if weights is None else weights.to(torch.float32),
            token_ids_R=token_ids_R,
        )
    except TraceError as problem:
        raise TraceError(f"trace {file}: {problem}") from problem


def _tensors(trace: RoutingTrace) -> dict[str, Tensor | None]:
    return {each.name: getattr(trace, each.name) for each in fields(trace) if each.name != "facts"}


def _mapped(trace: RoutingTrace, change: Callable[[str, Tensor], Tensor]) -> RoutingTrace:
    """The trace with every tensor that is there changed, by name."""
    return RoutingTrace(
        trace.facts, **{name: change(name, value) for name, value in _tensors(trace).items() if value is not None}
    )


def _column(numbers: Sequence[int]) -> Tensor:
    try:
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    except unless_signalled(ValueError, RuntimeError, OverflowError, TypeError) as problem:
        raise TraceError(f"steps, layers and ranks must be numbers of 64 bits: {problem}") from problem


def _all_or_none(what: str, parts: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    given = [part for part in parts if part is not None]
    if not given:
        return None
    if len(given) != len(parts):
        raise TraceError(f"{len(given)} of {len(parts)} forwards have {what}; give them for all forwards or for none")
    return torch.cat([part.cpu().to(dtype) for part in given])


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
                layer.on_routing = partial(self.record, number)
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
        """Return the records so far, on the host; the recorder starts over with the step it is at."""
        taken, self._forwards = self._forwards, []
        return RoutingTrace.of(self.facts, taken)


class TraceFolder:
    """A trace on disk that grows: every chunk is a whole trace of its own, written once."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        """The folder is made if it is not there; raises TraceError if it holds chunks already, or cannot be made."""
        self.folder, self.num_chunks = Path(folder), 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except unless_signalled(OSError) as problem:
            raise TraceError(f"trace folder {folder} cannot be made: {problem}") from problem
        if present := sorted(self.folder.glob("chunk-*.safetensors")):
            raise TraceError(f"trace folder {folder} holds {len(present)} chunks already; take another folder")

    def append(self, trace: RoutingTrace) -> None:
        """Write the next chunk; `RoutingTrace.read(folder)` joins them. A trace without forwards is left out."""
        if trace.num_forwards:
            trace.write(self.folder / CHUNK.format(self.num_chunks))
            self.num_chunks += 1
