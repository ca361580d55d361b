"""One suite for every link: what is put is there when its flag is seen, whatever carries it and in whatever order."""

import contextlib
import random
from dataclasses import replace
from unittest.mock import Mock

import pytest

from moe_mk.comm.network.command import Op, TransferCommand
from moe_mk.comm.network.frames import WINDOW, Frame, FrameError, Kind, LinkEnded, LinkError
from moe_mk.comm.network.link import Link, PipeLink
from moe_mk.comm.network.tcp import TcpPipe
from tests.support.network_ends import FLAGS, KINDS, End, add, joined, links, put, run, store
from tests.support.network_shuffled import ShuffledLink


def turns(*ends: End) -> None:
    for _ in range(50):
        for end in ends:
            end.turn()


def fill(end: End, seed: int) -> None:
    draw = random.Random(seed)
    end.window.registered[:] = draw.randbytes(end.window.registered.nbytes)


@pytest.mark.row(149)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_put_is_there_when_its_flag_is_seen(kind: str) -> None:
    zero, one = joined(kind)
    fill(zero, 0)
    zero.commit(put(1, 100, 9000, 5000), put(1, 7, 0, 3), store(1, 2, 41))
    run(zero, one)
    assert one.flag(2) == 41
    assert one.window.registered[9000:14000] == zero.window.registered[100:5100]
    assert bytes(one.window.registered[:4]) == bytes(zero.window.registered[7:10]) + b"\0"


@pytest.mark.row(149, 154, 155)
@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_is_seen_after_all_that_was_put_before_it(kind: str) -> None:
    """Pages of one number, too far apart to be merged; whenever a flag shows, all pages up to it are whole."""
    for seed in range(3):
        zero, one = joined(kind, seed)
        draw, pages, last_of_flag, written = random.Random(seed), 0, [0] * FLAGS, [0]
        seen_wrong: list[int] = []

        def look(end: End = one, wrong: list[int] = seen_wrong, counts: list[int] = written) -> None:
            for flag in range(FLAGS):
                word = end.flag(flag)
                wrong += [
                    n for n in range(1, counts[word] + 1) if set(end.window.registered[n * 60 : n * 60 + 50]) != {n}
                ]

        for number in range(1, 60):
            for _ in range(draw.randint(0, 3)):
                pages = min(pages + 1, 250)
                zero.window.registered[pages * 60 : pages * 60 + 50] = bytes([pages]) * 50
                zero.commit(put(1, pages * 60, pages * 60, 50))
            written.append(pages)
            last_of_flag[flag := draw.randrange(FLAGS)] = number
            zero.commit(store(1, flag, number))
            for end in draw.sample((zero, one), draw.randint(0, 2)):
                end.turn()
            look()
        run(zero, one)
        look()
        assert not seen_wrong
        assert [one.flag(flag) for flag in range(FLAGS)] == last_of_flag


@pytest.mark.row(155)
def test_payload_came_in_any_order() -> None:
    """The fuzz above states something only if the link shuffles across groups."""
    zero, one = joined("shuffled", 5)
    for n in range(40):
        zero.commit(put(1, 100 * n, 50 * n, 40), put(1, 7000 + n, 9000 + 2 * n, 1), store(1, n % FLAGS, n))
    run(zero, one)
    assert isinstance(one.link, ShuffledLink)
    numbers = [frame.number for frame in one.link.order if frame.kind in (Kind.PAYLOAD, Kind.STORE)]
    assert numbers != sorted(numbers) and sorted(set(numbers)) == list(range(40))
    late = [n for place, n in enumerate(numbers) if n < max(numbers[: place + 1])]
    assert len(late) > 10


