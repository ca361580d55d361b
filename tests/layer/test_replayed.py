"""Layers that run with recorded experts: their own, other ones, over ranks, and records that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import MoELayer, ParallelGroups, ShapeError, UnsupportedError
from moe_mk.comm.communicator import Communicator
from moe_mk.comm.threads import ThreadWorld
from moe_mk.lab.training import TrainingMoE
from moe_mk.router.replay import RoutingCapture
from moe_mk.tokens import Routing
from tests.layer.native import NEEDS_COMPILER, built, written
from tests.support import layers

EXPERTS, TOP_K, TOKENS = 8, 2, 7
SETTINGS: dict[str, dict[str, Any]] = {
    "softmax": {"renormalize": True},
    "sigmoid, bias, groups, scaling, shared": {
        "scoring_func": "sigmoid", "has_correction_bias": True, "num_expert_group": 4, "topk_group": 2,
        "renormalize": True, "routed_scaling_factor": 2.5, "num_shared_experts": 1,
    },
}  # fmt: skip
settings_of = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


def tokens(seed: int = 1, count: int = TOKENS) -> Tensor:
    return torch.randn(count, layers.HIDDEN, generator=torch.Generator().manual_seed(seed))


def build(groups: ParallelGroups | None = None, **settings: Any) -> MoELayer:
    return layers.layer(EXPERTS, TOP_K, groups=groups, **settings)


def other_ids(seed: int = 5, count: int = TOKENS) -> Tensor:
    return torch.rand(count, EXPERTS, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :TOP_K]


@pytest.mark.row("177")
@settings_of
@pytest.mark.parametrize("experts", ["reference", "torch_cpu"])
def test_a_layers_own_record_replayed_gives_its_own_output(settings: dict[str, Any], experts: str) -> None:
    made = build(**settings, experts=experts)
    capture = RoutingCapture(layers=1, num_experts=EXPERTS, top_k=TOP_K, max_num_tokens=TOKENS)
    with capture.listening({0: made}):
        expected = made(tokens())
    ids_TK = capture.take()[:, 0]
    assert ids_TK.dtype is torch.uint8
    torch.testing.assert_close(made.forward_replayed(tokens(), ids_TK), expected, rtol=1e-5, atol=1e-6)
    with_weights = made.forward_replayed(tokens(), made.route(tokens()))
    torch.testing.assert_close(with_weights, expected, rtol=1e-5, atol=1e-6)
    assert int(made.expert_load.sum()) == 3 * TOKENS * TOP_K, "replayed choices are counted as others"


@NEEDS_COMPILER
@pytest.mark.row("177")
def test_native_experts_replay_what_their_own_router_chose(tmp_path: Path) -> None:
    made, x_TH = built(written(tmp_path)), torch.randn(5, 256, dtype=torch.bfloat16)
    capture = RoutingCapture(layers=1, num_experts=16, top_k=4, max_num_tokens=8)
    with capture.listening({0: made}):
        expected = made(x_TH)
    found = made.forward_replayed(x_TH, capture.take()[:, 0])
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))
    assert not torch.equal(made.forward_replayed(x_TH, torch.tensor([[0, 1, 2, 3]] * 5)), expected)


@pytest.mark.row("177")
@settings_of
def test_other_experts_are_weighed_by_the_live_gate(settings: dict[str, Any]) -> None:
    made = build(**settings)
    logits_TE, ids_TK = made.route(tokens()).logits_TE, other_ids()
    scores_TE = torch.sigmoid(logits_TE) if "scoring_func" in settings else logits_TE.softmax(1)
    scores_TK = scores_TE.gather(1, ids_TK)
    weights_TK = scores_TK / scores_TK.sum(1, keepdim=True) * settings.get("routed_scaling_factor", 1.0)
    weights, expected = (
        layers.tensors(EXPERTS, shared=settings.get("num_shared_experts", 0), bias="scoring_func" in settings),
        0.0,
    )
    for expert in range(EXPERTS):
        share_T1 = (weights_TK * (ids_TK == expert)).sum(1, keepdim=True)
        expected = expected + share_T1 * layers.mlp(tokens(), weights, f"experts.{expert}")
    if "num_shared_experts" in settings:
        expected = expected + layers.mlp(tokens(), weights, "shared_experts")
    torch.testing.assert_close(made.forward_replayed(tokens(), ids_TK), expected, rtol=1e-5, atol=1e-5)
    recorded = Routing(ids_TK.int(), weights_TK)
    torch.testing.assert_close(made.forward_replayed(tokens(), recorded), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(made(tokens()), expected), "the layer itself chooses otherwise"


@pytest.mark.row("177")
@settings_of
def test_two_ranks_replay_what_one_does(settings: dict[str, Any]) -> None:
    alone, world, counts = build(**settings), ThreadWorld(2), (4, 3)
    x_TH, ids_TK = tokens().split(counts), other_ids().split(counts)
    ranks = [
        build(groups=ParallelGroups(ep=comm), prepare_finalize="all_to_all", **settings)
        for comm in world.communicators()
    ]

    def call(rank: int) -> Tensor:
        return ranks[rank].forward_replayed(x_TH[rank], ids_TK[rank])

    y_TH = torch.cat(world.together([lambda rank=rank: call(rank) for rank in range(2)]))
    torch.testing.assert_close(y_TH, alone.forward_replayed(tokens(), other_ids()), rtol=1e-5, atol=1e-6)


@pytest.mark.row("177")
def test_recorded_weights_already_have_the_factors_of_experts() -> None:
    made = build(renormalize=True)
    made.state.backends.gate.expert_scale_E = torch.linspace(0.5, 2.0, EXPERTS)
    seen: list[Routing] = []
    made.on_routing = seen.append
    expected = made(tokens())
    made.on_routing = None
    for recorded in (seen[0].ids_TK, Routing(seen[0].ids_TK, seen[0].weights_TK)):
        torch.testing.assert_close(made.forward_replayed(tokens(), recorded), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.row("177")
def test_records_of_other_tokens_or_experts_are_refused_before_anything_runs() -> None:
    made = build()
    for record, message in (
        (other_ids()[:-1], "recorded ids"),
        (other_ids()[:, :1], "recorded ids"),
        (other_ids() + EXPERTS, "the layer has experts 0 to 7"),
    ):
        with pytest.raises(ShapeError, match=message):
            made.forward_replayed(tokens(), record)
    with pytest.raises(UnsupportedError, match="outside of torch.func"):
        made.forward_replayed(torch.nn.Parameter(tokens(), requires_grad=False), other_ids())
    inside = build(experts="reference_monolithic")
    with pytest.raises(UnsupportedError, match="routes inside"):
        inside.forward_replayed(tokens(), other_ids())
    assert not made.expert_load.any() and made.forward_replayed(tokens(), other_ids()).isfinite().all()


def training(comm: Communicator | None = None, **settings: Any) -> TrainingMoE:
    config = layers.config(EXPERTS, TOP_K, **settings)
    given = () if comm is None else (comm,)
    return TrainingMoE(config, *given, generator=torch.Generator().manual_seed(0))


def stepped(made: TrainingMoE, x_TH: Tensor, replay: Tensor | Routing | None) -> Tensor:
    y_TH: Tensor = made(x_TH, replay=replay).y_TH
    y_TH.square().sum().backward()
    return y_TH


@pytest.mark.row("177")
@settings_of
def test_training_on_the_own_record_has_the_bits_and_the_gradients_of_training_without(
    settings: dict[str, Any],
) -> None:
    one, other = training(**settings), training(**settings)
    out = one(tokens())
    out.y_TH.square().sum().backward()
    assert torch.equal(stepped(other, tokens(), out.ids_TK), out.y_TH)
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, theirs.grad), name


@pytest.mark.row("177")
@settings_of
def test_the_gradient_of_a_replayed_gate_is_that_of_finite_differences(settings: dict[str, Any]) -> None:
    made, step = training(**settings), 1e-2
    stepped(made, tokens(), other_ids())
    direction_EH = torch.randn(made.gate_EH.shape, generator=torch.Generator().manual_seed(3))
    found, losses = float((made.gate_EH.grad * direction_EH).sum()), []
    with torch.no_grad():
        for sign in (1, -1):
            made.gate_EH += sign * step * direction_EH
            losses.append(float(made(tokens(), replay=other_ids()).y_TH.double().square().sum()))
            made.gate_EH -= sign * step * direction_EH
    assert found == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-2)
    made.zero_grad()
    routing = made(tokens())
    stepped(made, tokens(), Routing(routing.ids_TK, routing.weights_TK.detach()))
    assert made.gate_EH.grad is None or not made.gate_EH.grad.any(), "recorded weights do not come from the gate"


@pytest.mark.row("177")
@settings_of
def test_two_ranks_train_on_a_record_as_one_does(settings: dict[str, Any]) -> None:
    alone, world, halves = training(**settings), ThreadWorld(2), (tokens().split(4), other_ids().split(4))
    expected = stepped(alone, tokens(), other_ids())

    def step(comm: Communicator) -> tuple[TrainingMoE, Tensor]:
        made = training(comm, **settings)
        return made, stepped(made, halves[0][comm.rank], halves[1][comm.rank])

    made = world.together([lambda comm=comm: step(comm) for comm in world.communicators()])  # type: ignore[misc]
    torch.testing.assert_close(torch.cat([y_TH for _, y_TH in made]), expected)
    torch.testing.assert_close(sum(each.gate_EH.grad for each, _ in made), alone.gate_EH.grad)


@pytest.mark.row("177")
def test_training_refuses_records_for_routers_that_choose_otherwise() -> None:
    with pytest.raises(UnsupportedError, match=r"router.kind = expert_capacity\n  - use router.kind = topk"):
        training(kind="expert_capacity")(tokens(), replay=other_ids())
    made = training()
    with pytest.raises(ShapeError, match="recorded ids"):
        made(tokens(), replay=other_ids()[1:])
    routing = made(tokens())
    with pytest.raises(ShapeError, match="recorded weights"):
        made(tokens(), replay=replace(Routing(routing.ids_TK, routing.weights_TK[:, :1])))
