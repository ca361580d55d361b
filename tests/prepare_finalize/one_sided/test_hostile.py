"""Words that a peer must not write, in the windows of two ranks of one process: CommError by kernels and by torch."""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.comm import LockstepWorld
from moe_mk.comm.symmetric.flags import FAILED
from moe_mk.errors import CommError
from moe_mk.flight import Flight, interleave, wait
from moe_mk.kernels.native import exchange
from moe_mk.kernels.native.selfcheck import loaded, reasons_against
from moe_mk.prepare_finalize.one_sided.buffers import COUNT_MASK, LAYER_AT, OneSidedBufferSlot
from moe_mk.prepare_finalize.one_sided.transport import OneSided
from moe_mk.quant import FP32
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import Routing, RowTokens
from tests.prepare_finalize.one_sided.test_processes import WIRES
from tests.support.one_sided_ranks import EXPERTS, TOP_K, context, drawn, scaled

ROOM, SLOTS, TOKENS = 6, EXPERTS // 2, 4
INT_MAX, INT_MIN = 0x7FFFFFFF, -0x80000000
NAMES = [wire.name for wire, _ in WIRES]


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(exchange, "ready", lambda: None)
    elif reasons := reasons_against():
        pytest.skip("; ".join(reasons))
    else:
        loaded()
    return str(request.param)


def two_ranks(wire: QuantScheme = FP32, dtype: Plain = FP32) -> list[OneSided]:
    made = []
    for comm in LockstepWorld(2).communicators():
        comm.layer = "layers.3"
        made.append(OneSided(replace(context(comm, wire=wire, dtype=dtype), max_num_tokens=ROOM)))
    return made


def buffer_of(transport: OneSided, way: str) -> OneSidedBufferSlot:
    (buffer,) = transport._pool.slots
    assert (buffer.exchange is not None) == (way == "kernels")
    return buffer


def dispatching(
    way: str, wire: QuantScheme = FP32, dtype: Plain = FP32
) -> tuple[list[OneSided], list[Flight[Any]], OneSidedBufferSlot]:
    """Two ranks that have sent their tokens and not received, and the buffer of rank 1."""
    made = two_ranks(wire, dtype)
    flights = [t.prepare(*drawn(rank, TOKENS, dtype.dtype)) for rank, t in enumerate(made)]
    for flight in flights:
        next(flight)
    return made, flights, buffer_of(made[1], way)


def combining() -> tuple[list[OneSided], list[tuple[Tensor, Routing]], list[Flight[Tensor]]]:
    """Two ranks that have sent their sums and not added up, and their batches."""
    made, batches = two_ranks(), [drawn(rank, TOKENS, torch.float32) for rank in range(2)]
    tokens = interleave([t.prepare(*batch) for t, batch in zip(made, batches, strict=True)])
    flights = [t.finalize(scaled(each, torch.float32), each) for t, each in zip(made, tokens, strict=True)]  # type: ignore[arg-type]
    for flight in flights:
        next(flight)
    return made, batches, flights


def refusal(word: int, in_limits: str) -> str:
    """How a flag is refused that a peer fills with an int32: 24 bits of rows below 8 of the layer's number, here 0."""
    if word == FAILED:
        return "its call failed: the cause is not known"
    if layer := word >> LAYER_AT:
        return (
            f"epoch 1: is in a call of layer number {layer}, this rank in one of 0 (modulo 255); all ranks must make "
            "the same calls, from one thread"
        )
    return f"epoch 1: {in_limits}"


@pytest.mark.parametrize("value", [ROOM + 1, COUNT_MASK, INT_MAX, -1, INT_MIN])
def test_a_count_beyond_the_region_of_its_source_is_refused(way: str, value: int) -> None:
    _, flights, buffer = dispatching(way)
    buffer.heap.signal(0, 1, buffer.epoch, value & FAILED)
    text = refusal(value & FAILED, f"sent {value} rows into a region of {ROOM}")
    with pytest.raises(CommError) as caught:
        wait(flights[0])
    assert str(caught.value) == f"rank 0, phase 'dispatch', layer 'layers.3', peer 1: {text}"


def test_a_full_region_is_no_error(way: str) -> None:
    _, flights, buffer = dispatching(way)
    buffer.heap.signal(0, 1, buffer.epoch, ROOM)
    tokens = wait(flights[0])
    assert isinstance(tokens, RowTokens) and tokens.x_RH.values.shape[0] >= ROOM


@pytest.mark.parametrize("receiver", [0, 1])
@pytest.mark.parametrize("offset", [1, COUNT_MASK, INT_MAX, -1, INT_MIN])
def test_an_offset_beyond_the_sums_of_a_peer_is_refused(way: str, receiver: int, offset: int) -> None:
    # Before the sums for rank r lie those for the ranks before it, ROOM for each at most.
    limit, peer = receiver * ROOM, 1 - receiver
    value = limit + 1 if offset == 1 else offset & FAILED
    made, batches, flights = combining()
    buffer = buffer_of(made[peer], way)
    buffer.heap.signal(receiver, 2 + peer, buffer.epoch, value)
    text = refusal(
        value, f"its sums for this rank begin at row {value}, at most {limit} rows of other ranks precede them"
    )
    with pytest.raises(CommError) as caught:
        wait(flights[receiver])
    assert str(caught.value) == f"rank {receiver}, phase 'combine', layer 'layers.3', peer {peer}: {text}"
    with pytest.raises(CommError, match="an earlier call over this group failed"):
        wait(made[receiver].prepare(*batches[receiver]))


