"""The router of one layer as a value, by scores and by token id, and plain top-k routing against loops."""

import math
import pickle

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.native.selfcheck import reasons_against
from moe_mk.kernels.reference.topk import BY_LOGIT
from moe_mk.router import Router, grouped_topk, topk
from moe_mk.router.hashed import HashRouter
from moe_mk.router.router import Simulation
from moe_mk.router.topk import IDS
from tests.layer.native import route_natively
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
