"""Honest runs pass with little room to spare, and what is wrong fails."""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_mk.lab.verify.dense import dense_layer
from moe_mk.layer import DeepseekV3MoE
from moe_mk.oracle.expected_error import error_of, experts_error
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant.plain import FP32
from tests.support.tiers import quick_where
from tests.verify.conftest import Bench, Case, groups_of, inputs

FORMATS = [
    Case("fp8", torch.bfloat16, activations="plain"), Case("fp8", torch.bfloat16, activations="checkpoint"),
    Case("fp8", torch.bfloat16, activations="plain", wire="fp8"), Case("fp8", torch.float32, activations="plain"),
    Case("fp8", torch.float16, activations="plain"), Case("bf16", torch.bfloat16), Case("bf16", torch.float32),
    Case("tiny", torch.bfloat16, activations="plain"),
]  # fmt: skip
SPREADS = [(1, "sharded"), (2, "sharded"), (2, "replicated")]
CASES = [
    replace(case, ranks=ranks, tokens=tokens)
    for case in FORMATS
    for ranks, tokens in SPREADS
    if case.wire == "auto" or tokens == "sharded"  # replicated tokens do not travel
]
QUICK = [replace(FORMATS[5], ranks=1, tokens="sharded")]
WAITS_FOR_PEERS = {name for name, transport in PREPARE_FINALIZE.items() if transport.traits.blocking}


def accepted_pairs(case: Case, where: Path) -> list[Case]:
    """The case with every pair that the oracle lets run, of ranks that can take turns in one thread as here."""
    layer = DeepseekV3MoE(case.config(where), dtype=case.dtype, groups=groups_of(case.ranks)[0])
    served = [verdict for verdict in layer.decision.verdicts if verdict.cost_us is not None]
    served = [verdict for verdict in served if verdict.prepare_finalize not in WAITS_FOR_PEERS]
    return [replace(case, prepare_finalize=v.prepare_finalize, experts=v.experts) for v in served]


@pytest.mark.row(81)
@pytest.mark.parametrize("case", quick_where(QUICK.__contains__, CASES, astuple), ids=str)
def test_every_accepted_pair_is_as_accurate_as_its_formats_say(
    bench: Callable[[Case], Bench], checkpoints: dict[str, Path], case: Case
) -> None:
    pairs = accepted_pairs(case, checkpoints[case.checkpoint])
    assert pairs
    for pair in pairs:
        ours = bench(pair)
        e = error_of(ours.first.decision)
        for seed in range(3):
            judged = ours.judge(ours.answer(inputs(pair, ours.hidden_size, seed)))
            assert judged.passed, (pair, judged)
            assert 0.3 <= judged.error / e <= 1.5, (pair, judged.error / e)


def test_the_expected_error_by_hand(bench: Callable[[Case], Bench]) -> None:
    # bf16 everywhere, H = 256: d = x = 2^-7 / sqrt(24); 5 x^2 + 8 d^2 = 13 d^2, and f32 sums add next to nothing.
    d, f = 2.0**-7 / math.sqrt(24), 2.0**-23 / math.sqrt(24)
    by_hand = math.sqrt(13 * d**2 + 5 * f**2 * 128)
    assert error_of(bench(Case("bf16")).first.decision) == pytest.approx(by_hand, rel=1e-9)
    # FP8 weights decoded to bf16 add 5 w^2 with w = d.
    fp8 = Case("fp8", activations="plain")
    assert error_of(bench(fp8).first.decision) == pytest.approx(math.sqrt(18 * d**2 + 5 * f**2 * 128), rel=1e-9)
    # An FP8 wire below bf16 experts rounds the input once more: 4 q^2 with q = 2^-3 / sqrt(24).
    wired = replace(fp8, wire="fp8", ranks=2)
    q = 2.0**-3 / math.sqrt(24)
    assert error_of(bench(wired).first.decision) == pytest.approx(math.sqrt(18 * d**2 + 4 * q**2), rel=1e-6)
    # The same wire below experts that compute in it costs nothing: their 5 x^2 is the rounding.
    own = replace(wired, activations="checkpoint")
    assert error_of(bench(own).first.decision) == pytest.approx(math.sqrt(5 * q**2 + 8 * d**2), rel=1e-6)


