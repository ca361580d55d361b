"""The conformance kit finds what it looks for: each broken backend is refused, with the case that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_mk.experts import EXPERTS, FusedExperts
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.flight import Flight, InFlight
from moe_mk.lab.testing.conformance import NonConforming, check_experts, check_transport, hostile_routings
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.prepare_finalize.no_ep import NoEP
from moe_mk.quant import FP32
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, Routing, RowTokens, Tokens
from moe_mk.weights.expert_weights import ExpertWeights, Weights
from moe_mk.weights.scan import Progress

Transport = type[PrepareFinalize]
Experts = type[FusedExperts]


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Callable[[Transport], None]:
    """Register a transport as `broken` for one test."""
    return lambda cls: monkeypatch.setitem(PREPARE_FINALIZE._entries, "broken", cls)


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Experts], None]:
    return lambda cls: monkeypatch.setitem(EXPERTS._entries, "broken", cls)


class ForgetsWeights(AllToAll):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        return (yield from super().prepare(x_TH, replace(routing, weights_TK=routing.weights_TK.clamp(max=0.5))))


class LosesTheLastToken(AllToAll):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        y_TH = yield from super().finalize(output, tokens)
        return torch.cat((y_TH[:-1], torch.zeros_like(y_TH[-1:])))


class ShiftsTokens(NoEP):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        y_TH = yield from super().finalize(output, tokens)
        return y_TH.roll(1, dims=0)


class WritesIntoItsInput(AllToAll):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, routing)
        x_TH.mul_(1.0).add_(1e-3)
        return tokens


class SkipsAHopWithoutTokens(NoEP):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        if len(x_TH):
            yield InFlight("counts")
        return (yield from super().prepare(x_TH, routing))


class RemembersTheLastCall(NoEP):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        self.calls = getattr(self, "calls", 0) + 1
        yield InFlight("combine")
        return output.y * (1.0 + 1e-7 * (self.calls > 1))


@pytest.mark.parametrize(
    "cls,ranks,found",
    [
        (ForgetsWeights, 2, r"token 0 of rank 0 was combined to \[.*expected \["),
        (LosesTheLastToken, 4, r"was combined to \[0\.0"),
        (ShiftsTokens, 1, r"broken, 1 ranks, fp32, even: token 0 of rank 0 was combined to"),
        (WritesIntoItsInput, 2, r"an input changed"),
        (SkipsAHopWithoutTokens, 1, r"yield points depend on the number of tokens"),
        (RemembersTheLastCall, 1, r"two calls give different bits"),
    ],
)
def test_a_broken_transport_is_found(
    transport: Callable[[Transport], None], cls: Transport, ranks: int, found: str
) -> None:
    transport(cls)
    with pytest.raises(NonConforming, match=found):
        check_transport("broken", num_ranks=ranks)


class SwapsHalves(ReferenceExperts):
    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        if not isinstance(weights, ExpertWeights):
            return weights
        up_first = weights.w13.values.roll(weights.w13.shape[1] // 2, dims=1)
        return replace(weights, w13=replace(weights.w13, values=up_first))


class ReadsPadding(ReferenceExperts):
    def _batched(self, tokens: BatchedTokens, weights: Weights) -> Tensor:
        y_LSH = super()._batched(tokens, weights)
        return y_LSH + 0 * tokens.x_LSH.dequantize(torch.float32).sum()


class TenthOfAPercentTooLarge(ReferenceExperts):
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        return replace(output, y=output.y * 1.001)


class LiesAboutItsStage(ReferenceExperts):
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        return replace(output, stage=OutputStage.WEIGHTED) if isinstance(tokens, GroupedTokens) else output


class ReadsDroppedAssignments(ReferenceExperts):
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        if isinstance(tokens, RowTokens):
            tokens = replace(tokens, ids_RK=tokens.ids_RK.clamp_min(0), weights_RK=tokens.weights_RK.clamp_min(0.1))
        return super().run(tokens, weights)


class MutatesWeights(ReferenceExperts):
    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        if isinstance(weights, ExpertWeights):
            weights.w2.values.mul_(2.0)
        return weights


class MutatesTokens(ReferenceExperts):
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        if isinstance(tokens, RowTokens):
            tokens.x_RH.values.mul_(1.0).neg_()
        return output


@pytest.mark.parametrize(
    "cls,found",
    [
        (SwapsHalves, r"canonical.*away"),
        (ReadsPadding, r"batched: the output is not finite"),
        (TenthOfAPercentTooLarge, r"away"),
        (LiesAboutItsStage, r"grouped: output is WEIGHTED, the traits declare RAW"),
        (ReadsDroppedAssignments, r"all to one expert, rows: tokens"),
        (MutatesWeights, r"canonical weights were changed"),
        (MutatesTokens, r"rows: the tokens were changed"),
    ],
)
def test_broken_experts_are_found(experts: Callable[[Experts], None], cls: Experts, found: str) -> None:
    experts(cls)
    with pytest.raises(NonConforming, match=found):
        check_experts("broken", FP32, dtype=FP32)


def test_the_hostile_cases_are_what_they_say() -> None:
    cases = {case.name: case for case in hostile_routings(4, num_experts=8, top_k=3)}
    assert cases["no tokens anywhere"].num_tokens == [0, 0, 0, 0]
    assert cases["no tokens on the first rank"].num_tokens[0] == 0 < cases["no tokens on the first rank"].num_tokens[1]
    assert cases["uneven"].num_tokens == [0, 1, 7, 3]
    assert {int(i) for r in cases["all to one rank"].logical_ids for i in r.flatten()} == {6, 7, -1}
    assert {int(i) for r in cases["all to one expert"].logical_ids for i in r.flatten()} == {7, -1}
    assert {int(i) for r in cases["all -1"].logical_ids for i in r.flatten()} == {-1}
    assert cases["replicas"].expert_map.has_replicas
    replicas = cases["replicas"].expert_map.physical_of_logical[0]
    used = {int(i) for r in cases["replicas"].routings for i in r.ids_TK.flatten()}
    assert len(replicas) == 4 and len(used & set(replicas)) > 1, "more than one replica is used"
    assert cases["round-robin"].expert_map.experts_of_rank[1] == (1, 5)
    assert [len(experts) for experts in cases["uneven experts"].expert_map.experts_of_rank] == [1, 1, 1, 5]
    assert not cases["permutation"].expert_map.is_identity
    for case in cases.values():
        for routing, ids_TK in zip(case.routings, case.logical_ids, strict=True):
            assert torch.equal(routing.ids_TK < 0, ids_TK < 0)
            assert not routing.weights_TK[ids_TK < 0].any() and bool((routing.weights_TK[ids_TK >= 0] > 0).all())
            for row in ids_TK.tolist():
                chosen = [e for e in row if e >= 0]
                assert len(set(chosen)) == len(chosen), "a token chooses an expert once"
