"""DeepEP high throughput over its emulation: the order of a call, graphs without counts, limits, bytes."""

import pytest
import torch

from moe_mk.prepare_finalize.deepep import high_throughput
from moe_mk.prepare_finalize.deepep.high_throughput import DeepEPHighThroughput
from moe_mk.quant import FP32, FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.tensor import QuantScheme
from tests.support.deepep_ranks import XB, asked, ranks_of, small
from tests.support.library_ranks import live_rows, reported

NAME = "deepep_ht"
A, B, C = (1.0, 2.0), (3.0, 4.0), (5.0, 6.0)


@pytest.mark.parametrize("wire", [FP8_1x128, FP8_1x128_UE8M0], ids=lambda wire: wire.name)
def test_rows_are_quantised_before_they_travel(wire: QuantScheme) -> None:
    x = [torch.randn(len(rows), 192, generator=torch.Generator().manual_seed(1)).bfloat16() for rows in XB]
    sent = []
    ranks = ranks_of(NAME, wire, hidden=192)
    for transport in ranks.transports:
        surface = transport._session.buffer
        call = surface.dispatch
        surface.dispatch = lambda needed, options, call=call: (sent.append(needed["x"]), call(needed, options))[1]
    first, _ = ranks.dispatched(x)
    # 192 values travel as 256 bytes; two scales, or two exponents in a word of four.
    words = 1 if wire.ue8m0 else 2
    assert {(v.shape[1], s.shape[1], s.element_size()) for v, s in sent} == {(256, words, 4)}
    assert torch.equal(first.x_RH.dequantize(torch.float32)[1], wire.quantize(x[1]).dequantize(torch.float32)[0])


def test_in_a_graph_nothing_is_counted_and_room_is_for_the_worst_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(high_throughput, "capturing", lambda device: True)
    ranks = ranks_of(NAME)
    tokens = ranks.dispatched(XB)
    assert [len(t.x_RH.values) for t in tokens] == [2 * 4, 2 * 4]  # ranks x most tokens
    assert bool((tokens[0].ids_RK[2:] == -1).all()) and bool((tokens[0].weights_RK[2:] == 0).all())
    assert bool(tokens[0].x_RH.values[2:].isnan().all()), "nobody wrote there, and nobody may read there"
    assert live_rows(tokens[0]) == [(A, (0, -1), (0.5, 0.0)), (C, (0, 1), (0.75, 0.125))]
    first, second = ranks.combined([t.x_RH.values for t in tokens], tokens)
    assert first.tolist() == [[2.0, 4.0], [3.0, 4.0], [0.0, 0.0]] and second.tolist() == [[5.0, 6.0]]


@pytest.mark.row(45)
def test_layout_then_dispatch_then_combine_and_sizes_are_known_before_rows_are_read() -> None:
    ranks, log = ranks_of(NAME), []
    surface = ranks.transports[0]._session.buffer
    for stage in ("layout", "dispatch", "combine"):
        call = getattr(surface, stage)

        def logged(needed: object, options: object = None, call: object = call, stage: str = stage) -> object:
            made = call(needed, options)  # type: ignore[operator]
            if stage == "dispatch":
                rows, _, _, counts, _, event = made
                log.append(f"dispatch of {len(rows)} rows, {counts}")
                log.append(f"not here yet: {bool(rows.isnan().all())}, {event.event.waits} waits")
            else:
                log.append(stage)
            return made

        setattr(surface, stage, logged)
    tokens = ranks.dispatched(XB)
    ranks.combined([t.x_RH.values for t in tokens], tokens)
    assert log == ["layout", "dispatch of 2 rows, [2, 1]", "not here yet: True, 0 waits", "combine"]


@pytest.mark.row(95)
@pytest.mark.parametrize("batches", [1, 2], ids=["one batch", "two micro-batches"])
def test_every_library_call_finishes_later_and_is_waited_for_once_before_its_rows_are_read(batches: int) -> None:
    ranks, events = ranks_of(NAME), []
    for transport in ranks.transports:
        for stage in ("dispatch", "combine"):
            surface = transport._session.buffer
            call = getattr(surface, stage)

            def logged(needed: dict[str, object], options: object = None, call: object = call) -> object:
                made = call(needed, options) if options is not None else call(needed)  # type: ignore[operator]
                events.append((needed["async_finish"], made[-1].event, made[-1].event.waits))
                return made

            setattr(surface, stage, logged)
    for _ in range(batches):
        tokens = ranks.dispatched(XB)
        first, second = ranks.combined([t.x_RH.values for t in tokens], tokens)
        assert first.tolist() == [[2.0, 4.0], [3.0, 4.0], [0.0, 0.0]] and second.tolist() == [[5.0, 6.0]]
    assert len(events) == batches * 2 * 2
    assert all(asked is True and waits_before == 0 for asked, _, waits_before in events)
    assert [event.waits for _, event, _ in events] == [1] * len(events)


def test_planned_bytes_do_not_grow_with_tokens() -> None:
    # EP8: 10 channels x 8 peers x 256 tokens of 14336 + 8 + 1024 + 512 + 512 bytes, and 20 bytes of counters each.
    queue = 10 * 8 * (256 * 16392 + 20)
    assert DeepEPHighThroughput.buffer_bytes(asked()) == -(-queue // 128) * 128 == 335_709_824
    assert DeepEPHighThroughput.buffer_bytes(asked(num_tokens=4096)) == 335_709_824
    # EP32: 288 tokens deep, 4 nodes; and RDMA queues of 128 tokens with 16 bytes more, to and from each node.
    near = 10 * 8 * (288 * 16392 + 44)
    far = 2 * 10 * 4 * (128 * (16392 + 16) + 72)
    assert DeepEPHighThroughput.buffer_bytes(asked(ep=32)) == sum(-(-part // 128) * 128 for part in (near, far))


def test_every_limit_is_reported() -> None:
    assert (
        reported(NAME, asked()) == {}
        and reported(NAME, asked(ep=32)) == {}
        and reported(NAME, asked(graphs=True)) == {}
    )
    assert reported(NAME, small(hidden=8320, top_k=12, deterministic=True)) == {}
    assert "is tuned for 2, 4, 8, 16, 24" in reported(NAME, small(experts=60, ep=12))["ranks"]
    assert "8 ranks must share a node, they span 2" in reported(NAME, asked(ranks_per_node=4))["fabric"]
    assert "takes nodes of 8 ranks, these have 4" in reported(NAME, asked(ep=32, ranks_per_node=4))["fabric"]
    assert "no CUDA graph can capture" in reported(NAME, asked(ep=32, graphs=True))["graphs"]
    assert "carries bf16 rows" in reported(NAME, asked(dtype=FP32))["dtype"]
