"""The reference kernel against a case worked by hand and against plain-Python loops."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_mk.kernels.reference.topk import best, expert_scores, grouped_topk, mask_other_groups, sigmoid


def route_by_loops(
    scores: list[float], bias: list[float] | None, top_k: int, groups: int, kept: int, renormalize: bool, scale: float
) -> dict[int, float]:
    """One token, plain Python, f32 roundings where they decide: expert -> weight. Lowest index first on ties."""
    biased = scores if bias is None else [float(np.float32(s + b)) for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    group_scores = []
    for g in range(groups):
        members = sorted(biased[g * size : (g + 1) * size], reverse=True)
        group_scores.append(members[0] if bias is None or size == 1 else float(np.float32(members[0] + members[1])))
    winners = sorted(range(groups), key=lambda g: (-group_scores[g], g))[:kept]
    candidates = [e for g in winners for e in range(g * size, (g + 1) * size)]
    chosen = sorted(candidates, key=lambda e: (-biased[e], e))[:top_k]
    total = sum(scores[e] for e in chosen) if renormalize else 1.0
    return {e: scores[e] / total * scale for e in chosen}


def assert_equals_loops(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, groups: int, kept: int, scoring: str
) -> None:
    weights_TK, ids_TK = grouped_topk(logits_TE, top_k, groups, kept, scoring, bias_E, True, 2.5, torch.float32)
    scores = expert_scores(logits_TE, scoring, torch.float32).tolist()
    bias = None if bias_E is None else bias_E.tolist()
    for t, token in enumerate(scores):
        expected = route_by_loops(token, bias, top_k, groups, kept, True, 2.5)
        assert ids_TK[t].tolist() == list(expected), f"token {t}"
        # f32: one rounding a score in the sum of K, one for the division, one for the scaling.
        limit = (top_k + 2) * 2**-24
        for ours, theirs in zip(weights_TK[t].tolist(), expected.values(), strict=True):
            assert ours == pytest.approx(theirs, rel=limit, abs=0)


def test_scores_weigh_and_biased_scores_choose_by_hand() -> None:
    # Scores (sigmoid): e0 .5, e1 .5 | e2 .9, e3 .1 | e4 .6, e5 .6     groups of two, one group kept, top-1
    # no bias:   group maxima  .5 | .9 | .6   -> group 1, expert 2, weight .9
    # bias 0:    top-2 sums   1.0 | 1.0 | 1.2 -> group 2, tie of 4 and 5 -> expert 4, weight .6
    # bias e3 +1: sums        1.0 | 2.0 | 1.2 -> group 1, biased 1.1 > .9 -> expert 3, weight .1
    scores = torch.tensor([[0.5, 0.5, 0.9, 0.1, 0.6, 0.6]], dtype=torch.float32)
    logits = (scores / (1 - scores)).log()

    def route(bias: Tensor | None) -> tuple[int, float]:
        weights, ids = grouped_topk(logits, 1, 3, 1, "sigmoid", bias, False, 1.0, torch.float32)
        return int(ids), round(float(weights), 6)

    assert route(None) == (2, 0.9)
    assert route(torch.zeros(6, dtype=torch.float32)) == (4, 0.6)
    assert route(torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.float32)) == (3, 0.1)


def test_best_answers_equal_values_in_order_of_index() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -0.0, 0.0, -0.0, -1.0]])
    assert best(values, 4).tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    nothing = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert best(nothing, 3).tolist() == [[1, 0, 2]]


def test_sigmoid_is_accurate_to_its_ends() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 20.0, -80.0, -88.0, -1e4, 1e4, torch.inf, -torch.inf])
    expected = [1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in x.tolist()]
    assert sigmoid(x).tolist() == pytest.approx(expected, rel=2**-22, abs=0)
    assert sigmoid(torch.tensor([torch.nan])).isnan().all()


def test_sigmoid_has_finite_gradients_that_are_right_at_zero() -> None:
    x = torch.tensor([0.0, 2.0, -2.0, -90.0, -torch.inf, torch.inf], requires_grad=True)
    (slopes,) = torch.autograd.grad(sigmoid(x).sum(), x)
    slope = math.exp(-2) / (1 + math.exp(-2)) ** 2
    assert slopes.tolist() == pytest.approx([0.25, slope, slope, 0.0, 0.0, 0.0])


def test_equal_logits_have_equal_scores_wherever_they_stand() -> None:
    # Odd lengths, so that every vector width has a tail, and strides; torch.sigmoid fails this.
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    whole = sigmoid(values)
    for length in range(1, 200):
        assert torch.equal(sigmoid(values[:length]), whole[:length])
        assert torch.equal(sigmoid(values[length : 2 * length]), whole[length : 2 * length])
    assert torch.equal(sigmoid(values[::3]), whole[::3])
    for num_experts in (7, 10, 13, 33, 257):
        tied = values[:100, None].repeat(1, num_experts)
        for scoring in ("sigmoid", "softmax"):
            scores = expert_scores(tied, scoring, torch.float32)
            assert torch.equal(scores, scores[:, :1].expand_as(scores))


def test_masked_groups_are_minus_infinity() -> None:
    biased = torch.tensor([[-3.0, -4.0, -1.0, -9.0]])
    assert mask_other_groups(biased, 2, 1, 2).tolist() == [[-3.0, -4.0, -torch.inf, -torch.inf]]
    assert mask_other_groups(biased, 2, 1, 1).tolist() == [[-torch.inf, -torch.inf, -1.0, -9.0]]


@pytest.mark.slow
@pytest.mark.row(66)
def test_ten_thousand_tokens_with_ties_equal_plain_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    # 21 different logits for 64 experts: most tokens tie somewhere, in experts and in group sums.
    logits = torch.randint(-10, 11, (10_000, 64), generator=generator).float() / 4
    bias = torch.randint(-8, 3, (64,), generator=generator).float() / 4
    top = (expert_scores(logits, "sigmoid", torch.float32) + bias).topk(7, -1).values
    assert (top[:, 5] == top[:, 6]).float().mean() > 0.1, "the data holds too few ties to prove anything"
    assert_equals_loops(logits, bias, 6, 8, 4, "sigmoid")


@pytest.mark.row(66)
def test_softmax_without_bias_ranks_groups_by_their_maximum() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-10, 11, (2_000, 64), generator=generator).float() / 4
    assert_equals_loops(logits, None, 6, 8, 3, "softmax")
    assert_equals_loops(logits, None, 6, 8, 3, "sigmoid")


@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 4), (16, 16), (16, 5), (2, 1)])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("biased", [True, False])
def test_degenerate_groups_keep_scoring_and_scaling(groups: int, kept: int, scoring: str, biased: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(64, 16, generator=generator)
    bias = torch.randn(16, generator=generator) if biased else None
    assert_equals_loops(logits, bias, 5, groups, kept, scoring)
