"""Plain top-k routing against loops, and its edges."""

import math

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.kernels.native.selfcheck import reasons_against
from moe_mk.kernels.reference.topk import BY_LOGIT
from moe_mk.router import Router, gate_logits, topk
from moe_mk.router.router import Simulation
from moe_mk.router.topk import IDS
from tests.layer.native import route_natively
from tests.support.draws import normal

# Softplus of these logits is 1, 4 and 1/4, so their roots are 1, 2 and 1/2.
ROOTS_1_2_HALF = [math.log(math.e - 1), math.log(math.exp(4) - 1), math.log(math.exp(0.25) - 1)]


def test_deepseek_v4_routing_by_hand() -> None:
    logits = torch.tensor([ROOTS_1_2_HALF])
    weights, ids = topk(logits, 2, "sqrtsoftplus", routed_scaling_factor=1.5)
    assert ids.tolist() == [[1, 0]] and weights.tolist()[0] == pytest.approx([1.5 * 2 / 3, 1.5 * 1 / 3])
    # A bias of 2 makes the least expert the best (2.5), which weighs as it scored.
    bias = torch.tensor([0.0, 0.0, 2.0])
    weights, ids = topk(logits, 2, "sqrtsoftplus", False, 1.0, bias)
    assert ids.tolist() == [[2, 1]] and weights.tolist()[0] == pytest.approx([0.5, 2.0])


def test_sqrtsoftplus_has_no_edges() -> None:
    # Large logits are their own softplus; below -88 the score is 0, and so is its gradient; a NaN goes nowhere.
    logits = torch.tensor([[1e30, 400.0, -1e30, -200.0, 0.0]], requires_grad=True)
    weights, ids = topk(logits, 5, "sqrtsoftplus", renormalize=False)
    assert ids.tolist() == [[0, 1, 4, 2, 3]]
    expected = [1e15, 20.0, math.sqrt(math.log(2)), 0.0, 0.0]
    assert weights.tolist()[0] == pytest.approx(expected, rel=1e-6)
    weights.sum().backward()
    # d sqrt(ln 2) = sigmoid(0) / (2 sqrt(ln 2))
    expected = [0.5e-15, 0.025, 0.0, 0.0, 0.25 / math.sqrt(math.log(2))]
    assert logits.grad is not None and logits.grad.tolist()[0] == pytest.approx(expected, rel=1e-5)
    _, ids = topk(torch.tensor([[math.nan, 1.0]]), 1, "sqrtsoftplus")
    assert ids.tolist() == [[-1]]


def test_equal_logits_tie_wherever_they_stand() -> None:
    # 1031 is odd and longer than any vector: body and tail of the operator must give the same bits.
    for value in (-30.7, -1.234567, 0.1, 3.3, 40.5):
        scores, ids = topk(torch.full((3, 1031), value), 1031, "sqrtsoftplus", renormalize=False)
        assert len(set(scores.flatten().tolist())) == 1 and ids[0].tolist() == list(range(1031))


def test_a_masked_softmax_and_logits_that_choose_by_hand() -> None:
    # e1 is within 2 % of e0, e2 is within 2 % of e1 alone: e0 weighs against e1, e1 against e2, e2 against none.
    logits = torch.tensor([[10.0, 9.9, 9.75, -1.0]])
    weights, ids = topk(logits, 4, "masked_softmax", renormalize=False)
    near = [1 / (1 + math.exp(-0.1)), 1 / (1 + math.exp(-0.15)), 1.0, 1.0]
    assert ids.tolist() == [[0, 1, 2, 3]] and weights.tolist()[0] == pytest.approx(near)
    # A bias of 11 puts e3 first by its logit, which sigmoid alone would not; it weighs as it scored.
    bias = torch.tensor([0.0, 0.0, 0.0, 11.5])
    for scoring, least in (
        ("logit_sigmoid", 1 / (1 + math.e)),
        ("logit_softmax", float(logits.double().softmax(1)[0, 3])),
    ):
        weights, ids = topk(logits, 2, scoring, False, 1.0, bias, score_dtype=torch.bfloat16)
        assert ids.tolist() == [[3, 0]] and float(weights[0, 0]) == pytest.approx(least)
    for scoring in BY_LOGIT:  # ties go to the lowest id; what has no order goes nowhere, and -inf is not chosen
        _, ids = topk(torch.tensor([[0.0, 0.0, -math.inf], [math.inf, 1, 2], [math.nan, 1, 2]]), 3, scoring)
        assert ids.tolist() == [[0, 1, -1], [-1] * 3, [-1] * 3]


