"""Threads that carry out commands: twelve steps, channels, links cut without a loss, slow peers, lost ones."""

import ctypes
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from moe_mk.comm.network import worker as network_worker
from moe_mk.comm.network.command import TransferCommand
from moe_mk.comm.network.events import Key, Step
from moe_mk.comm.network.frames import Frame, Kind, LinkError
from moe_mk.comm.network.proxy import MOST_FUTILE, Proxy, ProxySettings
from moe_mk.comm.network.tcp import Hello
from moe_mk.comm.network.worker import Doorbell
from moe_mk.errors import ConfigError
from moe_mk.trace.clock import now
from tests.support.network_ends import add, put, store, tcp_pipes
from tests.support.network_proxies import cut, flag_of, proxies, wait_for

pytestmark = pytest.mark.usefixtures("link")


def commit(proxy: Proxy, *commands: TransferCommand, channel: int = 0) -> None:
    for command in commands:
        wait_for(lambda command=command: proxy.commit(channel, command))


@pytest.mark.row(58)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_message_takes_twelve_named_steps_in_order(threads: int) -> None:
    notes: dict[Key, list[tuple[Step, float]]] = defaultdict(list)
    note = {0: lambda step, key: notes[key].append((step, now()))}
    with proxies(2, ProxySettings(threads=threads, channels=2), note) as (zero, one):
        assert len(zero._workers) == threads
        for number in range(1, 6):
            for channel in (0, 1):
                commit(zero, store(1, channel, number), channel=channel)
            wait_for(lambda number=number: flag_of(one, 0) == flag_of(one, 1) == number and zero.is_idle)
        keys = [(channel, number) for channel in (0, 1) for number in range(5)]
        assert sorted(notes) == keys
        for key in keys:
            steps, times = zip(*notes[key], strict=True)
            assert list(steps) == list(Step) and len(steps) == 12
            assert list(times) == sorted(times)


@pytest.mark.row(152)
@pytest.mark.parametrize("threads", [1, 3])
def test_order_is_kept_in_a_channel_and_free_between_channels(threads: int) -> None:
    with proxies(3, ProxySettings(threads=threads, channels=3)) as made:
        zero, *others = made
        zero.channels[0].streams[1].link = None  # channel 0 has lost its way to rank 1; the others go on
        commit(zero, store(1, 0, 1), channel=0)
        for number in range(1, 200):
            commit(zero, store(1, 1, number), store(2, 1, number), channel=1)
            commit(zero, store(2, 2, number), channel=2)
        seen: list[int] = []
        wait_for(lambda: (seen.append(flag_of(others[0], 1)), flag_of(others[0], 1) == 199)[1])
        wait_for(lambda: all(channel.is_idle for channel in zero.channels[1:]))
        assert seen == sorted(seen) and flag_of(others[1], 2) == 199
        assert flag_of(others[0], 0) == 0 and not zero.channels[0].is_idle


