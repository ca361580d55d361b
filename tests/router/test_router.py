"""The router of one layer as a value: settings in, routing out."""

import pickle

import pytest
import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.router import Router, grouped_topk, topk
from tests.support.draws import normal

DEEPSEEK = Router(4, 8, 3, "sigmoid", True, 2.5)


@pytest.mark.row(20)
def test_a_routing_carries_int32_ids_and_f32_weights_of_the_grouped_choice() -> None:
    logits, bias = normal(32, 32), normal(32, seed=1)
    routing = DEEPSEEK(logits, bias)
    weights, ids = grouped_topk(logits, 4, 8, 3, "sigmoid", bias, True, 2.5)
    assert torch.equal(routing.ids_TK, ids) and torch.equal(routing.weights_TK, weights)
    assert (routing.ids_TK.dtype, routing.weights_TK.dtype) == (torch.int32, torch.float32)
    assert routing.num_tokens == 32 and not routing.losses


def test_one_group_is_plain_topk() -> None:
    logits = normal(32, 32)
    for scoring in ("softmax", "sigmoid"):
        routing = Router(4, scoring_func=scoring, renormalize=False, routed_scaling_factor=2.0)(logits)
        weights, ids = topk(logits, 4, scoring, False, 2.0)
        assert torch.equal(routing.ids_TK, ids) and torch.equal(routing.weights_TK, weights)


def test_model_router_dtype_rounds_scores_to_the_dtype_of_the_logits() -> None:
    logits = normal(64, 32).bfloat16()
    exact = Router(4, scoring_func="sigmoid", renormalize=False)(logits)
    model = Router(4, scoring_func="sigmoid", renormalize=False, router_dtype="model")(logits)
    assert torch.equal(model.weights_TK, model.weights_TK.bfloat16().float())
    assert not torch.equal(exact.weights_TK, exact.weights_TK.bfloat16().float())


def test_a_router_is_a_value() -> None:
    assert pickle.loads(pickle.dumps(DEEPSEEK)) == DEEPSEEK
    assert hash(DEEPSEEK) == hash(Router(4, 8, 3, "sigmoid", True, 2.5))


@pytest.mark.parametrize("num_tokens, num_experts", [(64, 32), (7, 32), (1, 8), (0, 8)])
def test_balanced_simulation_loads_every_expert_alike(num_tokens: int, num_experts: int) -> None:
    router = Router(4, 8, 4, "sigmoid", True, 2.5, simulate="balanced")
    routing = router(normal(num_tokens, num_experts))
    load = torch.bincount(routing.ids_TK.long().flatten(), minlength=num_experts)
    assert load.max() - load.min() <= 1
    assert all(len(set(token)) == 4 for token in routing.ids_TK.tolist())
    assert routing.weights_TK.sum(-1).tolist() == pytest.approx([2.5] * num_tokens)
    assert torch.equal(routing.ids_TK, router(normal(num_tokens, num_experts, seed=9)).ids_TK)


def test_random_simulation_repeats_its_draw_and_leaves_the_global_generator_alone() -> None:
    router = Router(4, simulate="random")
    before = torch.random.get_rng_state()
    one, two = router(normal(256, 32)), router(normal(256, 32, seed=9))
    assert torch.equal(torch.random.get_rng_state()[:64], before[:64])
    assert torch.equal(one.ids_TK, two.ids_TK)
    assert all(len(set(token)) == 4 for token in one.ids_TK.tolist())
    load = torch.bincount(one.ids_TK.long().flatten(), minlength=32)
    assert load.min() > 0 and load.max() < 64


def test_settings_that_cannot_work_are_refused_at_once_and_together() -> None:
    with pytest.raises(
        ConfigError, match=r"scoring_func='tanh'.*top_k=0 is below 1.*topk_group=9 is not in \[1, num_expert_group=8\]"
    ):
        Router(0, 8, 9, "tanh")
    with pytest.raises(ConfigError, match=r"router_dtype='bf16' is unknown"):
        Router(4, router_dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"simulate='balancd' is unknown; did you mean 'balanced'"):
        Router(4, simulate="balancd")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"num_expert_group=8 does not divide E=30 experts"):
        DEEPSEEK(normal(2, 30))
    with pytest.raises(ConfigError, match=r"num_expert_group=8 does not divide E=30 experts"):
        Router(4, 8, 3, simulate="random")(normal(2, 30))
    with pytest.raises(ShapeError, match=r"e_score_correction_bias"):
        DEEPSEEK(normal(2, 32), normal(31))