@pytest.mark.parametrize("scoring, family, name", [
    ("sqrtsoftplus", "deepseek_v4", "DeepseekV4"), ("logit_sigmoid", "kolibri1", "Kolibri1"),
    ("masked_softmax", "phimoe", "Phimoe")])  # fmt: skip
def test_routing_is_that_of_transformers(scoring: str, family: str, name: str) -> None:
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}", reason="needs transformers")
    config = getattr(modeling, f"{name}Config")(hidden_size=32, num_local_experts=24, num_experts_per_tok=2)
    theirs = getattr(modeling, f"{name}TopKRouter")(config).eval()
    x, theirs.weight.data = normal(300, 32), normal(24, 32, seed=1) / 4
    bias = theirs.e_score_correction_bias = normal(24, seed=2) / 2
    with torch.no_grad():
        logits, their_weights, their_ids = theirs(x)
    stated = getattr(config, "norm_topk_prob", False), getattr(config, "routed_scaling_factor", 1.0)
    weights, ids = topk(logits, 2, scoring, *stated, None if name == "Phimoe" else bias)
    for mine, my_weights, other, other_weights in zip(ids.long(), weights, their_ids, their_weights, strict=True):
        assert sorted(mine.tolist()) == sorted(other.tolist())
        torch.testing.assert_close(my_weights[mine.argsort()], other_weights[other.argsort()], rtol=1e-5, atol=1e-6)


@pytest.mark.row(7)
def test_gate_softmax_topk_and_weighted_sum_equal_loops() -> None:
    num_tokens, hidden, num_experts, top_k = 200, 24, 16, 4
    x, gate = normal(num_tokens, hidden), normal(num_experts, hidden, seed=1) / 4
    experts = normal(num_experts, hidden, hidden, seed=2) / 4
    weights, ids = topk(gate_logits(x, gate), top_k, "softmax")
    y = (weights[..., None] * torch.einsum("tkoh,th->tko", experts[ids.long()], x)).sum(1)

    for t in range(num_tokens):
        token = x[t].double()
        exps = [math.exp(float(gate[e].double() @ token)) for e in range(num_experts)]
        chosen = sorted(range(num_experts), key=lambda e: (-exps[e], e))[:top_k]
        assert set(ids[t].tolist()) == set(chosen)
        total = sum(exps[e] for e in chosen)
        expected = {e: exps[e] / total for e in chosen}
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            assert weight == pytest.approx(expected[e], rel=2**-18)  # logits of size 4 carry 24 f32 roundings
        dense = sum((w * (experts[e].double() @ token) for e, w in expected.items()), torch.zeros(hidden).double())
        torch.testing.assert_close(y[t].double(), dense, rtol=1e-5, atol=1e-5)


@pytest.mark.row(7)
@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_of_given_logits_are_within_an_ulp_of_f64_loops(renormalize: bool) -> None:
    logits = torch.randint(-12, 13, (2000, 32), generator=torch.Generator().manual_seed(4)).float() / 3
    weights, ids = topk(logits, 4, "softmax", renormalize)
    scores = logits.softmax(-1)
    for t, (token, row) in enumerate(zip(scores.tolist(), logits.tolist(), strict=True)):
        chosen = sorted(range(32), key=lambda e: (-token[e], e))[:4]
        assert ids[t].tolist() == chosen
        exps = [math.exp(value) for value in row]
        total = sum(exps[e] for e in chosen) if renormalize else sum(exps)
        assert weights[t].tolist() == pytest.approx([exps[e] / total for e in chosen], rel=2**-24 * 1.001, abs=0)