def test_sums_of_the_second_product_have_as_many_terms_as_experts_are_wide() -> None:
    # f32 alone, H = 8, I = 512: x = d = f, a^2 = 4 f^2, b^2 = 256 f^2.
    f = 2.0**-23 / math.sqrt(24)
    assert experts_error(FP32, FP32, FP32, 8, 512) == pytest.approx(f * math.sqrt(5 + 8 + 4 * 4 + 256), rel=1e-9)
    assert experts_error(FP32, FP32, FP32, 8) == experts_error(FP32, FP32, FP32, 8, 8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_fails(bench: Callable[[Case], Bench], bad: float) -> None:
    ours = bench(Case("bf16"))
    answer = ours.answer(inputs(ours.case, 256, 0))
    y_TH = answer.y_TH.clone()
    y_TH[7, 3] = bad
    judged = ours.judge(answer._replace(y_TH=y_TH))
    assert not judged.passed and judged.worst_token == 7


@pytest.mark.parametrize("size", [0.1, 2.0, 4.0])
@pytest.mark.parametrize("tokens", [[5], range(24)])
def test_what_is_measured_and_judged_is_what_its_names_state(
    bench: Callable[[Case], Bench], size: float, tokens: Sequence[int]
) -> None:
    """By numpy. One token of 24 that is off by 4 e is beyond 3 e, all of them that are off by 2 e are beyond 1.5 e."""
    ours = bench(Case("bf16", torch.float32))
    answer, e = ours.answer(inputs(ours.case, 256, 0)), error_of(ours.first.decision)
    y_TH = answer.y_TH.clone()
    y_TH[list(tokens)] *= 1 + size * e
    y_TH[3, 7] -= 1e-3 * e
    judged = ours.judge(answer._replace(y_TH=y_TH))
    want = dense_layer(answer.x_TH, ours.first.config, ours.whole).y_TH.numpy()
    got, far = y_TH.double().numpy(), y_TH.double().numpy() - want
    relative_T = np.linalg.norm(far, axis=1) / np.linalg.norm(want, axis=1)
    found = [judged.error, judged.worst_token_error, judged.cosine, judged.max_abs, judged.limit]
    cosine = (got * want).sum() / np.linalg.norm(got) / np.linalg.norm(want)
    whole = np.linalg.norm(far) / np.linalg.norm(want)
    assert found == pytest.approx([whole, relative_T.max(), cosine, abs(far).max(), 1.5 * e])
    assert (judged.worst_token, judged.worst_token_limit) == (relative_T.argmax(), pytest.approx(3 * e))
    assert (judged.num_tokens, judged.routing_equal, judged.routing_ties) == (24, 24, 0)
    assert judged.passed == judged.as_dict()["passed"] == (size < 1 or (size < 3 and len(tokens) == 1))


def test_no_tokens_pass_and_say_so(bench: Callable[[Case], Bench]) -> None:
    ours = bench(Case("bf16"))
    judged = ours.judge(ours.answer(torch.empty(0, 256, dtype=torch.bfloat16)))
    assert judged.passed and judged.num_tokens == 0 and judged.worst_token == -1


def test_progress_counts_the_experts_that_are_hit(bench: Callable[[Case], Bench]) -> None:
    from moe_mk.lab.verify import verify

    ours, reported = bench(Case("bf16")), []
    answer = ours.answer(inputs(ours.case, 256, 0, num_tokens=1))
    verify(answer, ours.first.decision, ours.whole, lambda *what: reported.append(what))
    assert reported == [("verify", n, 4) for n in (1, 2, 3, 4)]
