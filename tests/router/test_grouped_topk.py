"""The public grouped top-k: what it chooses and weighs, as transformers does, for any tensor; what does not fit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.lab.plan.affinity import nodes_per_token
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.router import grouped_topk, topk
from moe_mk.router.topk import group_problems
from tests.support.draws import normal, seeded


def as_map(weights_TK: Tensor, ids_TK: Tensor) -> list[dict[int, float]]:
    pairs = zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)
    return [dict(zip(ids, weights, strict=True)) for ids, weights in pairs]


@pytest.mark.row(66, 70)
@pytest.mark.parametrize("bias_at", [-1.0, 0.0, 0.3])
def test_deepseek_v3_routing_equals_transformers(bias_at: float) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=64, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    router.weight.data = normal(256, 64, seed=1) / 8
    router.e_score_correction_bias.data = bias_at + normal(256, seed=2) / 20
    with torch.no_grad():
        logits, theirs_weights, theirs_ids = router(normal(2048, 64))
    weights, ids = grouped_topk(logits, 8, 8, 4, "sigmoid", router.e_score_correction_bias, True, 2.5)
    assert torch.equal(ids.sort(-1).values, theirs_ids.to(torch.int32).sort(-1).values)
    ours = torch.zeros(2048, 256).scatter_(1, ids.long(), weights)
    theirs = torch.zeros(2048, 256).scatter_(1, theirs_ids, theirs_weights)
    # On both sides half an ulp for each of 7 additions, the division and the scaling; the sigmoids differ by one ulp.
    assert ((ours - theirs).abs() <= (7 + 2 + 2) * 2**-23 * theirs).all()


@pytest.mark.row(20)
def test_weights_are_f32_and_ids_are_int32_best_first() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights, ids = grouped_topk(normal(5, 16).to(dtype), 3, 4, 2)
        assert (weights.dtype, ids.dtype, weights.shape, ids.shape) == (torch.float32, torch.int32, (5, 3), (5, 3))
        assert (weights.diff(dim=-1) <= 0).all()


@pytest.mark.row(67)
@pytest.mark.parametrize("shift", [-1.0, -16.0, 0.5, 8.0])
def test_a_constant_added_to_the_bias_changes_nothing(shift: float) -> None:
    # Every token has the same 32 well separated scores in another order, so a shift cannot create or hide a tie.
    order = torch.rand(512, 32, generator=seeded(3)).argsort(-1)
    logits = torch.linspace(-3.0, 2.1, 32, dtype=torch.float32)[order]
    bias = torch.zeros(32, dtype=torch.float32)
    plain_weights, plain_ids = grouped_topk(logits, 6, 8, 3, e_score_correction_bias=bias)
    weights, ids = grouped_topk(logits, 6, 8, 3, e_score_correction_bias=bias + shift)
    assert torch.equal(ids.sort(-1).values, plain_ids.sort(-1).values)
    for ours, theirs in zip(as_map(weights, ids), as_map(plain_weights, plain_ids), strict=True):
        assert ours == pytest.approx(theirs, rel=8 * 2**-24)


@pytest.mark.row(67)
def test_a_large_bias_forces_an_expert_that_still_weighs_its_raw_score() -> None:
    logits = normal(64, 32)
    bias = torch.zeros(32, dtype=torch.float32)
    bias[13] = 100.0
    weights, ids = grouped_topk(logits, 4, 8, 2, "sigmoid", bias, renormalize=False)
    assert (ids[:, 0] == 13).all()
    assert weights[:, 0].tolist() == pytest.approx(logits[:, 13].double().sigmoid().tolist(), rel=2**-22)


@pytest.mark.row(70)
def test_weights_that_are_not_renormalised_are_scores_times_the_factor() -> None:
    logits = normal(8, 16)
    for scoring, scores in (("sigmoid", logits.double().sigmoid().float()), ("softmax", logits.softmax(-1))):
        weights, ids = grouped_topk(logits, 3, 4, 2, scoring, None, False, 2.5)
        torch.testing.assert_close(weights, scores.gather(1, ids.long()) * 2.5, rtol=2**-21, atol=0)


def test_scores_that_have_all_underflowed_give_zero_weights() -> None:
    weights, ids = grouped_topk(torch.full((1, 8), -1e4, dtype=torch.float32), 2, 4, 2, renormalize=True)
    assert (weights.tolist(), ids.tolist()) == ([[0.0, 0.0]], [[0, 1]])


def test_one_group_equals_plain_topk_bit_for_bit() -> None:
    logits, bias = normal(64, 16), normal(16, seed=5)
    for scoring in ("sigmoid", "softmax"):
        for one in (None, bias):
            grouped = grouped_topk(logits, 4, 1, 1, scoring, one, True, 2.5)
            for ours, theirs in zip(grouped, topk(logits, 4, scoring, True, 2.5, one), strict=True):
                assert torch.equal(ours, theirs)


ODD = st.sampled_from([math.nan, math.inf, -math.inf])


@settings(max_examples=80, deadline=None)
@given(
    of_logits=st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 15)), ODD, max_size=3),
    of_bias=st.dictionaries(st.integers(0, 15), ODD, max_size=2),
    scoring=st.sampled_from(["sigmoid", "softmax", "sqrtsoftplus"]),
    grouped=st.booleans(),
)
def test_whatever_is_not_finite_drops_what_cannot_be_decided_and_nothing_else(
    of_logits: dict[tuple[int, int], float], of_bias: dict[int, float], scoring: str, grouped: bool
) -> None:
    logits, bias, groups = normal(5, 16), normal(16, seed=1), (4, 2) if grouped else (1, 1)
    for (token, expert), value in of_logits.items():
        logits[token, expert] = value
    for expert, value in of_bias.items():
        bias[expert] = value
    wide = logits.double()
    score = {"sigmoid": torch.sigmoid(wide), "softmax": wide.softmax(1), "sqrtsoftplus": softplus(wide).sqrt()}[scoring]
    biased = score + bias
    undecided = biased.isnan().any(1)
    weights, ids = grouped_topk(logits, 3, *groups, scoring, bias, False, 2.0)
    for token in range(5):
        chosen = [each for each in ids[token].tolist() if each >= 0]
        if undecided[token]:
            assert not chosen and not weights[token].any()
            continue
        assert chosen and all(biased[token, each] > -math.inf for each in chosen)
        wanted = [2.0 * float(score[token, each]) if each >= 0 else 0.0 for each in ids[token].tolist()]
        assert weights[token].tolist() == pytest.approx(wanted, rel=1e-6)


def test_infinite_logits_are_scores_where_the_function_has_a_limit() -> None:
    logits = torch.tensor([[torch.inf, 0.0, -torch.inf, -1.0]])
    weights, ids = grouped_topk(logits, 4, 1, 1, "sigmoid", renormalize=False)
    assert ids.tolist() == [[0, 1, 3, 2]]
    assert weights.tolist()[0] == pytest.approx([1.0, 0.5, 1 / (1 + math.e), 0.0])
    assert grouped_topk(logits, 4, 1, 1, "softmax")[1].tolist() == [[-1] * 4]


def test_bf16_scores_are_rounded_as_in_the_model_dtype() -> None:
    logits = normal(64, 32).bfloat16()
    for scoring, scores in (("sigmoid", logits.sigmoid()), ("sqrtsoftplus", softplus(logits.float()).sqrt())):
        weights, ids = grouped_topk(logits, 4, 1, 1, scoring, None, False, score_dtype=torch.bfloat16)
        assert torch.equal(weights, scores.bfloat16().float().gather(1, ids.long()))
    exact, _ = grouped_topk(logits, 4, 1, 1, scoring, None, False)
    assert not torch.equal(weights, exact)


@settings(max_examples=60, deadline=None)
@given(
    num_groups=st.sampled_from([1, 2, 4, 8]),
    per_group=st.integers(1, 5),
    kept=st.integers(1, 8),
    top_k=st.integers(1, 8),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_ids_are_distinct_within_the_kept_groups_and_tokens_do_not_interact(
    num_groups: int, per_group: int, kept: int, top_k: int, scoring: str, biased: bool, seed: int
) -> None:
    kept = min(kept, num_groups)
    top_k = min(top_k, kept * per_group)
    num_experts = num_groups * per_group
    logits = torch.randint(-6, 7, (9, num_experts), generator=seeded(seed)).float() / 2
    bias = normal(num_experts, seed=seed) - 1 if biased else None
    weights, ids = grouped_topk(logits, top_k, num_groups, kept, scoring, bias, True, 2.5)
    for token in ids.tolist():
        assert len(set(token)) == top_k and min(token) >= 0 and max(token) < num_experts
        assert len({e // per_group for e in token}) <= kept
    assert weights.sum(-1).tolist() == pytest.approx([2.5] * 9, rel=1e-6)
    again = grouped_topk(logits.flip(0), top_k, num_groups, kept, scoring, bias, True, 2.5)
    assert torch.equal(again[1].flip(0), ids)


@pytest.mark.row(40)
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(0, 300), st.floats(0, 30))
def test_tokens_visit_no_more_nodes_than_groups_are_kept(seed: int, kept: int, tokens: int, slope: float) -> None:
    # Sixty-four experts in eight groups, a group a node; tokens lean more or less to experts of high number.
    logits = normal(tokens, 64, seed=seed) + slope * torch.linspace(0, 1, 64)
    bias = normal(64, seed=seed + 1) / 4
    _, ids = grouped_topk(logits, 8, 8, kept, "sigmoid", bias)
    node_of_rank = ExpertMap.linear(64, 16).tables(torch.device("cpu")).rank_of_P // 2
    node_E = node_of_rank.numpy().astype(np.int64)
    visited = nodes_per_token(ids.numpy().astype(np.int64), node_E)
    assert visited <= kept
    if tokens and kept == 1:
        assert visited == 1.0
    _, free = grouped_topk(logits, 8, 1, 1, "sigmoid", bias)
    if tokens > 100 and slope == 0 and kept <= 2:
        assert nodes_per_token(free.numpy().astype(np.int64), node_E) > kept


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_a_token_is_routed_alike_alone_and_in_any_batch(scoring: str) -> None:
    logits, bias = normal(75, 42), normal(42, seed=5) / 9
    weights, ids = grouped_topk(logits, 5, 6, 3, scoring, bias, True, 2.5)
    for t in range(75):
        alone_weights, alone_ids = grouped_topk(logits[t : t + 1], 5, 6, 3, scoring, bias, True, 2.5)
        assert torch.equal(alone_ids[0], ids[t]) and torch.equal(alone_weights[0], weights[t])


def test_strided_logits_route_like_their_copy_and_nothing_is_mutated() -> None:
    wide, bias = normal(32, 64), normal(32, seed=5)
    logits, before = wide.T[::2, :].T[:, :32].T, wide.clone()
    assert logits.shape == (32, 32) and not logits.is_contiguous()
    for scoring in ("sigmoid", "softmax"):
        ours, theirs = (grouped_topk(x, 6, 8, 3, scoring, bias) for x in (logits, logits.contiguous()))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert torch.equal(wide, before) and torch.equal(bias, normal(32, seed=5))


def test_host_defaults_for_dtype_and_device_change_nothing() -> None:
    logits, bias = normal(32, 32), normal(32, seed=5)
    expected = grouped_topk(logits, 6, 8, 3, "sigmoid", bias, True, 2.5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            ours = grouped_topk(logits, 6, 8, 3, "sigmoid", bias, True, 2.5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


def test_meta_logits_give_a_meta_routing() -> None:
    weights, ids = grouped_topk(torch.empty(7, 32, dtype=torch.float32, device="meta"), 6, 8, 3)
    assert (weights.device.type, weights.shape, ids.shape) == ("meta", (7, 6), (7, 6))


def test_a_compiler_traces_it_whole_for_any_number_of_tokens() -> None:
    compiled = torch.compile(grouped_topk, fullgraph=True, backend="eager", dynamic=True)
    bias = normal(32, seed=5)
    for num_tokens in (3, 8):
        logits = normal(num_tokens, 32)
        ours, theirs = (f(logits, 6, 8, 3, "sigmoid", bias, True, 2.5) for f in (compiled, grouped_topk))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_gradients_reach_the_logits_of_chosen_experts_only() -> None:
    logits = normal(8, 16).requires_grad_()
    weights, ids = grouped_topk(logits, 3, 4, 2, "sigmoid", normal(16, seed=5), renormalize=False)
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    chosen = torch.zeros(8, 16, dtype=torch.bool).scatter_(1, ids.long(), True)
    assert torch.equal(gradient != 0, chosen)


def test_problems_at_the_edges() -> None:
    assert group_problems(12, 12, 4, 4) == group_problems(12, 6, 4, 2) == group_problems(12, 1, 12, 1) == []
    for top_k, both in ((12, False), (13, True), (1, False), (0, True)):  # 8 groups do not divide 12 experts
        assert len(group_problems(12, top_k, 8, 4)) == 1 + both
    for sizes in ((12, 7, 4, 2), (12, 1, 4, 5), (12, 1, 4, 0), (12, 1, 13, 1)):
        assert len(group_problems(*sizes)) == 1 + (sizes == (12, 1, 4, 0)), sizes


def test_numbers_that_do_not_fit_are_named_with_the_way_out() -> None:
    logits = normal(2, 12)
    with pytest.raises(ConfigError, match=r"num_expert_group=8 does not divide E=12 experts; use num_expert_group=6"):
        grouped_topk(logits, 2, 8, 4)
    with pytest.raises(ConfigError, match=r"topk_group=5 of num_expert_group=4 groups.*use topk_group in \[1, 4\]"):
        grouped_topk(logits, 2, 4, 5)
    with pytest.raises(
        ConfigError, match=r"top_k=8 .*topk_group=2 groups of 3 experts = 6 selectable.*topk_group >= 3"
    ):
        grouped_topk(logits, 8, 4, 2)
    with pytest.raises(ConfigError, match=r"top_k=12 .* = 6 selectable; .* or topk_group >= 4$"):
        grouped_topk(logits, 12, 4, 2)
    with pytest.raises(ConfigError, match=r"top_k=13 .*use top_k in \[1, 6\]$"):
        grouped_topk(logits, 13, 4, 2)
    with pytest.raises(ConfigError, match=r"top_k=0 "):
        grouped_topk(logits, 0, 4, 2)
    with pytest.raises(ConfigError, match=r"num_expert_group=0 does not divide"):
        grouped_topk(logits, 2, 0, 1)
    with pytest.raises(ConfigError, match=r"top_k=1 .*E=0"):
        grouped_topk(torch.empty(2, 0, dtype=torch.float32), 1, 1, 1)


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'sigmoid'.*routed_scaling_factor=nan.*does not divide E=12"):
        grouped_topk(normal(2, 12), 2, 8, 4, "sigmod", routed_scaling_factor=math.nan)


def test_wrong_tensors_are_named() -> None:
    with pytest.raises(ShapeError, match=r"router_logits has 1 dimensions"):
        grouped_topk(normal(8), 2, 4, 2)
    with pytest.raises(ShapeError, match=r"router_logits has dtype torch.int64"):
        grouped_topk(torch.zeros(2, 8, dtype=torch.int64), 2, 4, 2)
    with pytest.raises(ShapeError, match=r"e_score_correction_bias has E=7 \(axis 0\), expected E=8"):
        grouped_topk(normal(2, 8), 2, 4, 2, e_score_correction_bias=normal(7))
    with pytest.raises(ShapeError, match=r"e_score_correction_bias has dtype torch.int32"):
        grouped_topk(normal(2, 8), 2, 4, 2, e_score_correction_bias=torch.zeros(8, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"e_score_correction_bias is on meta"):
        grouped_topk(normal(2, 8), 2, 4, 2, e_score_correction_bias=torch.empty(8, dtype=torch.float32, device="meta"))
