"""Calls while an expert has no live copy: refused on every rank alike, or served without it and counted."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk import ExpertMap, LostExpertError, MoELayer, ParallelGroups
from moe_mk.comm import LockstepWorld
from moe_mk.errors import FallbackWarning
from moe_mk.flight import Flight, interleave
from moe_mk.layer.serving_state import LostExperts
from moe_mk.tokens import Routing
from tests.layer import native
from tests.layer.native import NEEDS_COMPILER
from tests.support import layers as build

EXPERTS, TOP_K = 4, 2
LOST = ExpertMap(((0, 1), (3,)), EXPERTS, (1.0, 1.0, 1.0), frozenset({2}))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tokens(rank: int = 0) -> Tensor:
    return torch.randn(12, build.HIDDEN, generator=torch.Generator().manual_seed(rank))


def ranks(policy: str, **settings: object) -> list[MoELayer]:
    """Two ranks in lockstep, of which expert 2 has been lost."""
    layers = [
        build.layer(EXPERTS, TOP_K, ParallelGroups(ep=comm), on_lost_expert=policy, **settings)
        for comm in LockstepWorld(2).communicators()
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for layer in layers:
            layer.live.set_placement(LOST)
    return layers


def written_down(x_TH: Tensor, routing: Routing) -> Tensor:
    """Every token on its own, in f64."""
    weights = {name: t.double() for name, t in build.tensors(EXPERTS).items()}
    y_TH = torch.zeros_like(x_TH, dtype=torch.float64)
    for t, (ids, parts) in enumerate(zip(routing.ids_TK.tolist(), routing.weights_TK.tolist(), strict=True)):
        for expert, part in zip(ids, parts, strict=True):
            if expert >= 0:
                y_TH[t] += part * build.mlp(x_TH[t].double(), weights, f"experts.{expert}")
    return y_TH


@pytest.mark.parametrize("transport", ["all_to_all", "one_sided", "all_gather"])
def test_every_rank_refuses_every_call_before_a_token_travels(transport: str) -> None:
    layers = ranks("raise", prepare_finalize=transport)
    for layer in layers:
        # Tokens of rank 0 alone may want the lost expert: the decision does not depend on the routing.
        layer.router = lambda logits, bias: Routing(torch.zeros(12, 2, dtype=torch.int32), torch.ones(12, 2))
    for _ in range(2):
        ended = ends([layer.steps(tokens(rank)) for rank, layer in enumerate(layers)])
        assert [error.experts for error in ended] == [(2,), (2,)]
        assert "expert 2 has no live copy" in str(ended[0]) and "rank_lost()" in str(ended[0])
    sent = layers[0].ep.traffic.bytes_by_phase
    assert set(sent) <= {"agreement"} and layers[0].report().stages == ()


def ends(flights: list[Flight[Tensor]]) -> list[LostExpertError]:
    """How each rank's call ends, hop by hop together."""
    found: dict[int, LostExpertError] = {}
    while len(found) < len(flights):
        for rank, flight in enumerate(flights):
            if rank not in found:
                try:
                    next(flight)
                except LostExpertError as error:
                    found[rank] = error
    return [found[rank] for rank in range(len(flights))]