@pytest.mark.row(156)
@pytest.mark.parametrize("kind", KINDS)
def test_a_counter_is_the_sum_of_what_was_added(kind: str) -> None:
    zero, one = joined(kind, 3)
    numbers = [random.Random(n).randint(0, 1 << 40) for n in range(200)]
    for n, number in enumerate(numbers):
        zero.commit(*([put(1, 0, 64 * (n % 9), 64)] if n % 3 else []), add(1, 1, number))
        one.commit(add(0, 0, 2))
    run(zero, one)
    assert one.window.counter(1) == sum(numbers) and one.window.counter(0) == 0
    assert zero.window.counter(0) == 400


@pytest.mark.row(157)
def test_an_atomic_that_rides_along_halves_the_messages_and_is_seen_after_its_bytes() -> None:
    together, other = joined()
    apart, another = joined()
    for n in range(1, 50):
        for end in (together, apart):
            end.window.registered[n * 64 : n * 64 + 64] = bytes([n]) * 64
            end.commit(put(1, n * 64, n * 64, 64))
            if end is apart:  # the proxy reads it before the atomic is there
                end.turn()
            end.commit(add(1, 0, 1))
            end.turn()
        for end in (other, another):
            end.turn()
            seen = end.window.counter(0)
            assert all(set(end.window.registered[m * 64 : m * 64 + 64]) == {m} for m in range(1, seen + 1))
    run(together, other)
    run(apart, another)
    assert other.window.counter(0) == another.window.counter(0) == 49
    assert (together.exchange.watch.messages[1], apart.exchange.watch.messages[1]) == (49, 98)


def test_a_late_duplicate_does_not_overwrite_what_came_after_it() -> None:
    zero, one = joined()
    for number, byte in ((0, b"old"), (1, b"new"), (0, b"old")):
        zero.link.post(Frame(Kind.STORE, number, 0, 1, 3, 500, 0, number + 1), memoryview(byte))
    turns(zero, one)
    assert bytes(one.window.registered[500:503]) == b"new" and one.flag(0) == 2


@pytest.mark.parametrize("last", [put(1, 0, 0, 10), TransferCommand(Op.GET, 1, 10, 0, 0)])
def test_what_somebody_may_wait_for_is_confirmed_at_once(last: TransferCommand) -> None:
    zero, one = joined()
    zero.commit(last)
    zero.turn()
    zero.exchange.close_groups()
    turns(zero, one)
    assert zero.is_done


@pytest.mark.row(162)
def test_no_more_than_the_cap_is_in_flight_and_the_rest_waits() -> None:
    zero, one = joined(most_bytes=3000)
    fill(zero, 2)
    zero.commit(*(put(1, 1000 * n, 1000 * n + n % 2, 999) for n in range(30)), store(1, 0, 7))
    for _ in range(5):
        zero.exchange.send()
    assert zero.exchange.watch.most_in_flight[1] == 2997 and zero.exchange.watch.held_back[1] >= 5
    assert one.flag(0) == 0
    run(zero, one)
    assert one.flag(0) == 7 and zero.exchange.watch.most_in_flight[1] == 2997
    assert zero.exchange.watch.completion[1].count == zero.exchange.watch.messages[1]
    zero, one = joined(most_bytes=10)  # a message above the cap goes alone
    zero.commit(put(1, 0, 0, 500), put(1, 600, 700, 500))
    run(zero, one)
    assert zero.exchange.watch.most_in_flight[1] == 500


def test_no_more_than_a_window_of_groups_is_in_flight() -> None:
    zero, one = joined()
    zero.commit(*(store(1, 0, n) for n in range(100)))
    for _ in range(5):
        zero.exchange.send()
    assert zero.exchange.channel.streams[1].number == WINDOW
    run(zero, one)
    assert one.flag(0) == 99 and zero.exchange.channel.streams[1].number == 100


WINDOW_BYTES = 1 << 16


