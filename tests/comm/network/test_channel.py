"""The state of a channel: what it sends again over a new link, what it forgets; counters, a word for each source."""

import pytest
import torch

from moe_mk.comm.network.channel import Channel, Stream
from moe_mk.comm.network.command import CommandRing, TransferCommand, ring_bytes
from moe_mk.comm.network.frames import Frame, Kind
from tests.support.network_ends import COUNTERS, FLAG_BYTES, FLAGS, RANKS, links, own_window, put, store


def a_channel(*commands: TransferCommand) -> Channel:
    ring = CommandRing(torch.zeros(ring_bytes(9), dtype=torch.uint8), 9)
    channel = Channel(0, ring, [1, 2])
    for peer in (1, 2):
        channel.begin_anew(peer, links("shuffled")[0], 0)
    for command in commands:
        ring.push(command)
    channel.take(9)
    return channel


def test_what_a_peer_has_not_applied_is_sent_again_in_order_and_the_rest_is_done() -> None:
    commands = [store(1, 0, 5), store(2, 0, 6), put(1, 0, 0, 8), store(1, 1, 7)]
    channel = a_channel(*commands)
    assert [(m.peer, m.kind, m.size) for m in channel.backlog] == [(1, 2, 0), (2, 2, 0), (1, 2, 8)]
    while channel.backlog:
        message = channel.backlog.popleft()
        channel.streams[message.peer].frame(message)
    assert [taken.number for taken in channel.taken] == [0, 0, 1, 1]
    channel.begin_anew(1, links("shuffled")[0], 1)  # rank 1 has the first of its groups
    assert channel.ring.tail == 1, "the command to rank 2 is not confirmed, and nothing behind it is freed"
    assert [taken.number for taken in channel.taken] == [0, None, None]
    (again,) = channel.backlog
    assert [taken.command for taken in again.taken] == [commands[2], commands[3]]
    assert channel.streams[1].frame(again).number == 1
    channel.begin_anew(2, links("shuffled")[0], 1)
    assert channel.ring.tail == 2 and not channel.is_idle
    channel.begin_anew(1, links("shuffled")[0], 2)
    assert channel.ring.tail == 4 and channel.is_idle and not channel.backlog


def test_parts_that_came_over_an_old_link_do_not_count_for_groups_cut_anew() -> None:
    stream = Stream()
    stream.inbox.part(0, 0)
    stream.begin_anew(links("shuffled")[0], 0)
    stream.inbox.control(0, 1, Frame(Kind.FENCE))
    assert stream.inbox.ready() == []


def test_commands_behind_others_that_wait_are_no_news() -> None:
    channel = a_channel(store(1, 0, 1))
    assert not channel.has_news and not channel.is_idle
    channel.ring.push(store(1, 0, 2))
    assert not channel.has_news, "the first has to go before the second is read"
    channel.backlog.clear()
    assert channel.has_news


@pytest.mark.row(156)
def test_every_source_has_a_word_of_its_own_and_the_counter_is_their_sum() -> None:
    window = own_window(64)
    for source in range(RANKS):
        window.add(source, 1, 10**source)
        window.add(source, 1, 10**source)
    words = [window.words.load((FLAGS + n) * FLAG_BYTES) for n in range(COUNTERS * RANKS)]
    assert words == [0, 0, 0, 0, 2, 20, 200, 2000]
    assert window.counter(1) == 2222 and window.counter(0) == 0


def test_sums_go_around_at_64_bits() -> None:
    window = own_window(64)
    window.add(0, 0, (1 << 64) - 1)
    window.add(1, 0, 3)
    assert window.counter(0) == 2
    window.add(0, 0, 5)
    assert window.counter(0) == 7
