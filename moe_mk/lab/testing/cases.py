"""Routings as data: hostile ones on a few tokens, and larger ones. One case contains the tokens of every rank.

Tokens and experts with the magnitudes of trained layers are for calls of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import ExpertWeights


@dataclass(frozen=True)
class RoutingCase:
    """The routings of all ranks in one call."""

    name: str
    expert_map: ExpertMap
    routings: tuple[Routing, ...]
    """Per rank, with physical experts, as passed to a transport."""
    logical_ids: tuple[Tensor, ...]
    """The same assignments with logical experts."""
    factors: tuple[float, ...] = (1.0,)
    """By which the tokens of a rank are multiplied, over and over again."""
    gaps: bool = False
    """Whether the rows of experts lie apart in memory, as those of a message do."""

    def scaled(self, x_TH: Tensor) -> Tensor:
        """Tokens times the factors."""
        factors = torch.tensor(self.factors, dtype=x_TH.dtype, device=x_TH.device)
        return x_TH * factors[torch.arange(len(x_TH), dtype=torch.int64, device=x_TH.device) % len(factors)][:, None]

    @property
    def num_tokens(self) -> list[int]:
        """T of each rank."""
        return [routing.num_tokens for routing in self.routings]

    def replicated(self) -> RoutingCase:
        """The case with the tokens of the busiest rank on every rank, as with tensor-parallel attention."""
        source = max(range(len(self.routings)), key=self.num_tokens.__getitem__)
        count, routing = len(self.routings), self.routings[source]
        return replace(self, routings=(routing,) * count, logical_ids=(self.logical_ids[source],) * count)

    @property
    def top_k(self) -> int:
        """Return K, the experts per token."""
        return self.routings[0].ids_TK.shape[1]


TOKENS = (31, 33, 65, 129, 257, 1025)
"""Tokens of the first rank in the larger cases: below and above the tiles and chunks of usual kernels."""
ROWS_OF_ONE_EXPERT = 130
LARGE_AND_SMALL = (0.0, 16.0, 2.0**-8)
"""Factors of tokens: zeros, as of padding, and rows far from the usual size."""
SLOTS = (40, 257)
"""Physical experts of one rank in the larger cases."""


OUTLIERS, OUTLIER = 4, 40.0
"""Columns whose values are far larger in every token, and by how much: LLM.int8() (arXiv 2208.07339), section 3."""
MASSIVE = 1000.0
"""Of one value of one token: Massive Activations (arXiv 2402.17762), table 1."""


@dataclass(frozen=True)
class Sizes:
    """The largest sizes that checks have reached."""

    tokens: int = 0
    """Tokens of one rank."""
    rows: int = 0
    """Rows of one physical expert, from all ranks."""
    slots: int = 0
    """Physical experts of one rank."""
    hidden: int = 0
    intermediate: int = 0
    """0 for transports."""

    @classmethod
    def of(cls, cases: Sequence[RoutingCase], hidden: int, intermediate: int = 0) -> Sizes:
        """The largest sizes of some cases."""
        sizes = cls(hidden=hidden, intermediate=intermediate)
        for case in cases:
            ids = torch.cat([routing.ids_TK.flatten() for routing in case.routings])
            counts = torch.bincount(ids[ids >= 0].long(), minlength=1)
            slots = max(map(len, case.expert_map.experts_of_rank))
            sizes |= cls(max(case.num_tokens), int(counts.max()), slots)
        return sizes

    def __or__(self, other: Sizes) -> Sizes:
        return Sizes(*map(max, astuple(self), astuple(other)))

    def __str__(self) -> str:
        inner = f", intermediate size {self.intermediate}" if self.intermediate else ""
        return (
            f"{self.tokens} tokens per rank, {self.rows} rows per expert, {self.slots} experts per rank, "
            f"hidden size {self.hidden}{inner}"
        )


def draw_experts(
    scheme: QuantScheme = BF16,
    num_experts: int = 8,
    hidden_size: int = 512,
    intermediate_size: int = 256,
    seed: int = 0,
) -> ExpertWeights:
    """Gated experts whose rows differ in size, as those of trained layers do; some rows of gate and up are zeros."""
    draw = torch.Generator("cpu").manual_seed(seed)

    def matrices(rows: int, columns: int, gain: float) -> Tensor:
        w = torch.randn((num_experts, rows, columns), generator=draw, dtype=torch.float32, device="cpu")
        sizes = torch.randn((num_experts, rows, 1), generator=draw, dtype=torch.float32, device="cpu").mul(0.4).exp()
        made: Tensor = w * sizes * (gain * columns**-0.5)
        return made

    first = matrices(2 * intermediate_size, hidden_size, 1.0)
    first[:, :: intermediate_size // 2] = 0.0
    return ExpertWeights(scheme.quantize(first), scheme.quantize(matrices(hidden_size, intermediate_size, 1.0)))


def draw_tokens(num_tokens: int, hidden_size: int, seed: int = 0) -> Tensor:
    """f32 (T, H) with OUTLIERS columns of outliers, tokens of several sizes, and a massive value in every 64th."""
    draw = torch.Generator("cpu").manual_seed(seed)
    x_TH = torch.randn((num_tokens, hidden_size), generator=draw, dtype=torch.float32, device="cpu")
    x_TH[:, torch.randperm(hidden_size, generator=draw, dtype=torch.int64, device="cpu")[:OUTLIERS]] *= OUTLIER
    x_TH *= torch.randn((num_tokens, 1), generator=draw, dtype=torch.float32, device="cpu").mul(0.5).exp()
    x_TH[::64, hidden_size // 3] = MASSIVE
    return x_TH


def larger_routings(
    num_ranks: int, *, num_experts: int = 8, top_k: int = 3, device: torch.device | str = "cpu", seed: int = 1
) -> list[RoutingCase]:
    """Up to 1025 tokens on the first rank, half of the ids -1, and one expert with 130 rows; the placement is linear.

    Then tokens of zeros and of other sizes, rows that lie apart in memory, one choice a token, and all of them.
    The other ranks have half as many tokens, none, or as many. Needs at least as many experts as ranks.
    """
    draw = torch.Generator("cpu").manual_seed(seed)
    linear, where = ExpertMap.linear(num_experts, num_ranks), torch.device(device)

    def case(
        name: str, tokens: Sequence[int], first: int | None = None, drop: float = 0.0, num_choices: int = top_k
    ) -> RoutingCase:
        ids = [_draw_ids(draw, count, num_experts, min(num_choices, num_experts), drop=drop) for count in tokens]
        if first is not None:  # every token chooses this expert, and others than this one
            others = [expert for expert in range(num_experts) if expert != first]
            rest = [_draw_ids(draw, count, num_experts, min(top_k, num_experts) - 1, among=others) for count in tokens]
            ids = [torch.cat((torch.full_like(ids_TK[:, :1], first), ids_TK), dim=1) for ids_TK in rest]
        return _case(name, linear, ids, draw, where)

    shares = [ROWS_OF_ONE_EXPERT * (rank + 1) // num_ranks for rank in range(num_ranks)]
    shares = [share - before for share, before in zip(shares, [0, *shares[:-1]], strict=True)]
    return [
        *(case(f"{count} tokens", _uneven(count, num_ranks)) for count in TOKENS),
        case("65 tokens, some -1", _uneven(65, num_ranks), drop=0.5),
        case(f"{ROWS_OF_ONE_EXPERT} rows of one expert", shares, linear.local_to_global(num_ranks - 1)[-1]),
        replace(case("zeros, large and small tokens", _uneven(9, num_ranks)), factors=LARGE_AND_SMALL),
        replace(case("rows apart in memory", _uneven(9, num_ranks)), gaps=True),
        case("one choice per token", _uneven(9, num_ranks), num_choices=1),
        case("every expert per token", _uneven(9, num_ranks), num_choices=num_experts),
    ]


def routings_of_slots(
    num_ranks: int, num_slots: int, *, top_k: int = 3, device: torch.device | str = "cpu", seed: int = 2
) -> RoutingCase:
    """129 tokens on the first rank, `num_slots` experts on every rank."""
    draw, experts = torch.Generator("cpu").manual_seed(seed), num_ranks * num_slots
    ids = [_draw_ids(draw, count, experts, top_k) for count in _uneven(129, num_ranks)]
    linear = ExpertMap.linear(experts, num_ranks)
    return _case(f"{num_slots} experts per rank", linear, ids, draw, torch.device(device))


def _uneven(tokens: int, num_ranks: int) -> list[int]:
    return [(tokens, tokens // 2, 0, tokens)[rank % 4] for rank in range(num_ranks)]


def hostile_routings(
    num_ranks: int, *, num_experts: int = 8, top_k: int = 3, device: torch.device | str = "cpu", seed: int = 0
) -> list[RoutingCase]:
    """Every case on a linear placement, then ordinary tokens on every other kind of placement.

    Weights are positive, also those of assignments of -1. Needs at least as many experts as ranks.
    """
    draw = torch.Generator("cpu").manual_seed(seed)
    linear = ExpertMap.linear(num_experts, num_ranks)
    even, none = [4] * num_ranks, [0] * num_ranks
    uneven = [(0, 1, 7, 3)[rank % 4] for rank in range(num_ranks)] if num_ranks > 1 else [7]
    last = linear.local_to_global(num_ranks - 1)

    def case(name: str, expert_map: ExpertMap, tokens: Sequence[int], **limits: object) -> RoutingCase:
        ids = [_draw_ids(draw, count, num_experts, top_k, **limits) for count in tokens]  # type: ignore[arg-type]
        return _case(name, expert_map, ids, draw, torch.device(device))

    cases = [
        case("even", linear, even),
        case("no tokens anywhere", linear, none),
        case("no tokens on the first rank", linear, [0, *even[1:]] if num_ranks > 1 else [0]),
        case("tokens on the last rank only", linear, [*none[1:], 5]),
        case("uneven", linear, uneven),
        case("one token", linear, [1, *none[1:]]),
        case("all to one rank", linear, uneven, among=last),
        case("all to one expert", linear, even, among=last[-1:]),
        case("all -1", linear, even, among=[]),
        case("some -1", linear, even, drop=0.5),
        case("round-robin", ExpertMap.round_robin(num_experts, num_ranks), uneven),
        case("uneven experts", _uneven_map(num_experts, num_ranks), uneven),
    ]
    if num_experts % num_ranks == 0:
        shuffled = torch.randperm(num_experts, generator=draw, dtype=torch.int64, device="cpu").tolist()
        cases.append(case("permutation", ExpertMap.from_physical(shuffled, num_ranks, num_experts), uneven))
    if num_ranks > 1:
        cases.append(case("replicas", _replicated_map(num_experts, num_ranks), even))
    return cases


def _case(
    name: str, expert_map: ExpertMap, logical: list[Tensor], draw: torch.Generator, device: torch.device
) -> RoutingCase:
    tables, routings = expert_map.tables(device), []
    for rank, ids_TK in enumerate(logical):
        weights_TK = torch.rand(ids_TK.shape, generator=draw, dtype=torch.float32, device="cpu") + 0.1
        routings.append(Routing(tables.to_physical(ids_TK.to(device), salt=rank), weights_TK.to(device)))
    return RoutingCase(name, expert_map, tuple(routings), tuple(ids_TK.to(device) for ids_TK in logical))


def _draw_ids(
    draw: torch.Generator,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    among: Sequence[int] | None = None,
    drop: float = 0.0,
) -> Tensor:
    """Different experts for each token out of `among`, -1 where there are fewer than top_k, in random order."""
    pool = torch.full((max(num_experts, top_k),), -1, dtype=torch.int64, device="cpu")
    chosen = torch.tensor(list(range(num_experts)) if among is None else list(among), dtype=torch.int64, device="cpu")
    order_TX = torch.rand((num_tokens, len(chosen)), generator=draw, dtype=torch.float32, device="cpu").argsort(dim=1)
    ids_TX = torch.cat((chosen[order_TX], pool.expand(num_tokens, -1)), dim=1)[:, :top_k]
    kept = torch.rand(ids_TX.shape, generator=draw, dtype=torch.float32, device="cpu") >= drop
    return torch.where(kept, ids_TX, -1).to(torch.int32)


def _uneven_map(num_experts: int, num_ranks: int) -> ExpertMap:
    """One expert on every rank except the last, which has all others."""
    single = tuple((rank,) for rank in range(num_ranks - 1))
    return ExpertMap((*single, tuple(range(num_ranks - 1, num_experts))), num_experts)


def _replicated_map(num_experts: int, num_ranks: int) -> ExpertMap:
    """The linear placement, with a replica of expert 0 on every other rank."""
    linear = ExpertMap.linear(num_experts, num_ranks).experts_of_rank
    return ExpertMap((linear[0], *((*experts, 0) for experts in linear[1:])), num_experts)