@pytest.mark.parametrize(
    "frame,text",
    [
        (Frame(Kind.PAYLOAD, size=10, at=WINDOW_BYTES - 9), "bytes 65527 to 65537 are outside of a window of 65536"),
        (Frame(Kind.PAYLOAD, size=1, at=1 << 63), "are outside of a window"),
        (Frame(Kind.PAYLOAD, size=1 << 24), "a PAYLOAD message of 16777216 bytes; it may have at most 16777215"),
        (Frame(Kind.PAYLOAD), "a PAYLOAD message of 0 bytes"),
        (Frame(Kind.PAYLOAD, part=256, size=1), "as part 256 that covers 0 parts; a group has at most 256"),
        (Frame(Kind.PAYLOAD, covers=1, size=1), "as part 0 that covers 1 parts"),
        (Frame(Kind.PAYLOAD, number=WINDOW, size=9), "group 16 is 16 ahead"),
        (Frame(Kind.STORE, number=WINDOW, value=5), "group 16 is 16 ahead"),
        (Frame(Kind.FENCE, covers=1, size=8), "a FENCE message of 8 bytes; it may have at most 0"),
        (Frame(Kind.FENCE, part=1, covers=9), "as part 1 that covers 9 parts"),
        (Frame(Kind.FENCE, part=65535, covers=65535), "a group has at most 256"),
        (Frame(Kind.STORE, flag=FLAGS), f"flag {FLAGS} is none of {FLAGS}"),
        (Frame(Kind.STORE, covers=1, size=8, flag=4095), f"flag 4095 is none of {FLAGS}"),
        (Frame(Kind.STORE, flag=5), "flag 5 is a word of a counter"),
        (Frame(Kind.ADD, flag=2), "counter 2 is none of 2"),
        (Frame(Kind.GET, at=0, value=WINDOW_BYTES + 1), "are outside of a window"),
        (Frame(Kind.GET, covers=1, size=8), "a GET message of 8 bytes"),
        (Frame(Kind.REPLY, size=2, at=7), "a reply of 2 bytes to group 0, in which no get awaits one"),
        (Frame(Kind.REPLY), "a reply of 0 bytes to group 0, in which no get awaits one"),
        (Frame(Kind.ACK, value=1), "it has applied 1 groups of 0 that were sent"),
        (Frame(Kind.ACK, size=8), "an? ACK message of 8 bytes"),
        (Frame(Kind.BYE, size=8), "a BYE message of 8 bytes"),
    ],
)
def test_what_a_peer_may_not_send_is_refused_by_name_and_written_nowhere(frame: Frame, text: str) -> None:
    zero, one = joined()
    one.exchange.window = one.window = replace(one.window, counter_flags=range(5, 6))
    zero.link.post(frame, memoryview(b"\1" * frame.size))
    before = bytes(one.window.registered)
    with pytest.raises(FrameError, match=f"^rank 0 sent a frame that is refused: .*{text}") as refused:
        turns(zero, one)
    assert refused.value.peer == 0
    assert bytes(one.window.registered) == before and not any(one.flag(flag) for flag in range(FLAGS))
    assert not any(one.window.counter(counter) for counter in range(2))


def test_a_group_with_parts_behind_its_last_one_is_refused() -> None:
    """It would never be complete, and everything behind it would wait until the deadline."""
    zero, one = joined()
    zero.link.post(Frame(Kind.PAYLOAD, part=3, size=1), memoryview(b"x"))
    zero.link.post(Frame(Kind.FENCE, part=1, covers=1))
    with pytest.raises(FrameError, match="rank 0 .* part 3 of group 0, which has 1 parts"):
        turns(zero, one)


def asked_for_100_bytes() -> tuple[End, Link]:
    """Rank 0, which has asked rank 1 for bytes 500 to 600 and wants them at 40000; and rank 1's end of the link."""
    zero, one = joined()
    zero.commit(TransferCommand(Op.GET, 1, 100, 40_000, 500))
    zero.turn()
    return zero, one.link


