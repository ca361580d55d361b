"""A recorder listens to real layers: outputs stay, ids are those the layer used, and a replay gives them again."""

import copy

import pytest
import torch

from moe_mk import ConfigError, MoELayer, ParallelGroups
from moe_mk.comm import LockstepWorld
from moe_mk.flight import interleave
from moe_mk.lab.trace.routing import RoutingRecorder, TraceError, TraceFacts
from moe_mk.tokens import Routing
from tests.support.rebalance_world import EXPERTS, HIDDEN, config, tensors

FACTS = TraceFacts(EXPERTS, 2)


@pytest.fixture
def layers() -> list[MoELayer]:
    torch.set_grad_enabled(False)
    made = [
        MoELayer(config(placement="linear"), dtype=torch.float32, name=f"layer {x}").load_weights(tensors(x))
        for x in range(2)
    ]
    yield made
    torch.set_grad_enabled(True)


def batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(tokens, HIDDEN, generator=draw) for tokens in (6, 0, 3)]


@pytest.mark.row(9)
def test_the_trace_holds_the_ids_that_every_layer_used(layers: list[MoELayer]) -> None:
    recorder = RoutingRecorder(FACTS)
    with recorder.listening({3: layers[0], 4: layers[1]}):
        for number, x in enumerate(batches()):
            recorder.next_step("decode" if number else "prefill")
            layers[1](layers[0](x))
    trace = recorder.take()
    assert [(f.step, f.layer, f.phase, len(f.ids_TK)) for f in trace.forwards()] == [
        (0, 3, "prefill", 6), (0, 4, "prefill", 6), (1, 3, "decode", 0), (1, 4, "decode", 0),
        (2, 3, "decode", 3), (2, 4, "decode", 3),
    ]  # fmt: skip
    for x, forward in zip(batches(), trace.filter(layers=[3]).forwards(), strict=True):
        routing = layers[0].route(x)
        assert torch.equal(forward.ids_TK.int(), routing.ids_TK)
        assert forward.weights_TK is not None and torch.equal(forward.weights_TK, routing.weights_TK)
    assert trace.loads().tolist() == [layer.expert_load.tolist() for layer in layers]


@pytest.mark.row(9)
def test_the_trace_holds_logical_ids_whatever_the_placement() -> None:
    world, x = LockstepWorld(2), batches()[0]
    dealt = [
        MoELayer(
            config(placement="round_robin", prepare_finalize="all_to_all"), dtype=torch.float32,
            groups=ParallelGroups(ep=comm),
        ).load_weights(tensors(0))
        for comm in world.communicators()
    ]  # fmt: skip
    recorder = RoutingRecorder(FACTS)
    with torch.no_grad(), recorder.listening({0: dealt[0]}):
        interleave([layer.steps(x) for layer in dealt])
    (forward,) = recorder.take().forwards()
    assert torch.equal(forward.ids_TK.int(), dealt[0].route(x).ids_TK)


def test_listening_changes_no_bit_of_the_output_and_ends_with_the_block(layers: list[MoELayer]) -> None:
    x, recorder = batches()[0], RoutingRecorder(FACTS)
    alone = layers[0](x)
    with recorder.listening({0: layers[0]}):
        assert torch.equal(layers[0](x), alone)
        with (
            pytest.raises(ConfigError, match=r"layers \[0\] are recorded already"),
            RoutingRecorder(FACTS).listening({0: layers[0]}),
        ):
            pass
        with pytest.raises(RuntimeError, match="the engine failed"), recorder.listening({1: layers[1]}):
            raise RuntimeError("the engine failed")
    assert layers[0].on_routing is None and layers[1].on_routing is None
    layers[0](x)
    assert recorder.take().num_forwards == 1 and recorder.take().num_forwards == 0


@pytest.mark.row(9, "N10")
def test_a_replay_through_the_layer_gives_the_same_output(layers: list[MoELayer]) -> None:
    layer, recorder = layers[0], RoutingRecorder(FACTS)
    with recorder.listening({0: layer}):
        outputs = [layer(x) for x in batches()]
    trace = recorder.take()
    # An engine that routes by itself, and a router that replays: both without the gate's say.
    for x, y, forward in zip(batches(), outputs, trace.forwards(), strict=True):
        routing = forward.routing()
        assert torch.equal(layer.forward_routed(x, routing.weights_TK, routing.ids_TK), y)
    layer.router = trace.router(0)  # type: ignore[assignment]
    for x, y in zip(batches(), outputs, strict=True):
        assert torch.equal(layer(x), y)


def test_what_an_engine_routed_itself_is_recorded_too(layers: list[MoELayer]) -> None:
    recorder, ids = RoutingRecorder(FACTS, weights=False), torch.tensor([[7, -1], [2, 0]])
    with recorder.listening({0: layers[0]}):
        layers[0].forward_routed(torch.ones(2, HIDDEN), torch.full((2, 2), 0.5), ids)
    trace = recorder.take()
    assert trace.ids_RK.tolist() == ids.tolist() and trace.weights_RK is None


def test_what_is_recorded_is_a_copy(layers: list[MoELayer]) -> None:
    recorder, ids = RoutingRecorder(FACTS), torch.tensor([[0, 1]], dtype=torch.int32)
    weights, tokens = torch.ones(1, 2), torch.tensor([11])
    recorder.next_step("prefill", tokens)
    recorder.record(0, Routing(ids, weights))
    ids.fill_(5), weights.fill_(0.0), tokens.fill_(0)
    trace = recorder.take()
    assert trace.ids_RK.tolist() == [[0, 1]] and trace.weights_RK.tolist() == [[1.0, 1.0]]
    assert trace.token_ids_R.tolist() == [11]


def test_steps_count_up_or_are_given() -> None:
    recorder, routing = RoutingRecorder(FACTS), Routing(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2))
    recorder.record(0, routing)  # before any step was named: step 0
    for step in (None, None, 40, None):
        recorder.next_step("decode", step=step)
        recorder.record(0, routing)
    assert recorder.take().step_X.tolist() == [0, 1, 2, 40, 41]
    recorder.record(0, routing)
    assert recorder.take().step_X.tolist() == [41]


def test_a_copy_of_a_layer_listens_to_nobody(layers: list[MoELayer]) -> None:
    recorder = RoutingRecorder(FACTS)
    with recorder.listening({0: layers[0]}):
        assert copy.deepcopy(layers[0]).on_routing is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="routing cannot be recorded: rank=2 is none of 1"):
        RoutingRecorder(FACTS, rank=2)
    with pytest.raises(ConfigError, match="top_k=9 is above num_experts=8"):
        RoutingRecorder(TraceFacts(8, 9))
    recorder = RoutingRecorder(FACTS)
    with pytest.raises(TraceError, match="layer 1 routes to 3 experts, facts say 2"):
        recorder.record(1, Routing(torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, 3)))
    recorder.next_step("prefill", torch.tensor([1, 2]))
    with pytest.raises(TraceError, match=r"layer 1 routed 1 tokens, next_step\(\) was called with 2"):
        recorder.record(1, Routing(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)))
    with pytest.raises(ConfigError, match="did you mean 'prefill'"):
        recorder.next_step("prefil")  # type: ignore[arg-type]


def test_nothing_waits_for_the_device_while_recording() -> None:
    """On a device that cannot be read, recording works and only `take` would have to read."""
    recorder = RoutingRecorder(FACTS)
    recorder.record(0, Routing(torch.empty(4, 2, dtype=torch.int32, device="meta"), torch.empty(4, 2, device="meta")))
    with pytest.raises(NotImplementedError):
        recorder.take()