def test_the_largest_offset_reads_inside_the_window(way: str) -> None:
    made, batches, flights = combining()
    buffer = buffer_of(made[0], way)
    buffer.heap.signal(1, 2, buffer.epoch, ROOM)
    assert wait(flights[1]).shape == batches[1][0].shape


@pytest.mark.parametrize("wire,dtype", WIRES, ids=NAMES)
def test_a_slot_that_this_rank_does_not_have_is_refused(way: str, wire: QuantScheme, dtype: Plain) -> None:
    draw = random.Random(0)
    for value in (SLOTS, INT_MAX, -2, INT_MIN, *(draw.randrange(SLOTS, INT_MAX) for _ in range(3))):
        made, flights, buffer = dispatching(way, wire, dtype)
        size = made[1]._size
        row, k = (
            draw.randrange(buffer.heap._words.load(buffer.heap._flag_at(0, 1)) & 0xFFFFFFFF),
            draw.randrange(TOP_K),
        )
        at = buffer.tails_at[1] + row * size.tail + size.scales + 4 * k
        buffer.heap.data(0, at, 4).copy_(torch.tensor([value], dtype=torch.int32).view(torch.uint8))
        text = f"epoch 1: row {row} is for slot {value}, out of range (0 <= slot < {SLOTS}, or -1 for no expert here)"
        with pytest.raises(CommError) as caught:
            wait(flights[0])
        assert str(caught.value) == f"rank 0, phase 'dispatch', layer 'layers.3', peer 1: {text}"


@pytest.mark.parametrize("wire,dtype", WIRES, ids=NAMES)
def test_scales_weights_and_values_are_data_whatever_their_bits(way: str, wire: QuantScheme, dtype: Plain) -> None:
    made, flights, buffer = dispatching(way, wire, dtype)
    size = made[1]._size
    count = buffer.heap._words.load(buffer.heap._flag_at(0, 1)) & 0xFFFFFFFF
    tails = buffer.heap.data(0, buffer.tails_at[1], count * size.tail).view(count, size.tail)
    tails[:, : size.scales] = tails[:, size.scales + 4 * TOP_K :] = 0xFF
    buffer.heap.data(0, buffer.out_at(0, count), count * size.values).fill_(0xFF)
    tokens = wait(flights[0])
    assert isinstance(tokens, RowTokens)
    assert bool(tokens.weights_RK[-count:].isnan().all()) and tokens.ids_RK.amin() >= -1


@contextmanager
def rewriting(buffer: OneSidedBufferSlot, flag: int, honest: int, hostile: int, slot_at: int) -> Iterator[None]:
    """A peer that stores its flag at rank 0 over and over, and a slot in the tail of a row, honest and hostile."""
    slot, done = buffer.heap.data(0, slot_at, 4).numpy().view("int32"), threading.Event()
    good = int(slot[0])

    def store() -> None:
        while not done.is_set():
            for count, number in ((hostile, INT_MAX), (honest, good)):
                buffer.heap.signal(0, flag, buffer.epoch, count)
                slot[0] = number

    thread, before = threading.Thread(target=store), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)


@pytest.mark.parametrize("wire,dtype", WIRES, ids=NAMES)
def test_words_that_change_during_a_call_give_the_right_rows_or_an_error(
    way: str, wire: QuantScheme, dtype: Plain
) -> None:
    batches = [drawn(rank, TOKENS, dtype.dtype) for rank in range(2)]
    honest = two_ranks(wire, dtype)
    (rows, _), (y_TH, _) = both_halves(honest, batches)
    outcomes = []
    for _ in range(12):
        made, flights, buffer = dispatching(way, wire, dtype)
        tails, count = (buffer.tails_at[1], buffer.heap._words.load(buffer.heap._flag_at(0, 1)) & 0xFFFFFFFF)
        with rewriting(buffer, 1, count, ROOM + 1, tails + made[1]._size.scales):
            outcomes.append(outcome_of(flights[0]))
        found = outcomes[-1]
        if isinstance(found, CommError):
            continue
        assert isinstance(found, RowTokens) and torch.equal(found.ids_RK, rows.ids_RK)
        assert torch.equal(found.x_RH.values.view(torch.uint8), rows.x_RH.values.view(torch.uint8))
        other = wait(flights[1])
        finals = [t.finalize(scaled(x, dtype.dtype), x) for t, x in zip(made, (found, other), strict=True)]  # type: ignore[arg-type]
        for flight in finals:
            next(flight)
        with rewriting(buffer, 2 + 1, 0, 1, tails + made[1]._size.scales):
            outcomes.append(outcome_of(finals[0]))
        assert isinstance(outcomes[-1], CommError) or torch.equal(outcomes[-1], y_TH)  # type: ignore[arg-type]
    assert {type(found) for found in outcomes} <= {CommError, RowTokens, torch.Tensor}


def both_halves(made: list[OneSided], batches: list[tuple[Tensor, Routing]]) -> tuple[list[RowTokens], list[Tensor]]:
    """What ranks receive, copied, and what returns to them."""
    tokens = interleave([t.prepare(*batch) for t, batch in zip(made, batches, strict=True)])
    rows = [each for each in tokens if isinstance(each, RowTokens)]
    kept = [replace(each, x_RH=replace(each.x_RH, values=each.x_RH.values.clone())) for each in rows]
    dtype = made[0].context.dtype.dtype
    combined = [t.finalize(scaled(each, dtype), each) for t, each in zip(made, rows, strict=True)]
    return kept, interleave(combined)


def outcome_of(flight: Flight[Any]) -> object:
    try:
        return wait(flight)
    except CommError as error:
        return error
