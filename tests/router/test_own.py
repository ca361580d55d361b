"""A router of the program or of a wheel in a layer: used, reported, compared between ranks, copied, and checked."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_mk import CommError, ConfigError, ExpertMap, MoELayer, ParallelGroups, ShapeError, UnsupportedError
from moe_mk.comm import LockstepWorld
from moe_mk.flight import interleave
from moe_mk.lab.testing.conformance import NonConforming, check_router
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.lab.training import TrainingMoE
from moe_mk.lab.verify.dense import dense_layer
from moe_mk.router import ROUTERS, Router, RouterKind, grouped_topk
from moe_mk.tokens import Routing
from tests.support import layers as build

E, K = 8, 2


def layer(groups: ParallelGroups | None = None, **settings: object) -> MoELayer:
    return build.layer(E, K, groups, **{"experts": "torch_cpu", "renormalize": True, **settings})


def least(logits_TE: Tensor, bias_E: Tensor | None = None) -> Routing:
    """The experts with the lowest scores, of equal weight."""
    _, ids_TK = grouped_topk(-logits_TE, K, 1, 1, "softmax", bias_E, True, 1.0)
    return Routing(ids_TK, torch.where(ids_TK >= 0, 1.0 / K, 0.0))


class Least(Router):
    """A subclass that routes otherwise."""

    def __call__(self, router_logits: Tensor, e_score_correction_bias: Tensor | None = None) -> Routing:
        return least(router_logits, e_score_correction_bias)


X = torch.randn(5, build.HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("router", [least, Least(K)], ids=["function", "subclass"])
def test_a_router_that_is_set_is_used_and_stands_in_every_report(router: Callable[..., Routing]) -> None:
    made = layer()
    before, logits_TE = made(X), made.route(X).logits_TE
    assert made.report().router == "" and made.explain() is made.decision
    made.router = router
    assert made.router is router and torch.equal(made.route(X).ids_TK, least(logits_TE).ids_TK)
    changed = made(X)
    assert not torch.equal(changed, before)
    name = f"{__name__}.{'Least' if isinstance(router, Least) else 'least'}"
    stated = f"experts are chosen by {name}, not by the router of the settings"
    assert stated in str(made.explain()) and stated in str(made.report())
    assert made.explain().as_dict()["router"] == made.report().as_dict()["router"] == name
    assert torch.equal(copy.deepcopy(made)(X), changed), "a copy chooses alike"
    made.router = Router(K)
    assert torch.equal(made(X), before) and made.report().router == ""
    made.router = replace(made.router, simulate="balanced")
    assert "simulate='balanced'" in made.report().router and "simulate='balanced'" in str(made.explain())


class Lowest(RouterKind):
    """`least`, as a wheel registers it."""

    def __call__(self, router_logits: Tensor, e_score_correction_bias: Tensor | None = None) -> Routing:
        assert self.num_experts == router_logits.shape[1] and self.config.top_k == K
        return least(router_logits, e_score_correction_bias)


@pytest.fixture
def lowest(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ROUTERS, "_entries", dict[str, type[RouterKind]]())
    ROUTERS.register("lowest")(Lowest)
    return "lowest"


@pytest.mark.parametrize("experts", ["torch_cpu", "reference"])
def test_a_registered_router_is_chosen_by_the_settings(lowest: str, experts: str) -> None:
    made, set_by_hand = layer(kind=lowest, experts=experts), layer(experts=experts)
    set_by_hand.router = least
    assert torch.equal(made(X), set_by_hand(X)) and not torch.equal(made(X), layer(experts=experts)(X))
    assert isinstance(made.router, Lowest) and made.report().router == "", "it is that of the settings"
    copied = copy.deepcopy(made)
    assert torch.equal(copied(X), made(X)) and copied.report().router == ""
    made.router = Lowest(made.config.with_(routed_scaling_factor=2.5).router, E)
    assert made.report().router, "its settings are others"
    copied.router = least
    assert copied.report().router.endswith(".least")


def test_a_registered_router_that_cannot_be_used_is_refused(lowest: str) -> None:
    with pytest.raises(ConfigError, match="no router is called 'lowes'; did you mean 'lowest'"):
        layer(kind="lowes")
    with pytest.raises(ConfigError, match="breaks the contract of RouterKind: __call__"):
        ROUTERS.register("other")(type("Other", (RouterKind,), {"__call__": lambda self, logits: least(logits)}))
    ranks = [
        layer(ParallelGroups(ep=comm), kind=kind)
        for comm, kind in zip(LockstepWorld(2).communicators(), ("topk", lowest), strict=True)
    ]
    with pytest.raises(CommError, match="kind"):
        interleave([rank.steps(X) for rank in ranks])
    made = layer(kind=lowest)
    with pytest.raises(UnsupportedError, match="reference for router.kind = lowest"):
        dense_layer(X, made.config, made.weights)
    with pytest.raises(UnsupportedError, match="router.kind = lowest is not trained; set it to topk"):
        TrainingMoE(made.config)


def test_experts_that_route_inside_do_not_leave_out_a_router(lowest: str) -> None:
    with pytest.raises(UnsupportedError, match="router.kind = lowest is another distribution's"):
        layer(kind=lowest, experts="reference_monolithic")
    made = layer(experts="reference_monolithic")
    before = made(X)
    made.router = least
    with pytest.raises(UnsupportedError, match=r"reference_monolithic routes inside, which leaves out .*\.least"):
        made(X)
    made.router = Router(K)
    assert torch.equal(made(X), before)


def test_ranks_with_different_routers_do_not_go_on() -> None:
    ranks = [layer(ParallelGroups(ep=comm)) for comm in LockstepWorld(2).communicators()]
    ranks[1].router = least
    with pytest.raises(CommError, match="router in use"):
        interleave([rank.steps(X) for rank in ranks])


@pytest.mark.parametrize("transport", ["no_ep", "all_to_all", "all_gather", "one_sided", "replicated"])
def test_ids_in_int64_and_routing_with_strides_go_where_dense_int32_goes(transport: str) -> None:
    groups, tokens = virtual_groups(1 + (transport != "no_ep")), {"replicated": "replicated"}.get(transport, "sharded")
    ranks = [layer(each, prepare_finalize=transport, tokens=tokens) for each in groups]
    for _ in range(2):  # as built, and then moved
        outputs = list[list[Tensor]]()
        for as_given in (
            lambda routing: routing,
            lambda routing: replace(routing, ids_TK=routing.ids_TK.long()),
            lambda routing: Routing(*(each.T.contiguous().T for each in (routing.ids_TK, routing.weights_TK))),
        ):
            for rank in ranks:
                rank.router = lambda logits, bias, as_given=as_given: as_given(
                    Routing(least(logits).ids_TK, torch.linspace(0.1, 1.0, len(X) * K).view(-1, K))
                )
            outputs.append(interleave([rank.steps(X) for rank in ranks]))
        assert all(map(torch.equal, outputs[0] * 2, outputs[1] + outputs[2]))
        for rank in ranks:
            rank.live.set_placement(ExpertMap(tuple(row[::-1] for row in rank.expert_map.experts_of_rank), E))


WRONG: dict[str, Callable[[Routing], object]] = {
    "Tensor, not moe_mk.tokens.Routing": lambda right: right.ids_TK,
    "ids_TK of router": lambda right: replace(right, ids_TK=right.ids_TK[:, :1]),
    "ids_TK .*dtype": lambda right: replace(right, ids_TK=right.ids_TK.float()),
    "weights_TK of router": lambda right: replace(right, weights_TK=right.weights_TK[1:]),
    "weights_TK .*dtype": lambda right: replace(right, weights_TK=right.weights_TK.double()),
    "ids from . to 8, the layer has experts 0 to 7": lambda right: replace(right, ids_TK=right.ids_TK.fill_(8)),
    "ids from -2": lambda right: replace(right, ids_TK=right.ids_TK.fill_(-2)),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_a_layer_cannot_use_is_refused_with_the_name_of_the_router(words: str) -> None:
    made = layer()
    made.router = lambda logits, bias: WRONG[words](least(logits, bias))
    with pytest.raises(ShapeError, match=words) as caught:
        made(X)
    assert "test_own" in str(caught.value)


def test_what_is_no_router_is_refused_when_it_is_set() -> None:
    made = layer()
    for wrong in (None, "softmax", Router(1), Router(3)):
        with pytest.raises(ConfigError, match="router.top_k is 2" if isinstance(wrong, Router) else "not a function"):
            made.router = wrong


BROKEN: dict[str, Callable[[Tensor, Routing], Routing]] = {
    "an input changed": lambda logits, right: (logits.add_(1), right)[1],
    "weights are not finite": lambda logits, right: replace(right, weights_TK=right.weights_TK / 0),
    "chooses an expert twice": lambda logits, right: replace(right, ids_TK=right.ids_TK[:, :1].expand(-1, K)),
    "two calls give different bits": lambda logits, right: replace(right, weights_TK=right.weights_TK + next(COUNT)),
    "in a batch of its own": lambda logits, right: (
        right if len(logits) > 1 else replace(right, ids_TK=right.ids_TK * 0 - 1)
    ),
    "with NaN among its logits chooses": lambda logits, right: replace(
        right, ids_TK=torch.where(right.ids_TK < 0, torch.arange(K, dtype=torch.int32), right.ids_TK)
    ),
    "of the process were changed": lambda logits, right: (torch.rand(1), right)[1],
    "ids_TK of router": lambda logits, right: replace(right, ids_TK=right.ids_TK[:-1]),
}
COUNT = iter(range(10**6))


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_router_does_not_pass_the_kit(words: str) -> None:
    with pytest.raises(NonConforming, match=words):
        check_router(lambda logits, bias: BROKEN[words](logits, least(logits, bias)), num_experts=E, top_k=K)


def test_correct_routers_pass_the_kit() -> None:
    assert check_router(least, num_experts=E, top_k=K) == 20
    assert check_router(Router(K, scoring_func="sigmoid"), num_experts=E, top_k=K, has_bias=True) == 20
