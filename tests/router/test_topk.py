"""Plain top-k routing against loops, and its edges."""

import math

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.router import gate_logits, grouped_topk, topk


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def test_mixtral_routing_by_hand() -> None:
    # logits 0, ln 2, ln 5  ->  softmax 1/8, 2/8, 5/8  ->  top-2: e2, e1  ->  renormalised 5/7, 2/7
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]])
    weights, ids = topk(logits, 2)
    assert ids.tolist() == [[2, 1]] and weights.tolist()[0] == pytest.approx([5 / 7, 2 / 7])
    weights, _ = topk(logits, 2, renormalize=False)
    assert weights.tolist()[0] == pytest.approx([5 / 8, 2 / 8])
    weights, _ = topk(logits, 2, "sigmoid", renormalize=False, routed_scaling_factor=3.0)
    assert weights.tolist()[0] == pytest.approx([3 * 5 / 6, 3 * 2 / 3])


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
def test_weights_of_given_logits_are_within_an_ulp_or_two_of_f32_loops(renormalize: bool) -> None:
    logits = torch.randint(-12, 13, (2000, 32), generator=torch.Generator().manual_seed(4)).float() / 3
    weights, ids = topk(logits, 4, "softmax", renormalize)
    scores = logits.softmax(-1)
    for t, token in enumerate(scores.tolist()):
        chosen = sorted(range(32), key=lambda e: (-token[e], e))[:4]
        assert ids[t].tolist() == chosen
        total = sum(token[e] for e in chosen) if renormalize else 1.0
        # Three additions and a division, half an ulp each; without them nothing is rounded.
        limit = 4 * 2**-24 if renormalize else 0.0
        assert weights[t].tolist() == pytest.approx([token[e] / total for e in chosen], rel=limit, abs=0)


def test_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = normal(64, 16), torch.zeros(16, dtype=torch.float32)
    bias[3] = 10.0
    weights, ids = topk(logits, 2, "softmax", False, 1.0, bias)
    assert (ids[:, 0] == 3).all() and torch.equal(weights[:, 0], logits.softmax(-1)[:, 3])


def test_equal_logits_choose_the_lowest_ids_and_all_experts_can_be_chosen() -> None:
    weights, ids = topk(torch.zeros(2, 6, dtype=torch.bfloat16), 6)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert weights.tolist() == [pytest.approx([1 / 6] * 6)] * 2


def test_one_expert_no_tokens_and_nan() -> None:
    weights, ids = topk(normal(3, 1), 1, routed_scaling_factor=2.0)
    assert (ids.tolist(), weights.tolist()) == ([[0]] * 3, [[2.0]] * 3)
    assert topk(torch.empty(0, 4, dtype=torch.float32), 2)[1].shape == (0, 2)
    weights, ids = topk(torch.tensor([[torch.nan, 1.0, 2.0]]), 2, "sigmoid")
    assert (ids.tolist(), weights.tolist()) == ([[-1, -1]], [[0.0, 0.0]])


def test_equals_grouped_routing_that_keeps_every_group() -> None:
    logits, bias = normal(64, 24), normal(24, seed=3)
    for ours, theirs in zip(
        topk(logits, 5, "sigmoid", True, 2.5, bias),
        grouped_topk(logits, 5, 6, 6, "sigmoid", bias, True, 2.5),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_errors_name_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"top_k=5 experts cannot be chosen among E=4; use top_k in \[1, 4\]"):
        topk(normal(2, 4), 5)
    with pytest.raises(ConfigError, match=r"scoring_func='softmx' is unknown; did you mean 'softmax'.*top_k=0"):
        topk(normal(2, 4), 0, "softmx")
    with pytest.raises(ConfigError, match=r"score_dtype=torch.int8"):
        topk(normal(2, 4), 1, score_dtype=torch.int8)
    with pytest.raises(ShapeError, match=r"E=3 \(axis 0\), expected E=4"):
        topk(normal(2, 4), 1, e_score_correction_bias=normal(3))