@pytest.mark.parametrize(
    "frame,text",
    [
        (Frame(Kind.REPLY, size=99, at=40_000), "a reply of 99 bytes for place 40000, asked were 100 bytes for 40000"),
        (Frame(Kind.REPLY, size=101, at=40_000), "a reply of 101 bytes for place 40000"),
        (Frame(Kind.REPLY, size=100, at=39_999), "a reply of 100 bytes for place 39999"),
        (Frame(Kind.REPLY, 1, size=100, at=40_000), "to group 1, in which no get awaits one"),
        (Frame(Kind.ACK, value=1), "it confirms 1 groups and has not answered the get of group 0"),
    ],
)
def test_an_answer_other_than_the_one_that_was_asked_for_is_refused(frame: Frame, text: str) -> None:
    zero, link = asked_for_100_bytes()
    link.post(frame, memoryview(b"\1" * frame.size))
    list(link.progress(lambda frame: memoryview(bytearray(frame.size))))
    with pytest.raises(FrameError, match=f"rank 1 .* {text}"):
        turns(zero)
    assert not any(zero.window.registered) and not zero.is_done


def test_a_second_reply_is_refused_and_does_not_change_what_the_first_one_brought() -> None:
    zero, link = asked_for_100_bytes()
    reply = Frame(Kind.REPLY, size=100, at=40_000)
    link.post(reply, memoryview(b"\1" * 100))
    link.post(reply, memoryview(b"\2" * 100))
    list(link.progress(lambda frame: memoryview(bytearray(frame.size))))
    with pytest.raises(FrameError, match="in which no get awaits one"):
        turns(zero)
    assert bytes(zero.window.registered[40_000:40_100]) == b"\1" * 100


def test_a_peer_that_asks_and_does_not_read_is_cut_off() -> None:
    zero, one = joined()
    assert isinstance(one.link, PipeLink)
    for number in range(2 * PipeLink.MOST_QUEUED):
        zero.link.post(Frame(Kind.GET, number, value=WINDOW_BYTES))

    def ask_on() -> None:
        for _ in range(4 * PipeLink.MOST_QUEUED):
            zero.link._send()  # type: ignore[attr-defined]
            one.turn()

    with pytest.raises(LinkError, match=r"messages wait to be sent: the peer asks and does not read the answers"):
        ask_on()
    assert len(one.link._queue) < 1.1 * PipeLink.MOST_QUEUED


def test_what_came_before_a_connection_ended_is_read_however_much_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = joined()
    one.commit(*(store(0, n, 1) for n in range(FLAGS)))
    one.turn()
    zero.link.post(Frame(Kind.ACK))
    monkeypatch.setattr(PipeLink, "TURN_BYTES", 1)
    monkeypatch.setattr(TcpPipe, "send", Mock(side_effect=LinkEnded("sending failed")))
    with pytest.raises(LinkEnded, match="sending failed"):
        turns(zero)
    assert [zero.flag(n) for n in range(FLAGS)] == [1] * FLAGS


@pytest.mark.parametrize("applied", [3, 0])
def test_a_peer_that_miscounts_what_it_has_applied_gets_no_new_link(applied: int) -> None:
    zero, one = joined()
    zero.commit(store(1, 0, 1), store(1, 0, 2))
    run(zero, one)
    with pytest.raises(FrameError, match=f"it has applied {applied} groups (of 2 that were sent|after it confirmed 2)"):
        zero.exchange.channel.begin_anew(1, links("shuffled")[0], applied)


@pytest.mark.row(161)
def test_sizes_of_messages_are_reported_for_decode_and_for_training() -> None:
    """Rows of 7168 FP8 values that lie apart, as in decoding, and runs of them cut at 256 KiB, as in training."""
    zero, one = joined(data_bytes=1 << 20, most_bytes=1 << 20)
    zero.commit(*(put(1, 8000 * n, 8000 * n, 7168) for n in range(9)), store(1, 0, 1))
    zero.commit(put(1, 100_000, 100_000, 256 << 10), store(1, 0, 2))
    run(zero, one)
    assert 7168 == 7 << 10 and dict(zero.exchange.watch.sizes) == {8 << 10: 9, 256 << 10: 1}


