"""Compare two pairs of backends on one input, stage by stage: the first stage that differs, and the position.

    dispatch   what each rank received, for every (token, expert)
    experts    what the experts made of it, for every (token, expert), before weights
    reduce     the same, weighted and summed, for every (token, rank)
    combine    what returned, for every token

A received row is known by its content: random rows of two hundred numbers have no twins. So nothing is asked of a
backend beyond its contract, whatever order its rows arrive in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.errors import ConfigError
from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.flight import Flight, interleave
from moe_mk.oracle.expected_error import ALL_TOKENS, experts_error
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, Routing, RowTokens, Tokens
from moe_mk.weights.expert_weights import ExpertWeights

STAGES = ("dispatch", "experts", "reduce", "combine")
BLOCK = 128
"""Columns per block, as covered by one scale."""
Key = tuple[int, int]
"""(token, expert), (token, rank), or (token, -1)."""


@dataclass(frozen=True)
class Scene:
    """The input of a comparison: tokens, routing and experts of all ranks."""

    x_TH: Tensor
    routing: Routing
    """With logical experts; every rank has an equal share of the rows."""
    weights: ExpertWeights
    ranks: int
    dtype: Plain
    compute: QuantScheme
    wire: QuantScheme

    @property
    def error(self) -> float:
        """The error limit between two correct backends, by the formats."""
        both = experts_error(self.dtype, self.compute, self.weights.scheme, self.x_TH.shape[1])
        return ALL_TOKENS * 2**0.5 * both


@dataclass(frozen=True)
class Difference:
    """A difference between two results."""

    stage: str
    token: int
    expert: int
    """Or the rank, at the stage "reduce"; -1 at the stage "combine"."""
    block: int
    """Columns [128 block, 128 (block + 1))."""
    error: float
    """Relative L2 in that block; infinite for a missing row."""
    what: str


@dataclass(frozen=True)
class Bisection:
    """The result of a comparison."""

    names: tuple[str, str]
    compared: Mapping[str, int]
    """Vectors compared at each stage, in order; the last stage is the one that differs, if any does."""
    limit: float
    first: Difference | None
    num_differing: int = 0
    """Vectors beyond the limit at that stage."""
    skipped: tuple[str, ...] = field(default=())
    """Stages that could not be compared, with the reason."""


def bisect(one: str, other: str, scene: Scene, *, exact: bool = False) -> Bisection:
    """Run two pairs "transport + experts" on a scene and find the first stage in which they differ.

    exact: any differing bit counts, not only what the formats do not explain. Raises ConfigError for unknown names.
    """
    pairs = [_pair(name, scene.ranks) for name in (one, other)]
    layouts = _layouts([EXPERTS[experts].traits for _, experts in pairs])
    views = [_views(pair, layout, scene) for pair, layout in zip(pairs, layouts, strict=True)]
    limit, compared, skipped = 0.0 if exact else scene.error, {}, []
    for stage in STAGES:
        mine, its = (view[stage] for view in views)
        if mine is None or its is None:
            who = " and ".join(pair[1] for pair, view in zip(pairs, views, strict=True) if view[stage] is None)
            skipped.append(f"{stage}: {who} weighs and sums inside")
            continue
        compared[stage] = len(mine.keys() | its.keys())
        found = _differences(stage, mine, its, limit)
        if found:
            return Bisection((one, other), compared, limit, found[0], len(found), tuple(skipped))
    return Bisection((one, other), compared, limit, None, 0, tuple(skipped))


def _pair(name: str, ranks: int) -> tuple[str, str]:
    """Two names joined by a plus, or one name; the other backend is then a default that always works."""
    parts = [part.strip() for part in name.split("+")]
    if len(parts) == 2:
        transport, experts = parts
    elif parts[0] in PREPARE_FINALIZE:
        transport, experts = parts[0], "reference"
    else:
        transport, experts = "no_ep" if ranks == 1 else "all_to_all", parts[0]
    traits = PREPARE_FINALIZE[transport].traits
    _ = EXPERTS[experts]
    if len(parts) > 2 or not traits.min_ranks <= ranks <= (traits.max_ranks or ranks):
        raise ConfigError(f"{name} is no pair for {ranks} {'rank' if ranks == 1 else 'ranks'}; see --ranks")
    return transport, experts


def _layouts(traits: Sequence[ExpertsTraits]) -> list[type]:
    """For each backend a layout with raw outputs, to compare per expert; otherwise its preferred one."""
    return [
        next((layout for layout, stage in t.emits.items() if stage is OutputStage.RAW), t.consumes[0]) for t in traits
    ]


Views = dict[str, dict[Key, Tensor] | None]


def _views(pair: tuple[str, str], layout: type, scene: Scene) -> Views:
    num_experts = scene.weights.num_slots
    expert_map = ExpertMap.linear(num_experts, scene.ranks)
    comms = LockstepWorld(scene.ranks).communicators()
    ranks = [_Rank(pair, layout, scene, expert_map, comm) for comm in comms]
    outputs = [y_TH.float() for y_TH in interleave([rank.steps() for rank in ranks])]
    combined = torch.stack(outputs).sum(dim=0) if ranks[0].partial else torch.cat(outputs)
    views: Views = {stage: {} for stage in STAGES}
    for rank in ranks:
        for stage in STAGES[:3]:
            held = views[stage]
            views[stage] = None if held is None or rank.seen[stage] is None else held | (rank.seen[stage] or {})
    views["combine"] = {(token, -1): row for token, row in enumerate(combined.double())}
    return views


class _Rank:
    """One rank of a pair that records intermediate results."""

    def __init__(
        self, pair: tuple[str, str], layout: type, scene: Scene, expert_map: ExpertMap, comm: Communicator
    ) -> None:
        self.scene, self.layout, self.rank = scene, layout, comm.rank
        self.own = expert_map.local_to_global(comm.rank)
        device, hidden = scene.x_TH.device, scene.x_TH.shape[1]
        inner, top_k = scene.weights.w2.shape[2], scene.routing.ids_TK.shape[1]
        self.transport: PrepareFinalize = PREPARE_FINALIZE[pair[0]](
            TransportContext(
                comm, expert_map, expert_map.tables(device), scene.wire, scene.dtype, hidden, top_k, device
            )
        )
        self.partial = self.transport.traits.partial
        context = ExpertsContext(scene.dtype, scene.compute, "silu", len(self.own), hidden, inner, device)
        self.experts: FusedExperts = EXPERTS[pair[1]](context)
        self.weights = self.experts.relayout(_owned(scene.weights, self.own))
        self.seen: dict[str, dict[Key, Tensor] | None] = {stage: {} for stage in STAGES}

    def steps(self) -> Flight[Tensor]:
        """The forward pass of `kernel.py`, with recording."""
        scene, count = self.scene, len(self.scene.x_TH)
        cut = slice(0, count)
        if not self.partial:
            cut = slice(count * self.rank // scene.ranks, count * (self.rank + 1) // scene.ranks)
        routing = Routing(scene.routing.ids_TK[cut], scene.routing.weights_TK[cut])
        tokens = yield from self.transport.prepare(scene.x_TH[cut], routing)
        local = permute(tokens, into=(self.layout,) if isinstance(tokens, RowTokens) else self.experts.traits.consumes)
        self.seen["dispatch"] = self._by_expert(local, _rows_of(local).dequantize(torch.float32))
        output = self.experts(local, self.weights)
        self.seen["experts"] = self._by_expert(local, output.y) if output.stage is OutputStage.RAW else None
        reduced = weight_and_reduce(output, local, until=self.transport.traits.wants)
        self.seen["reduce"] = self._by_rank(local, reduced)
        return (yield from self.transport.finalize(reduced, tokens))

    def _by_expert(self, tokens: Tokens, y: Tensor) -> dict[Key, Tensor]:
        """Vectors by (token, expert): `y` has one row an assignment, or a received row stands for all of its own."""
        found: dict[Key, Tensor] = {}
        x = _rows_of(tokens).dequantize(torch.float32)
        for place, slot in _assignments(tokens):
            found[(self._token(x[place]), self.own[slot])] = y[place].double()
        return found

    def _by_rank(self, tokens: Tokens, output: ExpertOutput) -> dict[Key, Tensor] | None:
        """Sums by (token, rank): where rows are reduced, the k-th row is that of the k-th received token."""
        if output.stage is not OutputStage.REDUCED:
            return None
        x = _rows_of(tokens).dequantize(torch.float32)
        row_of = {_received_row(tokens, place): self._token(x[place]) for place, _ in _assignments(tokens)}
        return {(token, self.rank): output.y[row].double() for row, token in row_of.items()}

    def _token(self, x_H: Tensor) -> int:
        """Which token a received row is: the nearest in angle, whatever it was rounded to."""
        return int(torch.nn.functional.cosine_similarity(self.scene.x_TH.float(), x_H[None].float(), dim=1).argmax())


def _rows_of(tokens: Tokens) -> QuantTensor:
    if isinstance(tokens, RowTokens):
        return tokens.x_RH
    return tokens.x_NH if isinstance(tokens, GroupedTokens) else tokens.x_LSH


def _assignments(tokens: Tokens) -> list[tuple[tuple[int, ...], int]]:
    """Row and slot of each assignment."""
    if isinstance(tokens, RowTokens):
        held = torch.nonzero(tokens.ids_RK >= 0).tolist()
        return [((r,), int(tokens.ids_RK[r, k])) for r, k in held]
    counts = tokens.counts_L.tolist()
    if isinstance(tokens, BatchedTokens):
        return [((slot, place), slot) for slot, count in enumerate(counts) for place in range(count)]
    slots = [slot for slot, count in enumerate(counts) for _ in range(count)]
    return [((place,), slot) for place, slot in enumerate(slots)]


def _received_row(tokens: Tokens, place: tuple[int, ...]) -> int:
    if isinstance(tokens, RowTokens):
        return place[0]
    if isinstance(tokens, GroupedTokens):
        return int(tokens.row_N[place[0]])
    assert tokens.home is not None
    return int(tokens.home.row_LS[place])


def _owned(weights: ExpertWeights, experts: Sequence[int]) -> ExpertWeights:
    index = torch.tensor(list(experts), dtype=torch.int64, device=weights.w13.device)
    return ExpertWeights(_picked(weights.w13, index), _picked(weights.w2, index), gated=weights.gated)


def _picked(q: QuantTensor, index: Tensor) -> QuantTensor:
    """Some experts of a stack; torch picks one-byte floats only as bytes (2.13)."""

    def pick(part: Tensor) -> Tensor:
        if part.element_size() == 1:
            return part.view(torch.uint8)[index].view(part.dtype)
        return part[index]

    return q.changed(pick)


def _differences(stage: str, mine: dict[Key, Tensor], its: dict[Key, Tensor], limit: float) -> list[Difference]:
    """All vectors beyond the limit, in order of token and expert; missing ones first."""
    found = []
    for key in sorted(mine.keys() | its.keys()):
        if key not in mine or key not in its:
            who = "second" if key in mine else "first"
            found.append(Difference(stage, *key, block=0, error=float("inf"), what=f"missing in the {who}"))
            continue
        blocks = [
            float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp_min(torch.finfo(torch.float64).tiny))
            for a, b in zip(torch.split(mine[key], BLOCK), torch.split(its[key], BLOCK), strict=True)
        ]
        beyond = [block for block, error in enumerate(blocks) if not error <= limit]
        if beyond:
            error = blocks[beyond[0]]
            what = "NaN" if error != error else f"{len(beyond)} of {len(blocks)} blocks differ"
            found.append(Difference(stage, *key, block=beyond[0], error=error, what=what))
    return sorted(found, key=lambda difference: difference.error != float("inf"))
