"""Commands to messages: what is merged, what is not, and what rides along."""

import random

import pytest

from moe_mk.comm.network.channel import Message, Taken, messages_of
from moe_mk.comm.network.command import Op, TransferCommand
from moe_mk.comm.network.frames import Kind
from tests.support.network_ends import add, put, store


def made(*commands: TransferCommand, most_bytes: int = 1 << 20) -> list[Message]:
    return messages_of([Taken(command, place) for place, command in enumerate(commands)], most_bytes)


@pytest.mark.row(61)
def test_adjacent_rows_make_one_message_and_a_gap_makes_two() -> None:
    (one,) = made(put(1, 0, 500, 100), put(1, 100, 600, 100))
    assert (one.source, one.at, one.size, len(one.taken)) == (0, 500, 200, 2)
    assert len(made(put(1, 0, 500, 100), put(1, 120, 620, 100))) == 2, "a gap at the source and the target"
    assert len(made(put(1, 0, 500, 100), put(1, 100, 620, 100))) == 2, "a gap at the target"
    assert len(made(put(1, 0, 500, 100), put(1, 120, 600, 100))) == 2, "a gap at the source"
    assert len(made(put(1, 0, 500, 100), put(2, 100, 600, 100))) == 2, "another peer"
    assert len(made(put(1, 0, 500, 100), put(1, 100, 600, 100), most_bytes=199)) == 2, "more than a message holds"


@pytest.mark.row(61)
def test_rows_of_two_peers_in_turns_are_merged_for_each() -> None:
    rows = [put(peer, 100 * n, 100 * n, 100) for n in range(4) for peer in (1, 2)]
    assert [(m.peer, m.size) for m in made(*rows)] == [(1, 400), (2, 400)]


@pytest.mark.row(157)
@pytest.mark.parametrize("last,kind", [(store(1, 3, 77), Kind.STORE), (add(1, 3, 77), Kind.ADD)])
def test_a_flag_rides_on_the_write_before_it_and_halves_the_messages(last: TransferCommand, kind: Kind) -> None:
    apart = [message for command in (put(1, 0, 0, 64), last) for message in made(command)]
    (together,) = made(put(1, 0, 0, 64), last)
    assert len(apart) == 2
    assert (together.kind, together.size, together.flag, together.value) == (kind, 64, 3, 77)
    assert [taken.command for taken in together.taken] == [put(1, 0, 0, 64), last]


def test_nothing_passes_a_flag() -> None:
    kinds = [m.kind for m in made(put(1, 0, 0, 64), store(1, 0, 1), put(1, 64, 64, 64), store(1, 1, 1), store(1, 2, 1))]
    assert kinds == [Kind.STORE, Kind.STORE, Kind.STORE]
    get = TransferCommand(Op.GET, 1, 64, 128, 0)
    assert [m.kind for m in made(put(1, 0, 0, 64), get, store(1, 0, 1))] == [Kind.PAYLOAD, Kind.GET, Kind.STORE]


def test_every_byte_and_every_flag_is_in_the_messages_in_order() -> None:
    draw = random.Random(2)
    for _ in range(200):
        commands, at = [], 0
        for _ in range(draw.randint(0, 30)):
            if draw.random() < 0.6:
                commands.append(put(draw.randint(1, 2), at, at, size := draw.randint(1, 9)))
                at += size + draw.choice((0, 0, 3))
            else:
                commands.append(store(draw.randint(1, 2), draw.randint(0, 7), draw.randint(0, 99)))
        messages = made(*commands)
        for peer in (1, 2):
            own = [m for m in messages if m.peer == peer]
            assert [t.command for m in own for t in m.taken] == [c for c in commands if c.peer == peer]
            assert sum(m.size for m in own) == sum(c.size for c in commands if c.peer == peer)
