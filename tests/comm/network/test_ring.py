"""A ring between one producer and one consumer: by hand, around its end, and between two threads and two processes."""

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_mk.comm.network.command import COMMAND_BYTES, COMMANDS_AT, CommandRing, Op, Packed, TransferCommand, ring_bytes
from moe_mk.comm.symmetric.memory import attach, create, unlink
from moe_mk.errors import ShapeError
from moe_mk.lab.testing.on_ranks import run_ranks
from moe_mk.trace.clock import now


def packed(commands: list[TransferCommand]) -> Packed:
    """Commands in their memory format."""
    return np.array([command.pack() for command in commands], dtype=np.uint64).reshape(-1, 2)


def push_many(ring: CommandRing, commands_X2: Packed) -> int:
    """Commit as many commands as there is room for; returns how many."""
    count = min(ring._room(), len(commands_X2))
    first = ring._head % ring.capacity
    before_end = min(count, ring.capacity - first)
    ring._slots[first : first + before_end] = commands_X2[:before_end]
    ring._slots[: count - before_end] = commands_X2[before_end:count]
    if count:
        ring._commit(count)
    return count


def a_ring(capacity: int) -> tuple[CommandRing, CommandRing]:
    """Both ends."""
    memory = torch.zeros(ring_bytes(capacity), dtype=torch.uint8)
    return CommandRing(memory, capacity), CommandRing(memory, capacity)


def numbered(number: int) -> TransferCommand:
    return TransferCommand(Op.STORE, number % 256, flag=number % 4096, value=number)


@pytest.mark.row(150)
def test_three_places_by_hand() -> None:
    producer, consumer = a_ring(3)
    assert [producer.push(numbered(n)) for n in range(4)] == [True, True, True, False], "the fourth has no place"
    assert (consumer.head, consumer.tail) == (3, 0)
    assert consumer.read(0, 2).tolist() == [list(numbered(n).pack()) for n in (0, 1)]
    consumer.complete(2)
    assert [producer.push(numbered(n)) for n in (3, 4, 5)] == [True, True, False]
    # Places: command 3 lies where 0 was, 4 where 1 was, 2 is still there.
    assert consumer.read(2, 9).tolist() == [list(numbered(n).pack()) for n in (2, 3, 4)]


def test_a_ring_is_as_large_as_it_states() -> None:
    assert ring_bytes(5) == COMMANDS_AT + 80
    with pytest.raises(ShapeError, match="a ring of 5 commands takes 336 B, got 335 B"):
        CommandRing(torch.zeros(335, dtype=torch.uint8), 5)


@pytest.mark.row(150)
@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 100, 128])
def test_many_commands_go_around_the_end_in_order(capacity: int) -> None:
    producer, consumer = a_ring(capacity)
    draw, sent, got = random.Random(capacity), 0, 0
    while got < 3000:
        wanted = packed([numbered(sent + n) for n in range(draw.randint(0, capacity + 2))])
        sent += push_many(producer, wanted)
        assert sent - got <= capacity
        read = consumer.read(got, draw.randint(0, capacity))
        assert read[:, 1].tolist() == list(range(got, got + len(read)))
        got += len(read)
        consumer.complete(got)


def test_the_producer_looks_at_the_tail_only_when_the_ring_seems_full() -> None:
    producer, consumer = a_ring(4)
    looks = []
    load = producer._words.load
    producer._words.load = lambda at: (looks.append(at), load(at))[1]  # type: ignore[method-assign]
    for number in range(4):
        producer.push(numbered(number))
        consumer.complete(number + 1)
    assert not looks
    assert producer.push(numbered(4)) and len(looks) == 1


def stream(total: int, capacity: int, at_once: int) -> float:
    """Commands per second from a thread to another; every one is compared."""
    producer, consumer = a_ring(capacity)
    block = np.zeros((at_once, 2), dtype=np.uint64)
    block[:, 0] = TransferCommand(Op.STORE, 1).pack()[0]

    def produce() -> None:
        sent = 0
        while sent < total:
            count = min(at_once, total - sent)
            block[:count, 1] = np.arange(sent, sent + count, dtype=np.uint64)
            done = push_many(producer, block[:count])
            sent += done
            if not done:
                time.sleep(0)

    start, got, thread = now(), 0, threading.Thread(target=produce)
    thread.start()
    while got < total:
        read = consumer.read(got, at_once)
        assert np.array_equal(read[:, 1], np.arange(got, got + len(read), dtype=np.uint64))
        got += len(read)
        consumer.complete(got)
        if not len(read):
            time.sleep(0)
    thread.join()
    assert consumer.head == consumer.tail == total
    return total / (now() - start)


@pytest.mark.row(150, 153)
def test_ten_million_commands_between_threads() -> None:
    rate = stream(10_000_000, 4099, 1500)
    print(f"{rate / 1e6:.2f} M commands/s, {rate * 16 / 1e6:.0f} MB/s of commands")
    assert rate > 0
    assert 50e6 * COMMAND_BYTES == 0.8e9, "what 50 M commands/s take of memory bandwidth"


def one_produces_one_consumes(rank: int, name: str, total: int, capacity: int) -> int:
    memory = attach(name, ring_bytes(capacity))
    ring, number, until = CommandRing(memory.bytes, capacity), 0, now() + 30.0
    while number < total:
        if rank == 0:
            count = push_many(ring, packed([numbered(number + n) for n in range(min(50, total - number))]))
        else:
            read = ring.read(number, 50).tolist()
            count = len(read)
            if any(TransferCommand.unpack(*words) != numbered(number + n) for n, words in enumerate(read)):
                return -1
        number += count
        if rank == 1:
            ring.complete(number)
        assert count or now() < until
        if not count:
            time.sleep(0)
    return number


@pytest.mark.row(150)
def test_commands_between_processes(tmp_path: Path) -> None:
    capacity, total = 333, 20_000
    name, _ = create(ring_bytes(capacity))
    try:
        assert run_ranks(one_produces_one_consumes, 2, name, total, capacity) == [total, total]
    finally:
        unlink(name)
