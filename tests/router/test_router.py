"""The router of one layer as a value, by scores and by token id: settings in, routing out."""

import math
import pickle

import pytest
import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.router import Router, grouped_topk, topk
from moe_mk.router.hashed import HashRouter
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


TABLE = torch.tensor([[0, 2], [1, 0], [2, -1]])


def test_a_table_by_hand() -> None:
    # Roots of softplus 1, 2 and 1/2; token 0 takes experts 0 and 2, token 2 expert 2 alone.
    logits = torch.tensor([math.log(math.e - 1), math.log(math.exp(4) - 1), math.log(math.exp(0.25) - 1)]).repeat(3, 1)
    router = HashRouter(TABLE, routed_scaling_factor=3.0)
    routing = router.of(torch.tensor([0, 2, 0]))(logits)
    assert routing.ids_TK.tolist() == [[0, 2], [2, -1], [0, 2]] and routing.ids_TK.dtype is torch.int32
    assert routing.weights_TK[0].tolist() == pytest.approx([2.0, 1.0])
    assert routing.weights_TK[1].tolist() == pytest.approx([3.0, 0.0])
    raw = HashRouter(TABLE, renormalize=False).route(logits[:1], torch.tensor([1]))
    assert raw.ids_TK.tolist() == [[1, 0]] and raw.weights_TK[0].tolist() == pytest.approx([2.0, 1.0])


def test_it_routes_as_transformers_does() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="needs transformers")
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=16, moe_intermediate_size=8, n_routed_experts=12, vocab_size=40)
    theirs, draw = modeling.DeepseekV4HashRouter(config), torch.Generator().manual_seed(0)
    theirs.weight.data = torch.randn(12, 16, generator=draw)
    theirs.tid2eid = torch.rand(40, 12, generator=draw).argsort(1)[:, :6]
    x, tokens = torch.randn(50, 16, generator=draw), torch.randint(40, (50,), generator=draw)
    with torch.no_grad():
        logits, weights, ids = theirs(x, tokens)
    routing = HashRouter(theirs.tid2eid, routed_scaling_factor=config.routed_scaling_factor).route(logits, tokens)
    assert torch.equal(routing.ids_TK.long(), ids)
    torch.testing.assert_close(routing.weights_TK, weights, rtol=1e-5, atol=1e-6)


def test_weights_that_are_tiny_are_not_scaled_up() -> None:
    # A sigmoid of 1e-20, which is what is added to the sum of the weights.
    logits = torch.full((1, 3), math.log(1e-20), dtype=torch.float32)
    weights = HashRouter(TABLE, scoring_func="sigmoid").route(logits, torch.tensor([2])).weights_TK
    assert weights[0].tolist() == pytest.approx([0.5, 0.0], rel=1e-4)


def test_edges_and_refusals() -> None:
    router = HashRouter(TABLE)
    assert router.route(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).ids_TK.shape == (0, 2)
    nan = router.route(torch.tensor([[math.nan, 0.0, 0.0]]), torch.tensor([0]))
    assert nan.ids_TK.tolist() == [[-1, -1]] and nan.weights_TK.tolist() == [[0.0, 0.0]]
    with pytest.raises(ConfigError, match=r"token ids from 3 to 3 lie outside the table's \[0, 3\)"):
        router.route(torch.zeros(1, 3), torch.tensor([3]))
    with pytest.raises(ConfigError, match="chooses experts from 0 to 2, the layer has 2"):
        router.route(torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(ShapeError, match="T"):
        router.route(torch.zeros(2, 3), torch.tensor([0]))
    with pytest.raises(ShapeError, match="drop it"):
        router.of(torch.tensor([0]))(torch.zeros(1, 3), torch.zeros(3))
    with pytest.raises(ConfigError, match="scoring_func='tanh'"):
        HashRouter(TABLE, scoring_func="tanh")
