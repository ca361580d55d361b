"""Bisection finds the stage, the token, the expert and the block where two backends part."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.experts.base import EXPERTS
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.flight import Flight
from moe_mk.lab.cli.bisect import BisectOrder, scene_of
from moe_mk.lab.testing.bisect import STAGES, bisect
from moe_mk.lab.testing.experts import random_experts
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, Routing, Tokens
from moe_mk.weights.expert_weights import Weights
from tests.cli.conftest import moe_mk

ORDER = BisectOrder("reference", "wrong", tokens=12, experts=6, top_k=2, hidden=384, dtype="float32")
SCENE = scene_of(ORDER)
WRONG_EXPERT = 4


class WrongBlock(ReferenceExperts):
    """Expert 4 is one percent off in its second block of columns, or not a number."""

    factor = 1.01

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        if isinstance(tokens, GroupedTokens):
            start = int(tokens.counts_L[:WRONG_EXPERT].sum())
            output.y[start : start + int(tokens.counts_L[WRONG_EXPERT]), 128:256] *= self.factor
        return output


class WrongSum(ReferenceExperts):
    """Raw rows are right; what is summed inside is not."""

    traits = replace(ReferenceExperts.traits, emits={GroupedTokens: OutputStage.WEIGHTED})

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        assert isinstance(tokens, GroupedTokens)
        output = super().run(tokens, weights)
        return ExpertOutput(output.y * tokens.weights_N[:, None] * 1.01, OutputStage.WEIGHTED)


class LosesAnExpert(AllToAll):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        ids_TK = torch.where(routing.ids_TK == 3, -1, routing.ids_TK)
        return (yield from super().prepare(x_TH, replace(routing, ids_TK=ids_TK)))


class RoundsOnTheWire(AllToAll):
    def encode(self, x_TH: Tensor) -> QuantTensor:
        return super().encode((x_TH * 4).round() / 4)


class ShiftsHome(AllToAll):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        return (yield from super().finalize(output, tokens)).roll(1, dims=0)


def first_token_of(expert: int) -> int:
    return int(torch.nonzero((SCENE.routing.ids_TK == expert).any(dim=1))[0])


def put(monkeypatch: pytest.MonkeyPatch, cls: Any) -> None:
    monkeypatch.setitem((EXPERTS if issubclass(cls, ReferenceExperts) else PREPARE_FINALIZE)._entries, "wrong", cls)


def test_two_right_backends_differ_in_no_stage() -> None:
    found = bisect("reference", "torch_cpu", SCENE)
    assert found.first is None and not found.skipped
    assert list(found.compared) == list(STAGES)
    assert found.compared == {"dispatch": 24, "experts": 24, "reduce": 12, "combine": 12}


@pytest.mark.row("N16")
@pytest.mark.parametrize("factor", [1.01, torch.nan])
def test_a_wrong_block_of_a_wrong_expert_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    put(monkeypatch, WrongBlock)
    monkeypatch.setattr(WrongBlock, "factor", factor)
    found = bisect("reference", "wrong", SCENE)
    first = found.first
    assert first is not None
    assert (first.stage, first.expert, first.block) == ("experts", WRONG_EXPERT, 1)
    assert first.token == first_token_of(WRONG_EXPERT)
    assert first.error == pytest.approx(1 - 1 / factor, rel=1e-4, nan_ok=True), "relative to the larger of the two"
    assert found.num_differing == int((SCENE.routing.ids_TK == WRONG_EXPERT).sum())
    assert list(found.compared) == ["dispatch", "experts"]


def test_experts_that_weigh_inside_are_compared_from_the_next_stage_on(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, WrongSum)
    found = bisect("reference", "wrong", SCENE)
    assert found.skipped == ("experts: wrong weighs and sums inside",)
    assert found.first is not None and found.first.stage == "reduce"
    assert found.first.error == pytest.approx(0.01, rel=0.02)


def test_a_lost_assignment_is_reported_before_any_difference_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, LosesAnExpert)
    first = bisect("all_to_all", "wrong", replace(SCENE, ranks=2)).first
    assert first is not None
    assert (first.stage, first.expert, first.token) == ("dispatch", 3, first_token_of(3))
    assert first.what == "missing in the second" and first.error == float("inf")


def test_what_the_wire_rounded_is_found_at_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, RoundsOnTheWire)
    first = bisect("all_to_all", "wrong", replace(SCENE, ranks=2)).first
    assert first is not None and first.stage == "dispatch" and 0.01 < first.error < 0.2


def test_a_wrong_order_home_is_found_at_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, ShiftsHome)
    found = bisect("all_to_all", "wrong", replace(SCENE, ranks=2))
    assert found.first is not None and (found.first.stage, found.first.token) == ("combine", 0)
    assert found.num_differing == len(SCENE.x_TH)


@pytest.mark.parametrize("pair", [("all_to_all", "all_gather"), ("all_to_all+torch_cpu", "replicated+reference")])
def test_right_transports_differ_in_no_stage(pair: tuple[str, str]) -> None:
    assert bisect(*pair, replace(SCENE, ranks=2)).first is None


@pytest.mark.parametrize("kind", ["nvfp4", "int4_g32_zp", "fp8_tensor"])
def test_experts_of_a_rank_have_every_part_of_their_format(kind: str) -> None:
    """Expert weights of different magnitudes, so that each expert has a global scale of its own."""
    scheme = scheme_of_kind(kind)
    stack = random_experts(scheme, ORDER.experts, ORDER.hidden, ORDER.intermediate, torch.device("cpu"))
    size_L11 = 2.0 ** torch.arange(ORDER.experts)[:, None, None]
    w13, w2 = (scheme.quantize(q.dequantize(torch.float32) * size_L11) for q in (stack.w13, stack.w2))
    scene = replace(SCENE, weights=replace(stack, w13=w13, w2=w2), ranks=2)
    assert bisect("all_to_all+reference", "replicated+torch_cpu", scene).first is None


def test_exactly_equal_is_another_question() -> None:
    assert bisect("all_to_all", "all_gather", replace(SCENE, ranks=2), exact=True).first is None
    found = bisect("reference", "torch_cpu", scene_of(replace(ORDER, dtype="bfloat16")), exact=True)
    assert found.first is not None and found.first.stage == "experts"


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no_ep is no pair for 2 ranks"):
        bisect("no_ep", "all_to_all", replace(SCENE, ranks=2))
    with pytest.raises(ConfigError, match=r"no experts backend is called 'torch_cpx'; did you mean 'torch_cpu'"):
        bisect("torch_cpx", "reference", SCENE)
    for wrong in ({"ranks": 4}, {"top_k": 7}):
        with pytest.raises(ConfigError, match=r"--experts 6 must divide over --ranks \d and be at least --top-k \d"):
            scene_of(replace(ORDER, **wrong))
    other = scene_of(replace(ORDER, top_k=6, seed=1))
    assert other.routing.ids_TK.shape == (12, 6) and not torch.equal(other.x_TH, SCENE.x_TH)


def test_the_command_reports_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, WrongBlock)
    options = ["--tokens", "12", "--experts", "6", "--hidden", "384", "--dtype", "float32"]
    done = moe_mk("bisect", "reference", "wrong", *options)
    assert done.exit_code == 1
    token = first_token_of(WRONG_EXPERT)
    assert f"stage experts: token {token}, expert 4, columns from 128: relative error" in done.stdout
    done = moe_mk("bisect", "reference", "wrong", *options, "--json")
    assert json.loads(done.stdout)["first"]["block"] == 1
    assert moe_mk("bisect", "reference", "torch_cpu", "--weights", "fp8").exit_code == 0
    assert moe_mk("bisect", "reference", "torch_cpu", "--weights", "int7").exit_code == 2