@pytest.mark.row(7)
@pytest.mark.parametrize("native", [False, True], ids=["reference", "cpu_native"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_weights_are_within_one_ulp_of_f64(scoring_func: str, renormalize: bool, native: bool) -> None:
    for scale in (1.0, 4.0, 30.0):
        logits = normal(4000, 256) * scale
        if native:
            logits, ids, weights = routed_natively(logits, scoring_func, renormalize)
        else:
            weights, ids = topk(logits, 8, scoring_func, renormalize)
        exact = logits.double().softmax(-1) if scoring_func == "softmax" else logits.double().sigmoid()
        expected = exact.gather(1, ids.long())
        expected = expected / expected.sum(1, keepdim=True) if renormalize else expected
        unit = torch.nextafter(expected.float(), torch.tensor(torch.inf)) - expected.float()
        assert float(((weights.double() - expected).abs() / unit).max()) <= 1


def routed_natively(logits: Tensor, scoring_func: str, renormalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, ids, weights) of the native router: bf16 rows through a gate that is the identity."""
    if reasons := reasons_against():
        pytest.skip(f"the native kernels cannot be compiled here: {'; '.join(map(str, reasons))}")
    x = logits.bfloat16()
    router = Router(8, scoring_func=scoring_func, renormalize=renormalize)
    routing, found = route_natively(x, torch.eye(logits.shape[1]), None, router)
    assert torch.equal(found, x.float())
    return found, routing.ids_TK, routing.weights_TK


@pytest.mark.row(20)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("simulate", [None, "random"])
def test_ids_come_in_the_dtype_that_is_asked_for(groups: int, simulate: Simulation | None) -> None:
    logits = normal(9, 16)
    logits[3, 0] = torch.nan
    made = [Router(3, groups, groups, simulate=simulate, ids_dtype=dtype)(logits) for dtype in IDS]
    assert [routing.ids_TK.dtype for routing in made] == list(IDS)
    assert torch.equal(made[0].ids_TK, made[1].ids_TK.int()) and torch.equal(made[0].weights_TK, made[1].weights_TK)
    assert made[1].weights_TK.dtype == torch.float32 and made[1].weights_TK.shape == made[1].ids_TK.shape == (9, 3)
    assert simulate is not None or made[1].ids_TK[3].tolist() == [-1, -1, -1]
    with pytest.raises(ConfigError, match=r"ids_dtype=torch\.int16 is not one of torch\.int32, torch\.int64"):
        Router(3, ids_dtype=torch.int16)


def test_one_expert_no_tokens_and_nan() -> None:
    weights, ids = topk(normal(3, 1), 1, routed_scaling_factor=2.0)
    assert (ids.tolist(), weights.tolist()) == ([[0]] * 3, [[2.0]] * 3)
    assert topk(torch.empty(0, 4, dtype=torch.float32), 2)[1].shape == (0, 2)
    weights, ids = topk(torch.tensor([[torch.nan, 1.0, 2.0]]), 2, "sigmoid")
    assert (ids.tolist(), weights.tolist()) == ([[-1, -1]], [[0.0, 0.0]])


def test_errors_name_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"top_k=5 experts cannot be chosen among E=4; use top_k in \[1, 4\]"):
        topk(normal(2, 4), 5)
    with pytest.raises(ConfigError, match=r"scoring_func='softmx' is unknown; did you mean 'softmax'.*top_k=0"):
        topk(normal(2, 4), 0, "softmx")
    with pytest.raises(ConfigError, match=r"score_dtype=torch.int8"):
        topk(normal(2, 4), 1, score_dtype=torch.int8)