@pytest.mark.row(158)
def test_one_sided_and_two_sided_give_the_same_bytes() -> None:
    """One-sided: the sender names the target. Two-sided: the receiver asks for it when it is ready."""
    ours, theirs = joined()
    fill(ours, 9)
    ours.commit(put(1, 300, 0, 5000), store(1, 0, 1))
    run(ours, theirs)
    sender, receiver = joined("shared memory")
    fill(sender, 9)
    sender.commit(store(1, 0, 300))  # "mine lie at 300"
    run(sender, receiver)
    receiver.commit(TransferCommand(Op.GET, 0, 5000, 0, receiver.flag(0)))
    run(receiver, sender)
    assert receiver.window.registered[:5000] == theirs.window.registered[:5000] == sender.window.registered[300:5300]


def resume(zero: End, one: End, draw: random.Random) -> None:
    """What two proxies do with a link that has ended: both drop it, then report each other what they have applied. The
    answer of the one that is called may be lost: it has gone on then, and is called once more."""
    zero.link.close(), one.link.close()
    while True:
        caller, called = links("tcp")
        by_one = one.exchange.channel.streams[0].inbox.applied
        by_zero = zero.exchange.channel.streams[1].inbox.applied
        zero.exchange.channel.begin_anew(1, called, by_one)
        for _ in range(draw.randint(0, 3)):
            with contextlib.suppress(LinkError):
                zero.turn()
        if draw.random() < 0.7:
            one.exchange.channel.begin_anew(0, caller, by_zero)
            return
        caller.close(), called.close()


@pytest.mark.row(148)
@pytest.mark.parametrize("seed", range(40))
def test_whenever_a_link_ends_each_group_is_applied_once_and_in_order(seed: int) -> None:
    """Both ranks put, add, store and get; the link ends after any number of turns, with anything under way."""
    draw = random.Random(seed)
    zero, one = joined(most_bytes=draw.choice((300, 1 << 20)))
    fill(zero, seed), fill(one, seed + 1)
    sums, gets, words = [0, 0], [], [0, 0]
    expected = [bytearray(zero.window.registered[:8000]), bytearray(one.window.registered[:8000])]
    for number in range(1, 400):
        me = draw.randrange(2)
        end, peer = (zero, one)[me], 1 - me
        kind = draw.random()
        if kind < 0.4:
            source, at, size = draw.randrange(9000, 30_000), draw.randrange(7000), draw.randrange(1, 900)
            end.commit(put(peer, source, at, size))
            expected[peer][at : at + size] = end.window.registered[source : source + size]
        elif kind < 0.7:
            end.commit(add(peer, 1, number))
            sums[peer] += number
        elif kind < 0.9:
            end.commit(store(peer, 3, number))
            words[peer] = number
        elif kind < 0.93:
            to = 40_000 + 60 * len(gets)
            end.commit(TransferCommand(Op.GET, peer, 60, to, 30_100))
            gets.append((end, to, bytes((zero, one)[peer].window.registered[30_100:30_160])))
        for end in draw.sample((zero, one), draw.randint(0, 2)):
            end.turn()
        if draw.random() < 0.1:
            draw.choice((zero, one)).exchange.close_groups()
        if draw.random() < 0.1:
            resume(zero, one, draw)
    run(zero, one)
    assert [end.window.counter(1) for end in (zero, one)] == sums
    assert [end.flag(3) for end in (zero, one)] == words
    assert [bytes(end.window.registered[:8000]) for end in (zero, one)] == [bytes(each) for each in expected]
    assert all(bytes(end.window.registered[to : to + 60]) == brought for end, to, brought in gets) and gets
