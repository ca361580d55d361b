"""Every pair that the oracle accepts, on 1, 2 and 4 ranks in lockstep, against a dense loop written down here."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import oracle
from moe_mk.config.problem import Problem
from moe_mk.flight import Flight
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.testing.limits import require_close
from moe_mk.lab.testing.transports import each_rank, fly_dual, fly_together, world_of
from moe_mk.oracle import Decision, Parts, assemble
from moe_mk.oracle.decide import INSIDE
from moe_mk.oracle.expected_error import error_of
from moe_mk.oracle.verdict import Verdict
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.prepare_finalize.no_ep import NoEP
from moe_mk.quant import BF16
from moe_mk.runner import alongside
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import ExpertWeights
from moe_mk.weights.layer_weights import as_mapped
from tests.support.formats import EXPERTS, FORMATS, HIDDEN, INNER, MORE_PAIRS, TOP_K, Format
from tests.support.tiers import quick_where

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pair:
    form: Format
    ranks: int
    tokens: str
    transport: str
    experts: str

    def __str__(self) -> str:
        return f"{self.transport}+{self.experts}-{self.ranks}-{self.form}"

    def problem(self, **settings: Any) -> Problem:
        return self.form.problem(ep=self.ranks, tokens=self.tokens, allow_emulated=True, **settings)

    @property
    def inside(self) -> bool:
        return self.transport == INSIDE

    @property
    def every_case(self) -> bool:
        """Whether every hostile case is tried: where ranks are threads, that is left to the transport alone."""
        threads = not self.inside and PREPARE_FINALIZE[self.transport].traits.blocking
        return self.form in (FORMATS[n] for n in IN_TWO) and not threads

    @property
    def decision(self) -> Decision:
        return oracle.select(self.problem(prepare_finalize=self.transport, experts=self.experts))


IN_TWO = (1, 8)
"""FORMATS that emulated libraries and slowly meeting proxies are tried in: a bf16 one with plain experts, and one with
FP8 activations."""
IN_EVERY_PAIR = ("no tokens on the first rank", "uneven", "some -1", "replicas")
"""Cases of pairs in which not every hostile case is tried."""


def accepted_pairs() -> list[Pair]:
    found = []
    for number, form in enumerate([*FORMATS, *MORE_PAIRS]):
        pair_of_ranks = ((2, "sharded"), (2, "replicated")) if number in range(0, len(FORMATS), 3) else ()
        for ranks, tokens in ((1, "sharded"), (4, "sharded"), (4, "replicated"), *pair_of_ranks):
            decision = oracle.select(form.problem(ep=ranks, tokens=tokens, allow_emulated=True))
            # Two formats are enough for a library's adapter, bf16 rows and FP8 rows: others are the experts' concern.
            able = [v for v in decision.verdicts if not v.reasons and (number in IN_TWO or not _few(v))]
            found += [Pair(form, ranks, tokens, verdict.prepare_finalize, verdict.experts) for verdict in able]
    return found


def _few(verdict: Verdict) -> bool:
    return verdict.emulated or verdict.prepare_finalize == "one_sided_network"


def stored_otherwise() -> list[Pair]:
    """Libraries with experts stored in INT8, MXFP4, NVFP4 or MXFP8: DeepEP sends bf16 then, FlashInfer sends bytes."""
    forms = [*MORE_PAIRS[:3], Format("mxfp8", "float32", BF16, "checkpoint")]
    names = ("deepep_ht", "nvlink_one_sided")
    return [Pair(form, 2, "sharded", name, "reference") for form in forms for name in names]


PAIRS = [*accepted_pairs(), *stored_otherwise()]


def is_quick(pair: Pair) -> bool:
    """bf16, and FP8 activations on two ranks where they take turns in one thread; imitated libraries on two ranks."""
    traits = None if pair.inside else PREPARE_FINALIZE[pair.transport].traits
    if traits is not None and traits.library and pair.ranks != 2:
        return False
    forms = IN_TWO[:1] if pair.ranks != 2 or (traits is not None and (traits.blocking or traits.library)) else IN_TWO
    return pair.form in (FORMATS[n] for n in forms) and (pair.ranks, pair.tokens) != (4, "replicated")


def axes(pair: Pair) -> tuple[Hashable, ...]:
    return pair.form, pair.ranks, pair.tokens, pair.transport, pair.experts


def test_what_travels_is_what_a_library_can_carry() -> None:
    wires = {(pair.transport, pair.form.weights): pair.decision.wire.name for pair in stored_otherwise()}
    assert {wire for (name, _), wire in wires.items() if name != "nvlink_one_sided"} == {"bf16"}
    carried = {form: wire for (name, form), wire in wires.items() if name == "nvlink_one_sided"}
    assert carried == {"int8": "int8_token", "mxfp4": "mxfp8", "nvfp4": "nvfp4_1x16", "mxfp8": "mxfp8"}


def test_there_is_a_pair_for_every_transport_and_every_number_of_ranks() -> None:
    assert {pair.transport for pair in PAIRS} >= {"no_ep", "all_to_all", "all_gather", "replicated", "inside"}
    assert {pair.ranks for pair in PAIRS} == {1, 2, 4}
    assert len(PAIRS) >= 60


def dense(x_TH: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """One token and one expert after the other, in f32. Ids are logical."""
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    w13, w2 = (q.dequantize(torch.float32) for q in (weights.w13, weights.w2))
    for t in range(len(x_TH)):
        for expert, weight in zip(routing.ids_TK[t].tolist(), routing.weights_TK[t].tolist(), strict=True):
            if expert >= 0:
                gate, up = (w13[expert] @ x_TH[t].float()).chunk(2)
                y_TH[t] += weight * (w2[expert] @ (gate / (1.0 + torch.exp(-gate)) * up))
    return y_TH


class Ranks:
    """The kernel of a decision on every rank of a case, with the weights of that rank, stacked or mapped in turn."""

    def __init__(self, decision: Decision, case: RoutingCase, stack: ExpertWeights) -> None:
        self.case, self.weights = case, []
        name = decision.chosen.prepare_finalize
        transport = NoEP if name == INSIDE else PREPARE_FINALIZE[name]
        self.world = world_of(transport.traits, len(case.routings))
        parts = [Parts(case.expert_map, CPU, comm) for comm in self.world.communicators()]
        self.kernels = each_rank(self.world, [partial(assemble, decision, part) for part in parts])
        for rank, kernel in enumerate(self.kernels):
            own = torch.tensor(case.expert_map.local_to_global(rank), dtype=torch.int64)
            mine = ExpertWeights(stack.w13[own], stack.w2[own])
            self.weights.append(kernel.experts.relayout(as_mapped(mine) if rank % 2 else mine))

    def flights(self, tokens: list[Tensor], logits: list[Tensor], cut: slice = slice(None)) -> list[Flight[Tensor]]:
        each = zip(self.kernels, tokens, logits, self.case.routings, self.weights, strict=True)
        return [
            kernel.steps(x_TH[cut], Routing(own.ids_TK[cut], own.weights_TK[cut], logits_TE=logits_TE[cut]), weights)
            for kernel, x_TH, logits_TE, own, weights in each
        ]


@pytest.mark.row(81, 84, 85)
@pytest.mark.parametrize("pair", quick_where(is_quick, PAIRS, axes), ids=str)
def test_an_accepted_pair_equals_the_dense_loop(pair: Pair) -> None:
    decision = pair.decision
    assert (decision.chosen.prepare_finalize, decision.chosen.experts) == (pair.transport, pair.experts)
    assert decision.problem.config.router.renormalize
    stack, error = stored(pair.form), error_of(decision)
    chosen = [name for name in cases_of(pair.ranks) if pair.every_case or name in IN_EVERY_PAIR]
    for case, tokens, logits, expected in (asked(pair.form, pair.ranks, pair.tokens, pair.inside, n) for n in chosen):
        ranks, before = Ranks(decision, case, stack), bits_of(*tokens, *logits, *case.routings)
        outputs = [fly_together(ranks.world, ranks.flights(tokens, logits))]
        if case.name in ("uneven", "some -1"):
            outputs += [run_with(ranks, tokens, logits), run_dual(ranks, tokens, logits)]
        for how, output in zip(("alone", "with", "dual"), outputs, strict=False):
            for rank, (y_TH, want_TH) in enumerate(zip(together(pair, output), expected, strict=True)):
                require_close(y_TH, want_TH, error, f"{pair}, {case.name}, {how}, rank {rank}")
        again = fly_together(ranks.world, ranks.flights(tokens, logits))
        assert not decision.deterministic or all(
            torch.equal(one, other) for one, other in zip(outputs[0], again, strict=True)
        ), case.name
        assert bits_of(*tokens, *logits, *case.routings) == before, f"{case.name}: an input changed"


@cache
def stored(form: Format) -> ExpertWeights:
    return random_experts(form.problem().weights, EXPERTS, HIDDEN, INNER, CPU)


@cache
def asked(
    form: Format, num_ranks: int, sharing: str, inside: bool, name: str
) -> tuple[RoutingCase, list[Tensor], list[Tensor], list[Tensor]]:
    """A case, the tokens and logits of its ranks, and what must come of them: the same in every pair."""
    case = cases_of(num_ranks)[name]
    case = case.replicated() if sharing == "replicated" else case
    draws = [torch.Generator().manual_seed(0 if sharing == "replicated" else rank) for rank in range(num_ranks)]
    pairs = list(zip(case.num_tokens, draws, strict=True))
    tokens = [torch.randn((count, HIDDEN), generator=draw).to(form.dtype.dtype) for count, draw in pairs]
    logits = [torch.randn((count, EXPERTS), generator=draw) for count, draw in pairs]
    wanted = routed(logits) if inside else logical(case)
    return case, tokens, logits, [dense(*given, stored(form)) for given in zip(tokens, wanted, strict=True)]


@cache
def cases_of(num_ranks: int) -> dict[str, RoutingCase]:
    return {case.name: case for case in hostile_routings(num_ranks, num_experts=EXPERTS, top_k=TOP_K)}


def logical(case: RoutingCase) -> list[Routing]:
    """The routings of a case, with logical experts."""
    return [Routing(ids, r.weights_TK) for ids, r in zip(case.logical_ids, case.routings, strict=True)]


def routed(logits: list[Tensor]) -> list[Routing]:
    """What experts that route inside must find in the logits."""
    made = []
    for logits_TE in logits:
        weights_TK, ids_TK = torch.softmax(logits_TE, dim=-1).topk(TOP_K, dim=-1)
        made.append(Routing(ids_TK, weights_TK / weights_TK.sum(dim=-1, keepdim=True)))
    return made


def together(pair: Pair, outputs: list[Tensor]) -> list[Tensor]:
    """What the layer makes of the outputs: partial sums of replicated tokens are added up over the ranks."""
    wide = [y_TH.float() for y_TH in outputs]
    if pair.inside or not PREPARE_FINALIZE[pair.transport].traits.partial:
        return wide
    return [torch.stack(wide).sum(dim=0)] * len(wide)


def run_with(ranks: Ranks, tokens: list[Tensor], logits: list[Tensor]) -> list[Tensor]:
    shared: list[int] = []
    flights = [alongside(flight, lambda: shared.append(1)) for flight in ranks.flights(tokens, logits)]
    outputs = [y_TH for y_TH, _ in fly_together(ranks.world, flights)]
    assert len(shared) == len(tokens), "the other work is done once on every rank"
    return outputs


def run_dual(ranks: Ranks, tokens: list[Tensor], logits: list[Tensor]) -> list[Tensor]:
    """Two micro-batches of each rank in flight at once; the first has one token, or none."""
    halves = [ranks.flights(tokens, logits, cut) for cut in (slice(0, 1), slice(1, None))]
    return [torch.cat(both) for both in fly_dual(ranks.world, list(zip(*halves, strict=True)))]