def test_missing_peers_are_counted_while_links_begin() -> None:
    class Peer(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            joined.add((9, len(joined)))  # as a thread may at any moment
            return int(self) == other

    joined = {(1, 0), (1, 1)}
    proxy = SimpleNamespace(_joined=joined, _peers=[Peer(1), Peer(2)], channels=[0, 1])
    assert Proxy.missing.fget(proxy) == [2]  # type: ignore[attr-defined]


def test_a_ring_that_is_full_makes_the_producer_wait() -> None:
    with proxies(2, ProxySettings(channels=1, ring_capacity=3)) as (zero, one):
        stream = zero.channels[0].streams[1]
        link, stream.link = stream.link, None
        assert [zero.commit(0, store(1, 0, n)) for n in range(4)] == [True, True, True, False]
        stream.link = link
        wait_for(lambda: zero.commit(0, store(1, 0, 9)))
        wait_for(lambda: flag_of(one, 0) == 9)


class Cutter:
    """Cuts the link of a proxy at one step, wherever that is: within a message, before its confirmation, or after."""

    def __init__(self) -> None:
        self.steps_left: int | None = None
        self.cut_now: Callable[[], object] = lambda: None

    def __call__(self, step: Step, key: Key) -> None:
        if self.steps_left is None:
            return
        self.steps_left -= 1
        if self.steps_left <= 0:
            self.steps_left = None
            self.cut_now()


@pytest.mark.row(148, 156)
@pytest.mark.parametrize("sender", [0, 1], ids=["the one that is called", "the one that calls"])
def test_a_link_cut_at_any_step_is_resumed_and_loses_and_repeats_nothing(sender: int) -> None:
    """Numbers are added to a counter, so that a command done twice shows as well as one that was lost."""
    cutter, draw, receiver = Cutter(), random.Random(sender), 1 - sender
    with proxies(2, ProxySettings(channels=1, ring_capacity=70), {sender: cutter}) as made:
        ours, theirs, cuts = made[sender], made[receiver], [0]

        def cut_now() -> None:
            cuts[0] += cut(ours, 0, receiver)

        cutter.cut_now = cut_now
        total = 0
        for number in range(1, 1200):
            at = number % 900 * 100
            ours.window.registered[at : at + 100] = bytes([number % 251]) * 100
            commit(ours, put(receiver, at, at, 100), add(receiver, 0, number))
            total += number
            if cutter.steps_left is None and not ours.resuming():
                cutter.steps_left = draw.randint(1, 90)
        cutter.steps_left = None
        wait_for(lambda: ours.is_idle)
        assert theirs.window.counter(0) == total
        assert theirs.window.registered[: 900 * 100] == ours.window.registered[: 900 * 100]
        assert not ours.lost and not theirs.lost and not ours.fault and not theirs.fault
        assert cuts[0] > 10, "links have to be cut for this to say anything"


@contextmanager
def all_send_to_all(made: list[Proxy]) -> Iterator[None]:
    """While the body runs, each rank adds 1, 2, 3, ... to a counter of every other one, with a put before each. Then
    all commands must be confirmed, each counter must have the sum of what was added, and no rank is lost."""
    written, is_enough = [0] * len(made), threading.Event()

    def write(proxy: Proxy) -> None:
        while written[proxy.rank] < 300 or not is_enough.is_set():
            written[proxy.rank] += 1
            number = written[proxy.rank]
            for peer in set(range(len(made))) - {proxy.rank}:
                commit(proxy, put(peer, 0, 100 * (number % 90), 100), add(peer, 0, number), channel=number % 2)

    producers = [threading.Thread(target=write, args=(proxy,)) for proxy in made]
    for producer in producers:
        producer.start()
    try:
        yield
    finally:
        is_enough.set()
        for producer in producers:
            producer.join()
    wait_for(lambda: all(proxy.is_idle for proxy in made))
    sums = [sum(range(last + 1)) for last in written]
    assert [proxy.window.counter(0) for proxy in made] == [sum(sums) - own for own in sums]
    assert not any(proxy.lost or proxy.fault for proxy in made)


@pytest.mark.row(148, 156)
def test_links_of_three_ranks_that_are_cut_again_and_again_miss_and_repeat_nothing() -> None:
    """All ranks send to all at once, on two channels, while one link after another is cut under them."""
    draw, cuts = random.Random(0), 0
    with proxies(3, ProxySettings(channels=2, threads=2)) as made, all_send_to_all(made):
        while cuts < 15:
            one, other = draw.sample(range(3), 2)
            if not made[one].resuming(other):
                cuts += cut(made[one], draw.randrange(2), other)
            time.sleep(0.002)
            assert not any(proxy.lost for proxy in made), [proxy.lost for proxy in made]


def test_a_thread_whose_start_was_interrupted_is_not_waited_for_and_does_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the system's start of a thread and its first step the handler of a signal may raise."""
    start, held = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != network_worker.THREAD_NAME:  # the other rank may begin to call at any moment
            return start(thread)
        held.append(thread)
        raise KeyboardInterrupt

    with proxies(2, ProxySettings(channels=1)) as (zero, _):
        zero._workers[0].stop()
        zero._workers = [network_worker.Worker(zero._exchanges, zero.links, zero._note_link, zero._note_fault)]
        with monkeypatch.context() as patched:
            patched.setattr(network_worker.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                zero._workers[0].start()
        zero.close(0.0)
        start(held[0])
        held[0].join(20.0)
        assert not held[0].is_alive() and zero.fault is None


def end_thread(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread wherever it is, as an error in a library or an interpreter that ends does."""
    assert thread.ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1


@pytest.mark.row(148)
def test_a_proxy_whose_thread_was_killed_reports_a_fault() -> None:
    with proxies(2, ProxySettings(channels=1), resume_s=0.5) as (zero, one):
        commit(zero, store(1, 0, 1))
        wait_for(lambda: zero.is_idle)
        end_thread(zero._workers[0]._thread)
        wait_for(lambda: zero.fault is not None and 0 in one.lost)
        assert isinstance(zero.fault, SystemExit)


def test_a_link_that_ends_again_and_again_without_progress_is_given_up() -> None:
    with proxies(2, ProxySettings(channels=1)) as (zero, one):
        cuts = 0
        while not (zero.lost or one.lost):
            if not zero.resuming() and not one.resuming():
                cuts += cut(zero, 0, 1)
            assert cuts < 3 * MOST_FUTILE, "it would go on for ever"
            time.sleep(0.001)
        wait_for(lambda: (zero.lost or zero.resuming()) and (one.lost or one.resuming()))
        lost = zero.lost.get(1) or one.lost[0]
        assert re.match(r"link 0 between ranks (0 and 1|1 and 0) \(127.0.0.1:\d+\) was lost: ", lost), lost


@pytest.mark.row(60)
def test_a_bell_that_is_never_heard_delays_and_loses_nothing() -> None:
    class Mute(Doorbell):
        def ring_if_awaited(self) -> None:
            return

    with proxies(2, ProxySettings(channels=1)) as (zero, one):
        zero._workers[0].doorbell.__class__ = Mute
        for number in range(1, 8):
            time.sleep(0.002)  # long enough for the thread to fall asleep
            commit(zero, store(1, 0, number))
        wait_for(lambda: flag_of(one, 0) == 7 and zero.is_idle)


@pytest.mark.row(162)
def test_the_slow_peer_is_named_by_its_latency() -> None:
    with proxies(4, ProxySettings(channels=4, threads=2)) as made:
        zero, slow = made[0], made[2]
        exchange = slow._exchanges[2]
        arrive = exchange.arrive

        def late(peer: int) -> bool:
            time.sleep(0.05)
            return arrive(peer)

        exchange.arrive = late  # type: ignore[method-assign]
        for number in range(1, 12):
            for peer in (1, 2, 3):
                commit(zero, store(peer, 0, number), channel=peer)
            wait_for(lambda: zero.is_idle)
        took = {peer: each.total_s / each.count for peer, each in zero.watch.completion.items()}
        assert took[2] > 0.04 > took[1]
        assert sum(zero.watch.completion[2].by_us.values()) == zero.watch.completion[2].count == 11


def test_a_peer_that_ends_without_a_goodbye_is_lost_on_both_sides_when_it_does_not_come_back() -> None:
    with proxies(3, ProxySettings(channels=1), resume_s=0.3) as made:
        made[1]._workers[0].stop()  # its sockets are closed, and nobody takes calls
        for rank in (0, 2):
            wait_for(lambda rank=rank: 1 in made[rank].lost)
            cause = r"\((the connection was closed|.* reset.*)\)"
            began = rf"link 0 between ranks {rank} and 1 \(127.0.0.1:\d+\) was lost {cause}"
            why = "rank 1 has not called again" if rank == 0 else r"no answer at .*: Connection refused.*"
            end = rf" and not resumed within 0.3 s \({why}\): its process has ended or cannot be reached"
            assert re.fullmatch(began + end, made[rank].lost[1]), made[rank].lost[1]
            assert set(made[rank].lost) == {1} and not made[rank].resuming()
        commit(made[2], store(0, 0, 5))
        wait_for(lambda: flag_of(made[0], 0) == 5)


def test_a_refused_frame_ends_a_link_for_good_on_both_sides() -> None:
    with proxies(2, ProxySettings(channels=1), resume_s=0.5) as (zero, one):
        link = one.channels[0].streams[0].link
        assert link is not None
        link.post(Frame(Kind.ACK, value=77))
        one._workers[0].doorbell.ring()
        wait_for(lambda: zero.lost and one.lost)
        assert "was lost: rank 1 sent a frame that is refused: it has applied 77 groups of 0" in zero.lost[1]
        assert "link 0 between ranks 1 and 0" in one.lost[0] and "not resumed within 0.5 s" in one.lost[0]


def test_a_call_of_an_attempt_that_is_over_is_refused() -> None:
    """What it states was applied is out of date: to go on from there would lose or repeat something."""
    with proxies(2, ProxySettings(channels=1)) as (zero, one):
        for number in range(1, 6):
            commit(zero, store(1, 0, number))
        wait_for(lambda: zero.is_idle)
        late = Hello(zero.address.token, 1, 0, one._attempts[0, 0], 0)
        pipe, _ = tcp_pipes()
        with pytest.raises(LinkError, match="was given up, or this call was"):
            zero._admit(late, pipe)
        pipe.close()
        commit(zero, store(1, 0, 9))
        wait_for(lambda: flag_of(one, 0) == 9)


def test_a_peer_that_sends_goodbye_is_not_lost() -> None:
    with proxies(3, ProxySettings(channels=2)) as (zero, one, two):
        commit(one, store(0, 0, 9), channel=1)
        one.close(5.0)
        wait_for(lambda: set(zero.left) == set(two.left) == {1})
        assert not zero.lost and not two.lost and flag_of(zero, 0) == 9
        commit(zero, store(2, 0, 4))
        wait_for(lambda: flag_of(two, 0) == 4)


def test_a_peer_that_is_gone_keeps_nobody_else_from_what_is_theirs() -> None:
    with proxies(3, ProxySettings(channels=2)) as (zero, one, two):
        one.close(5.0)
        wait_for(lambda: set(zero.left) == {1})
        commit(zero, store(1, 0, 7))  # never confirmed
        wait_for(lambda: zero.channels[0].backlog)
        commit(zero, *(store(2, 0, n) for n in range(1, 301)), channel=1)
        began = now()
        zero.close(20.0)
        assert flag_of(two, 0) == 300 and now() - began < 15.0, "and nobody waits for the one that is gone"


def test_a_command_that_names_memory_outside_ends_the_thread_with_a_fault() -> None:
    with proxies(2, ProxySettings(channels=1)) as (zero, _):
        commit(zero, put(1, (1 << 20) - 5, 0, 10))
        wait_for(lambda: zero.fault is not None)
        assert "are outside of 1048576 registered" in str(zero.fault)


@pytest.mark.parametrize(
    "settings,text",
    [
        ({"threads": 0}, "threads=0 must be 1 or more"),
        ({"channels": 1, "threads": 2}, "2 threads have 1 channels to serve; lower threads"),
        ({"ring_capacity": 0, "most_in_flight_bytes": -1}, "ring_capacity=0 .*, most_in_flight_bytes=-1 must be 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ProxySettings(**settings)
