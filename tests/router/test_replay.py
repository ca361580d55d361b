"""Routing that was recorded, used again: weights of live logits with their gradient, and ids in one or two bytes."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import ConfigError, ShapeError, UnsupportedError
from moe_mk.kernels.reference.topk import BY_LOGIT
from moe_mk.router import Router
from moe_mk.router.hashed import HashRouter
from moe_mk.router.replay import ReplayedTokens, RoutingCapture, capture_dtype
from moe_mk.tokens import Routing
from tests.support.draws import seeded

ROUTERS = {
    "softmax": Router(3),
    "softmax, not renormalised": Router(3, renormalize=False, routed_scaling_factor=16.0),
    "sigmoid with a bias, groups and scaling": Router(
        3, num_expert_group=4, topk_group=2, scoring_func="sigmoid", routed_scaling_factor=2.5
    ),
    "sigmoid, not renormalised": Router(3, scoring_func="sigmoid", renormalize=False),
    "sqrtsoftplus": Router(3, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5),
    "sigmoid in the dtype of the model": Router(3, scoring_func="sigmoid", router_dtype="model"),
    **{name: Router(3, scoring_func=name) for name in BY_LOGIT},
}
every = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())


def logits(tokens: int = 5, experts: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def some_ids(tokens: int = 5, experts: int = 16, top_k: int = 3) -> Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(9)).argsort(1)[:, :top_k]


@pytest.mark.row("177")
@every
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_routers_own_choice_replayed_gives_its_own_bits(router: Router, with_bias: bool) -> None:
    bias_E, x_TE = logits(1)[0] if with_bias else None, logits(seed=3)
    x_TE = x_TE.bfloat16() if router.router_dtype == "model" else x_TE
    chosen = router(x_TE, bias_E)
    again = ReplayedTokens.of(router, chosen.ids_TK, 16)(x_TE, bias_E)
    assert torch.equal(again.ids_TK, chosen.ids_TK) and torch.equal(again.weights_TK, chosen.weights_TK)


@pytest.mark.row("177")
@every
def test_gradients_of_replayed_weights_are_those_of_finite_differences(router: Router) -> None:
    ids_TK = some_ids()
    ids_TK[1, 2] = -1
    replayed = ReplayedTokens.of(router, ids_TK, 16)
    x_TE = logits(dtype=torch.float64).requires_grad_()
    assert replayed(x_TE).weights_TK.dtype is torch.float64
    assert torch.autograd.gradcheck(lambda given: replayed(given).weights_TK, (x_TE,))


@pytest.mark.row("177")
def test_weights_are_those_of_the_recorded_experts_by_hand() -> None:
    ids_TK, x_TE = some_ids(), logits()
    router = Router(3, scoring_func="sigmoid", routed_scaling_factor=2.5)
    found = ReplayedTokens.of(router, ids_TK, 16)(x_TE, torch.full((16,), 100.0)).weights_TK
    scores_TK = torch.sigmoid(x_TE).gather(1, ids_TK)
    torch.testing.assert_close(found, 2.5 * scores_TK / scores_TK.sum(1, keepdim=True))
    softmax = ReplayedTokens.of(Router(3, renormalize=False), ids_TK, 16)(x_TE).weights_TK
    torch.testing.assert_close(softmax, x_TE.softmax(1).gather(1, ids_TK), rtol=1e-6, atol=1e-7)
    table = HashRouter(ids_TK, "sqrtsoftplus", routed_scaling_factor=1.5).route(x_TE, torch.arange(5))
    replayed = ReplayedTokens.of(Router(3, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5), ids_TK, 16)(x_TE)
    assert torch.equal(replayed.weights_TK, table.weights_TK), "of two routers that are given their experts"


@pytest.mark.row("177")
def test_recorded_weights_are_used_as_they_are_and_an_id_of_none_has_none() -> None:
    ids_TK = torch.tensor([[3, -1, 2]])
    found = ReplayedTokens.of(object(), Routing(ids_TK, torch.tensor([[0.5, 7.0, 0.25]])), 16)(logits(1))
    assert found.ids_TK.tolist() == [[3, -1, 2]] and found.weights_TK.tolist() == [[0.5, 0.0, 0.25]]
    live = ReplayedTokens.of(Router(3), ids_TK, 16)(logits(1))
    assert float(live.weights_TK[0, 1]) == 0.0 and float(live.weights_TK.sum()) == pytest.approx(1.0)


@pytest.mark.row("177")
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "logit_sigmoid"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_cannot_be_scored_goes_where_it_goes_without_replay(scoring: str, bad: float) -> None:
    x_TE, router = logits(), Router(3, scoring_func=scoring)
    x_TE[2, 5] = bad
    live, replayed = router(x_TE), ReplayedTokens.of(router, some_ids(), 16)(x_TE)
    assert bool((live.ids_TK[2] < 0).all()) == bool((replayed.ids_TK[2] < 0).all())
    assert replayed.weights_TK.isfinite().all() and torch.equal(replayed.ids_TK[3].long(), some_ids()[3])


@pytest.mark.row("177")
@pytest.mark.parametrize("dtype,experts", [(torch.uint8, 255), (torch.uint8, 256), (torch.uint16, 384)])
def test_captured_ids_are_read_with_none_where_it_has_a_value(dtype: torch.dtype, experts: int) -> None:
    none, ids_TK = torch.iinfo(dtype).max, torch.tensor([[0, 17, experts - 2]])
    narrow_TK = torch.cat((ids_TK, torch.full((1, 3), none)), 0).to(dtype)
    found = ReplayedTokens.of(Router(3), narrow_TK, experts).ids_TK
    assert found[0].tolist() == ids_TK[0].tolist()
    assert found[1].tolist() == ([255] * 3 if experts == 256 else [-1] * 3)


@pytest.mark.row("177")
@pytest.mark.parametrize(
    "record,experts,message",
    [
        (torch.zeros(5, 3, dtype=torch.uint8), 384, "torch.uint8, which cannot hold 384 experts"),
        (torch.full((5, 3), 16), 16, "recorded ids are 16 to 16, the layer has experts 0 to 15"),
        (torch.full((5, 3), -2), 16, "-2 to -2.*moe-mk trace check"),
        (torch.zeros(5, 3), 16, "recorded ids has dtype torch.float32"),
        (torch.zeros(5, dtype=torch.int64), 16, "recorded ids has 1 dimensions"),
        (Routing(torch.zeros(5, 3, dtype=torch.int32), torch.zeros(5, 2)), 16, "recorded weights"),
    ],
)
def test_records_that_do_not_fit_are_refused(record: Any, experts: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ReplayedTokens.of(Router(3), record, experts)


@pytest.mark.row("177")
def test_what_cannot_weigh_ids_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="function cannot weigh recorded ids"):
        ReplayedTokens.of(lambda logits, bias: None, some_ids(), 16)
    with pytest.raises(UnsupportedError, match="without simulate"):
        ReplayedTokens.of(Router(3, simulate="balanced"), some_ids(), 16)
    with pytest.raises(ConfigError, match="replay"):
        ReplayedTokens.of(Router(3), [[1, 2, 3]], 16)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="recorded ids"):
        ReplayedTokens.of(Router(3), some_ids(), 16)(logits(4))


class Layer:
    """What a capture listens to."""

    on_routing: Any = None

    def route(self, ids_TK: Tensor) -> None:
        self.on_routing(Routing(ids_TK, torch.ones(ids_TK.shape)))


@pytest.mark.row("177")
@pytest.mark.parametrize("experts", [255, 256, 384, 65535])
def test_a_capture_returns_what_layers_chose_in_the_narrowest_dtype(experts: int) -> None:
    capture, layers = RoutingCapture(layers=2, num_experts=experts, top_k=3, max_num_tokens=9), [Layer(), Layer()]
    made = [[torch.randint(-1, experts, (tokens, 3), dtype=torch.int32) for _ in layers] for tokens in (4, 0, 1)]
    with capture.listening(dict(enumerate(layers))):
        for step in made:
            for layer, ids_TK in zip(layers, step, strict=True):
                layer.route(ids_TK)
        taken_TXK = capture.take()
    assert layers[0].on_routing is layers[1].on_routing is None
    assert taken_TXK.shape == (5, 2, 3) and taken_TXK.dtype is (torch.uint8 if experts == 255 else torch.uint16)
    for place in range(2):
        expected = torch.cat([step[place] for step in made])
        assert torch.equal(ReplayedTokens.of(Router(3), taken_TXK[:, place], experts).ids_TK.int(), expected)
    assert len(capture.take()) == 0


@pytest.mark.row("177")
def test_what_was_taken_is_not_changed_by_what_is_captured_afterwards() -> None:
    capture, layer, draw = RoutingCapture(layers=1, num_experts=8, top_k=3, max_num_tokens=9), Layer(), seeded(0)
    taken, wanted = list[Tensor](), list[Tensor]()
    with capture.listening({0: layer}):
        for tokens in (4, 9, 0, 9, 2):
            ids_TK = torch.randint(0, 8, (tokens, 3), dtype=torch.int32, generator=draw)
            layer.route(ids_TK)
            taken.append(capture.take()[:, 0])
            wanted.append(ids_TK.clone())
    assert all(map(torch.equal, taken, wanted))


@pytest.mark.row("177")
def test_a_capture_refuses_what_it_cannot_hold() -> None:
    for layers, top_k, tokens in product((0, 1), (0, 1), (0, 1)):
        if not layers * top_k * tokens:
            with pytest.raises(ConfigError, match="must be at least 1"):
                RoutingCapture(layers=layers, num_experts=8, top_k=top_k, max_num_tokens=tokens)
    for wrong in (0, 65536):
        with pytest.raises(ConfigError, match=f"num_experts={wrong}"):
            capture_dtype(wrong)
    capture, both = RoutingCapture(layers=2, num_experts=8, top_k=2, max_num_tokens=3), [Layer(), Layer()]
    with pytest.raises(ConfigError, match=r"layers \[2\] are outside"), capture.listening({2: Layer()}):
        raise AssertionError
    with capture.listening(dict(enumerate(both))):
        with pytest.raises(ConfigError, match=r"layers \[1\] are recorded already"), capture.listening({1: both[1]}):
            raise AssertionError
        both[0].route(torch.zeros(2, 2, dtype=torch.int32))
        with pytest.raises(ShapeError, match=r"\[2, 0\] tokens"):
            capture.take()
        with pytest.raises(ShapeError, match="4 tokens were captured, max_num_tokens=3"):
            both[0].route(torch.zeros(2, 2, dtype=torch.int32))
        with pytest.raises(ShapeError, match="top_k=2"):
            both[1].route(torch.zeros(2, 1, dtype=torch.int32))
    weightless = Routing(torch.zeros(1, 2), torch.ones(1, 2), input_weights_T1=torch.ones(1, 1))
    with pytest.raises(UnsupportedError, match="without weights"), capture.listening(dict(enumerate(both))):
        both[1].on_routing(weightless)
    assert both[0].on_routing is both[1].on_routing is None, "a forward that raises ends the capture"