@pytest.mark.parametrize("policy", ["drop", "renormalise"])
def test_the_rest_is_served_and_what_was_left_out_is_counted(policy: str) -> None:
    layers = ranks(policy)
    routings = [layer.route(tokens(rank)) for rank, layer in enumerate(layers)]
    outputs = interleave([layer.steps(tokens(rank)) for rank, layer in enumerate(layers)])
    for rank, (layer, routing) in enumerate(zip(layers, routings, strict=True)):
        lost_TK = routing.ids_TK == 2
        assert lost_TK.any() and not lost_TK.any(1).all()
        weights_TK = routing.weights_TK.double().masked_fill(lost_TK, 0.0)
        if policy == "renormalise":
            weights_TK *= (routing.weights_TK.double().sum(1) / weights_TK.sum(1))[:, None]
        wanted = written_down(tokens(rank), Routing(routing.ids_TK.masked_fill(lost_TK, -1), weights_TK))
        torch.testing.assert_close(outputs[rank].double(), wanted, rtol=1e-5, atol=1e-5)
        report = layer.report()
        assert report.lost_experts == (2,) and report.on_lost_expert == policy
        assert report.dropped_assignments == int(lost_TK.sum())
        assert report.as_dict()["dropped_assignments"] == int(lost_TK.sum())
        assert f"on_lost_expert = {policy}, {int(lost_TK.sum())} assignments left out" in str(report)
        layer.reset_report()
        assert layer.report().dropped_assignments == 0


def test_tokens_without_a_lost_expert_keep_their_weights_to_the_bit() -> None:
    lost = ranks("renormalise")[0].state.lost
    assert lost is not None
    routing = Routing(
        torch.tensor([[0, 1], [2, 3], [2, -1], [3, -1]], dtype=torch.int32),
        torch.tensor([[0.3, 0.1], [0.3, 0.1], [0.7, 9.0], [0.2, 9.0]]),
    )
    counter = torch.zeros((), dtype=torch.int64)
    left = lost.leave_out(routing, counter)
    assert left.ids_TK.tolist() == [[0, 1], [-1, 3], [-1, -1], [3, -1]] and counter == 2
    assert torch.equal(left.weights_TK[[0, 3]], routing.weights_TK[[0, 3]])
    assert left.weights_TK[1, 1] == pytest.approx(0.4)
    assert left.weights_TK.isfinite().all()  # of the third token nothing is left


def test_the_first_and_the_last_expert_can_be_lost() -> None:
    lost = LostExperts("a layer", "renormalise", (0, 3), torch.tensor([True, False, False, True]))
    ids_TK = torch.tensor([[0, 1], [1, 2], [1, -1], [3, 2]], dtype=torch.int32)
    counter = torch.ones((), dtype=torch.int64)
    left = lost.leave_out(Routing(ids_TK, torch.full((4, 2), 0.25)), counter)
    assert left.ids_TK.tolist() == [[-1, 1], [1, 2], [1, -1], [-1, 2]] and counter == 3
    assert left.weights_TK.tolist() == [[0.0, 0.5], [0.25, 0.25], [0.25, 0.25], [0.0, 0.5]]


def test_one_warning_a_loss_and_none_where_calls_raise() -> None:
    layer = build.layer(EXPERTS, TOP_K, on_lost_expert="drop")
    alone = ExpertMap(((0, 1, 3),), EXPERTS, (1.0, 1.0, 1.0), frozenset({2}))
    with pytest.warns(FallbackWarning, match="expert 2 has no live copy; parallel.on_lost_expert = drop"):
        layer.live.set_placement(alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(tokens())
        layer.live.set_placement(alone)
        refusing = build.layer(EXPERTS, TOP_K)
        refusing.live.set_placement(alone)
    with pytest.raises(LostExpertError, match="expert 2 has no live copy"):
        refusing(tokens())
    with pytest.raises(LostExpertError):
        refusing.forward_routed(tokens(), torch.ones(12, 2), torch.zeros(12, 2, dtype=torch.int64))


@NEEDS_COMPILER
def test_a_forward_in_one_native_call_is_refused_as_well(tmp_path: Path) -> None:
    layer = native.built(native.written(tmp_path))
    x_TH = torch.randn(5, native.HIDDEN).bfloat16()
    layer(x_TH)
    assert layer.prepare().call is not None
    kept = tuple(range(1, native.EXPERTS))
    layer.live.set_placement(ExpertMap((kept,), native.EXPERTS, (1.0,) * len(kept), frozenset({0})))
    with pytest.raises(LostExpertError, match="expert 0 has no live copy"):
        layer(x_TH)
