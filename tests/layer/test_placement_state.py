"""The placement in use, calls while an expert has no live copy, and what is prepared of tensors that are replaced."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_mk import ExpertMap, LostExpertError, MoELayer, ParallelGroups
from moe_mk.comm import LockstepWorld
from moe_mk.errors import ConfigError, FallbackWarning, ShapeError, UnsupportedError, WeightError
from moe_mk.flight import interleave
from moe_mk.kernels.native.layer import MOST_SIZES
from moe_mk.kernels.native.prepared import RouteCall, RouteMode
from moe_mk.kernels.native.selfcheck import loaded
from moe_mk.layer.hot_swap import swap_backends
from moe_mk.layer.live import check_sizes
from moe_mk.layer.serving_state import LostExperts
from moe_mk.tokens import Routing
from tests.layer import native
from tests.layer.native import NEEDS_COMPILER
from tests.support import layers as build
from tests.support.layers import HIDDEN, config, tensors
from tests.support.machine import ends
from tests.support.replaced import CHANGES
from tests.support.tiers import quick_where

TWICE = ((0, 1, 2), (3, 0))


def test_ranks_compare_experts_shares_and_the_number_of_changes() -> None:
    maps = [
        ExpertMap(TWICE, 4), ExpertMap(TWICE, 4, (0.25, 1.0, 1.0, 1.0, 0.75)), ExpertMap(((0, 2, 1), (3, 0)), 4),
    ]  # fmt: skip
    notes = []
    for expert_map in maps:
        groups = ParallelGroups(ep=LockstepWorld(2).communicators()[0])
        layer = MoELayer(build.config(4, 2), dtype=torch.float32, groups=groups)
        layer.live.set_placement(expert_map)
        notes.append(layer.state.notes)
    assert len({each["placement"] for each in notes}) == 3 and {each["epoch"] for each in notes} == {"1"}
    layer.live.set_placement(maps[0])
    assert layer.state.notes == {"placement": notes[0]["placement"], "epoch": "2"}


def test_gates_are_compared_by_value_and_not_by_the_dtype_that_a_backend_keeps() -> None:
    gate = build.layer(4, 2).state.backends.gate
    weight_EH = torch.tensor([[1.0, -0.5], [0.25, 3.0], [2.0, 0.0], [1.5, 1.0]])
    notes = []
    for stored in (weight_EH, weight_EH.bfloat16(), weight_EH.T.contiguous().T, weight_EH + 1):
        gate.weight_EH = stored
        notes.append(gate.notes()["gate weights"])
    assert notes[0] == notes[1] == notes[2] != notes[3]


def test_a_map_of_other_sizes_is_refused_with_all_numbers() -> None:
    serving, comm = ExpertMap(((0, 1), (2, 3)), 4), LockstepWorld(2).communicators()[0]
    check_sizes(ExpertMap(((3, 1), (2, 0)), 4), serving, comm)
    with pytest.raises(ConfigError, match=r"it places 3 experts, the layer has 4; it has 3 ranks, the group has 2$"):
        check_sizes(ExpertMap(((0,), (1,), (2,)), 3), serving, comm)


def test_a_layer_that_was_changed_is_freed_with_its_last_reference() -> None:
    gc.disable()
    try:
        layer = build.layer(4, 2)
        layer.live.set_placement(layer.expert_map)
        last = weakref.ref(layer)
        del layer
        assert last() is None, "a cycle would keep the weights of a replaced layer until the next collection"
    finally:
        gc.enable()


EXPERTS, TOP_K = 4, 2
LOST = ExpertMap(((0, 1), (3,)), EXPERTS, (1.0, 1.0, 1.0), frozenset({2}))


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


@pytest.mark.parametrize("policy", ["drop", "renormalise"])
def test_weights_of_no_expert_count_nowhere(policy: str) -> None:
    draw = torch.Generator().manual_seed(0)
    ids_TK = torch.randint(-1, 8, (200, 4), dtype=torch.int32, generator=draw)
    weights_TK = torch.rand((200, 4), generator=draw)
    lost = LostExperts("a layer", policy, (2, 5), torch.arange(8) % 3 == 2)
    found = []
    for unused in (0.0, 9.0, torch.nan):
        counter = torch.zeros((), dtype=torch.int64)
        left = lost.leave_out(Routing(ids_TK, weights_TK.masked_fill(ids_TK < 0, unused)), counter)
        found.append((left.ids_TK, left.weights_TK.masked_fill(left.ids_TK < 0, 0.0), counter))
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def test_the_first_and_the_last_expert_can_be_lost() -> None:
    lost = LostExperts("a layer", "renormalise", (0, 3), torch.tensor([True, False, False, True]))
    ids_TK = torch.tensor([[0, 1], [1, 2], [1, -1], [3, 2]], dtype=torch.int32)
    counter = torch.ones((), dtype=torch.int64)
    left = lost.leave_out(Routing(ids_TK, torch.full((4, 2), 0.25)), counter)
    assert left.ids_TK.tolist() == [[-1, 1], [1, 2], [1, -1], [-1, 2]] and counter == 3
    assert left.weights_TK.tolist() == [[0.0, 0.5], [0.25, 0.25], [0.25, 0.25], [0.0, 0.5]]


def test_a_warm_up_changes_no_counter_of_a_layer_with_lost_experts() -> None:
    made = build.layer(EXPERTS, TOP_K, on_lost_expert="drop")
    with pytest.warns(FallbackWarning):
        made.live.set_placement(ExpertMap(((1, 2, 3),), EXPERTS, (1.0, 1.0, 1.0), frozenset({0})))
    counted = []
    for counts in ([], [5, 0, 3]):
        made.warm_up(counts)  # tokens of zeros choose the first experts, of which one is lost
        counted.append((made.dropped_assignments, made.unrouted, made.routing.tokens, made.expert_load.tolist()))
        made(tokens())
    made.reset_expert_load()
    made.reset_report()
    assert counted[0] == (0, 0, 0, [0] * EXPERTS)
    made.warm_up([7])
    assert (made.dropped_assignments, made.unrouted, made.routing.tokens) == (0, 0, 0)
    made(tokens())
    once = made.dropped_assignments, made.unrouted, made.routing.tokens, made.expert_load.tolist()
    assert counted[1] == once and once[0] > 0


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_every_matrix_that_arrives_is_read_before_it_serves(projection: str) -> None:
    made = build.layer(EXPERTS, TOP_K)
    sent = made.live.export_slot(1)
    field = {"gate": "gate_IH", "up": "up_IH", "down": "down_HI"}[projection]
    values = sent.matrices[projection].values.clone()
    values[1, 2] = torch.nan
    damaged = replace(sent, **{field: replace(sent.matrices[projection], values=values)})
    with pytest.raises(WeightError, match=rf"{projection} of expert 1\[1, 2\] = nan"):
        made.live.stage(made.expert_map, {1: damaged})
    made.live.stage(made.expert_map, {1: sent})


def test_a_gate_that_is_made_again_has_everything_that_the_old_one_had() -> None:
    made, draw = build.layer(EXPERTS, TOP_K, experts="torch_cpu"), torch.Generator().manual_seed(0)
    names = ("bias_E", "logit_bias_E", "expert_scale_E")
    vectors = {name: torch.rand(EXPERTS, generator=draw) for name in names}
    made.take(replace(made.weights, **vectors))
    old = made.state.backends.gate
    old.bias_E = vectors["bias_E"].flip(0)  # corrected, where the weights have a copy, as those of a gate on a GPU
    wanted = made(tokens())
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(twin(tokens()), wanted)
    assert swap_backends(made, tokens(), experts="reference").swapped
    new = made.state.backends.gate
    assert new is not old
    for name, value in vars(old).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, getattr(new, name)), name
    assert sum(isinstance(value, Tensor) for value in vars(new).values()) == 1 + len(vectors)
    torch.testing.assert_close(made(tokens()), wanted)


def test_what_is_fed_is_of_the_placement_of_its_loader_and_cannot_be_read_again() -> None:
    made = build.layer(EXPERTS, TOP_K)
    first, second = made.loader(), made.loader()
    for name, tensor in build.tensors(EXPERTS).items():
        first.feed(name, tensor), second.feed(name, tensor)
    assert made.live.read_expert(2).down_HI is not None
    first.finish()
    with pytest.raises(WeightError, match=r"given its weights by take\(\) or loader\(\)"):
        made.live.read_expert(2)
    made.live.set_placement(ExpertMap(((3, 1, 0, 2),), EXPERTS))
    with pytest.raises(WeightError, match=r"another placement after loader\(\) was called"):
        second.finish()


PARTS_OF_A_LOAD: dict[str, Callable[[MoELayer], object]] = {
    "experts": lambda made: made.kernel.experts,
    "shared experts": lambda made: made.state.backends.shared.experts,  # type: ignore[union-attr]
}


@pytest.mark.parametrize("part", PARTS_OF_A_LOAD)
def test_a_load_that_fails_in_any_part_changes_nothing(part: str) -> None:
    made = build.layer(EXPERTS, TOP_K, num_shared_experts=1, shared_gate=False, experts="torch_cpu")
    gated = replace(made.weights, shared_gate_H=torch.full((HIDDEN,), 0.25))
    other = replace(gated, gate_EH=made.weights.gate_EH.flip(0), shared_gate_H=torch.full((HIDDEN,), -1.0))
    made.take(gated)
    wanted, generation = made(tokens()), made.live.generation
    failing = mock.Mock(side_effect=MemoryError("no room"))
    with mock.patch.object(PARTS_OF_A_LOAD[part](made), "relayout", failing), pytest.raises(MemoryError):
        made.take(other)
    assert torch.equal(made(tokens()), wanted) and made.live.generation == generation
    made.take(other)
    assert not torch.equal(made(tokens()), wanted)


def test_one_warning_a_loss_and_none_where_calls_raise() -> None:
    layer = build.layer(EXPERTS, TOP_K, on_lost_expert="drop")
    alone = ExpertMap(((0, 1, 3),), EXPERTS, (1.0, 1.0, 1.0), frozenset({2}))
    with pytest.warns(FallbackWarning, match="expert 2 has no live copy; parallel.on_lost_expert = drop"):
        layer.live.set_placement(alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(tokens())
        dropped = layer.dropped_assignments
        layer.live.set_placement(alone)
        assert layer.dropped_assignments == dropped > 0
        refusing = build.layer(EXPERTS, TOP_K)
        refusing.live.set_placement(alone)
    with pytest.raises(LostExpertError, match="expert 2 has no live copy"):
        refusing(tokens())
    with pytest.raises(LostExpertError):
        refusing.forward_routed(tokens(), torch.ones(12, 2), torch.zeros(12, 2, dtype=torch.int64))


def test_experts_that_route_inside_leave_lost_ones_out_and_cannot_renormalise() -> None:
    alone = ExpertMap(((0, 1, 3),), EXPERTS, (1.0, 1.0, 1.0), frozenset({2}))
    made = [
        build.layer(EXPERTS, TOP_K, experts=experts, on_lost_expert=policy)
        for experts, policy in product(("reference", "reference_monolithic"), ("drop", "renormalise"))
    ]
    for each in made[::2]:
        with pytest.warns(FallbackWarning, match="expert 2 has no live copy"):
            each.live.set_placement(alone)
    torch.testing.assert_close(made[2](tokens()), made[0](tokens()))
    assert made[2].dropped_assignments == made[0].dropped_assignments > 0
    with pytest.raises(UnsupportedError, match="renormalise with reference_monolithic, which routes inside"):
        made[3].live.set_placement(alone)


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


BACKENDS = [("torch_cpu", "fp32"), pytest.param("cpu_native", "bf16", marks=NEEDS_COMPILER)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(experts: str, quant: str, given: dict[str, Tensor], **settings: object) -> MoELayer:
    settings = {"has_correction_bias": True, "experts": experts, "quant": {"weights": quant}} | settings
    return MoELayer(config(8, 2, **settings), dtype=DTYPES[quant]).load_weights(given)


def results(layer: MoELayer, x_TH: Tensor) -> list[Tensor]:
    """Every way to call it; the first of each kind prepares, the second uses that."""
    found = []
    for _ in range(2):
        routing = layer.route(x_TH)
        found += [routing.ids_TK, routing.weights_TK, layer(x_TH), layer(x_TH[:1])]
        found += [layer.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)]
    return found


@pytest.mark.parametrize("fused_router", quick_where(bool, [True, False]))
@pytest.mark.parametrize("name", ["weight_EH", "bias_E"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("experts,quant", BACKENDS)
def test_gate_and_bias_are_those_of_now(experts: str, quant: str, change: str, name: str, fused_router: bool) -> None:
    given = tensors(8, bias=True, dtype=DTYPES[quant])
    layer, x_TH = load(experts, quant, given, fused_router=fused_router), torch.randn(6, HIDDEN).to(DTYPES[quant])
    call = partial(results, layer, x_TH)
    before = call()
    held = getattr(layer.state.backends.gate, name)
    values = (-held).detach().clone()
    CHANGES[change](layer.state.backends.gate, name, values, call)
    key = {"weight_EH": "gate.weight", "bias_E": "gate.e_score_correction_bias"}[name]
    fresh = load(experts, quant, {**given, key: values}, fused_router=fused_router)
    for got, wanted in zip(call(), results(fresh, x_TH), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=1e-2)  # a strided gate is summed in another order
    assert not torch.equal(before[0], call()[0])


@NEEDS_COMPILER
def test_arguments_of_a_prepared_call_are_kept_for_a_bounded_number_of_sizes() -> None:
    layer = load("cpu_native", "bf16", tensors(8, bias=True, dtype=torch.bfloat16), max_num_tokens=1024)
    x_TH = torch.randn(MOST_SIZES + 8, HIDDEN).bfloat16()
    routing, wanted_TH = layer.route(x_TH), layer(x_TH)
    for rows in range(1, len(x_TH)):
        assert torch.equal(layer(x_TH[:rows]), wanted_TH[:rows])
        layer.forward_routed(x_TH[:rows], routing.weights_TK[:rows], routing.ids_TK[:rows])
    assert layer._prepared is not None
    call: Any
    for call in (layer._prepared.call, layer._prepared.alone):  # as where a tuned file has kernels by rows
        for rows in range(1, len(x_TH)):
            call._block_at(rows)
            assert 0 < len(call._of_rows) <= MOST_SIZES


@NEEDS_COMPILER
def test_a_prepared_call_refuses_a_gate_and_a_bias_with_strides() -> None:
    dense_EH, bias_E = torch.randn(8, 16), torch.randn(8)
    wide_EH, wide_E = torch.randn(8, 32)[:, ::2], torch.randn(16)[::2]
    for gate_EH, bias in ((wide_EH, bias_E), (dense_EH, wide_E), (wide_EH, None)):
        with pytest.raises(ShapeError, match=r"cpu route: strides .* expected contiguous ones"):
            RouteCall(loaded(), gate_EH, bias, RouteMode(2))
