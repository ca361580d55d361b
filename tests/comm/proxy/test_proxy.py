"""Threads that carry out commands: twelve steps, channels, restarts that lose nothing, slow peers, lost ones."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from moe_mk.comm.proxy.command import TransferCommand
from moe_mk.comm.proxy.doorbell import Doorbell
from moe_mk.comm.proxy.events import Key, Step, StepLog
from moe_mk.comm.proxy.frames import LinkError
from moe_mk.comm.proxy.proxy import Proxy, ProxySettings
from moe_mk.comm.proxy.worker import Stopped
from moe_mk.errors import ConfigError
from moe_mk.trace.clock import now
from tests.comm.proxy.ends import FLAGS, add, put, store
from tests.comm.proxy.proxies import flag_of, proxies, wait_for


def commit(proxy: Proxy, *commands: TransferCommand, channel: int = 0) -> None:
    for command in commands:
        wait_for(lambda command=command: proxy.commit(channel, command))


@pytest.mark.row(58)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_message_takes_twelve_named_steps_in_order(threads: int) -> None:
    log = StepLog(now)
    with proxies(2, ProxySettings(threads=threads, channels=2), {0: log}) as (zero, one):
        assert len(zero._workers) == threads
        for number in range(1, 6):
            for channel in (0, 1):
                commit(zero, store(1, channel, number), channel=channel)
            wait_for(lambda number=number: flag_of(one, 0) == flag_of(one, 1) == number and zero.is_idle)
        keys = [(channel, number) for channel in (0, 1) for number in range(5)]
        assert sorted(log.notes) == keys
        for key in keys:
            assert log.steps(key) == list(Step) and len(log.steps(key)) == 12
            times = [seconds for _, seconds in log.notes[key]]
            assert times == sorted(times)
            assert log.latency_s(key) == pytest.approx(times[-1] - times[0])


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


def test_a_ring_that_is_full_makes_the_producer_wait() -> None:
    with proxies(2, ProxySettings(channels=1, ring_capacity=3)) as (zero, one):
        zero.stop()
        assert [zero.commit(0, store(1, 0, n)) for n in range(4)] == [True, True, True, False]
        zero.restart()
        wait_for(lambda: zero.commit(0, store(1, 0, 9)))
        wait_for(lambda: flag_of(one, 0) == 9)


class Reaper:
    """Ends a proxy's thread at one step, wherever that is."""

    def __init__(self) -> None:
        self.steps_left: int | None = None

    def __call__(self, step: Step, key: Key) -> None:
        if self.steps_left is None or step in (Step.DATA_PRODUCED, Step.REQUEST_WRITTEN):
            return
        self.steps_left -= 1
        if self.steps_left <= 0:
            self.steps_left = None
            raise Stopped


@pytest.mark.row(148, 156)
def test_a_proxy_killed_at_any_step_and_restarted_loses_and_repeats_nothing() -> None:
    """Numbers are added to a counter, so that a command done twice shows as well as one that was lost."""
    reaper, draw = Reaper(), random.Random(0)
    with proxies(2, ProxySettings(channels=1, ring_capacity=70), {0: reaper}) as (zero, one):
        total, deaths, written = 0, 0, 0
        for number in range(1, 1200):
            place = written % 900
            zero.window.registered[place * 100 : place * 100 + 100] = bytes([number % 251]) * 100
            while not zero.commit(0, put(1, place * 100, place * 100, 100)) or not zero.commit(0, add(1, 0, number)):
                time.sleep(0.0005)
                if not zero._workers[0].is_alive:
                    zero.restart()
                    deaths += 1
            written, total = written + 1, total + number
            if reaper.steps_left is None and zero._workers[0].is_alive:
                reaper.steps_left = draw.randint(1, 60)
            if not zero._workers[0].is_alive:
                zero.restart()
                deaths += 1
        reaper.steps_left = None
        if not zero._workers[0].is_alive:
            zero.restart()
        wait_for(lambda: zero.is_idle)
        assert one.window.counters.value(0) == total
        assert one.window.registered[: 900 * 100] == zero.window.registered[: 900 * 100]
        assert deaths > 10, "the threads have to die for this to say anything"


@pytest.mark.row(148)
def test_a_receiver_that_is_restarted_again_and_again_misses_and_repeats_nothing() -> None:
    with proxies(2, ProxySettings(channels=2)) as (zero, one):
        total = 0
        for number in range(1, 600):
            commit(zero, put(1, 0, 100 * (number % 90), 100), add(1, 0, number), channel=number % 2)
            total += number
            if number % 30 == 0:
                one.stop()
                commit(zero, add(1, 1, 1))
                one.restart()
        wait_for(lambda: zero.is_idle)
        assert one.window.counters.value(0) == total and one.window.counters.value(1) == 19


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
            time.sleep(0.01)
            return arrive(peer)

        exchange.arrive = late  # type: ignore[method-assign]
        for number in range(1, 12):
            for peer in (1, 2, 3):
                commit(zero, store(peer, 0, number), channel=peer)
            wait_for(lambda: zero.is_idle)
        assert zero.watch.slow_peers() == [2]
        assert zero.watch.completion[2].mean_s > 0.008 > zero.watch.completion[1].mean_s
        assert sum(zero.watch.completion[2].by_us.values()) == zero.watch.completion[2].count == 11


@pytest.mark.row(156)
def test_counters_add_up_under_writers_at_once() -> None:
    with proxies(4, ProxySettings(channels=2, threads=2)) as made:

        def write(proxy: Proxy) -> Callable[[], None]:
            return lambda: [commit(proxy, add(0, 1, n), channel=n % 2) for n in range(300)] and None

        threads = [threading.Thread(target=write(proxy)) for proxy in made[1:]]
        for thread in threads:
            thread.start()
        for n in range(300):
            made[0].window.add(0, 1, n)
        for thread in threads:
            thread.join()
        wait_for(lambda: all(proxy.is_idle for proxy in made))
        assert made[0].window.counters.value(1) == 4 * sum(range(300))


def test_a_peer_that_ends_is_lost_and_known_to_be_gone() -> None:
    with proxies(2, ProxySettings(channels=1)) as (zero, one):
        one.stop()
        wait_for(lambda: 1 in zero.lost)
        assert zero.lost[1] in ("the connection was closed", "receiving failed: Connection reset by peer")
        assert zero.dead_peer(0.2) is None, "it still listens: it may be restarting"
        one.restart()
        wait_for(lambda: 1 not in zero.lost)
        commit(zero, store(1, 0, 5))
        wait_for(lambda: flag_of(one, 0) == 5)
        one.stop()
        one.close(0.0)
        wait_for(lambda: zero.dead_peer(0.2) == 1)
        with pytest.raises(LinkError, match="nobody answers at 127.0.0.1:"):
            zero.restart()


def test_a_peer_that_says_goodbye_is_not_lost() -> None:
    with proxies(3, ProxySettings(channels=2)) as (zero, one, two):
        commit(one, store(0, 0, 9), channel=1)
        one.close(5.0)
        wait_for(lambda: zero.left == two.left == {1})
        assert not zero.lost and not two.lost and flag_of(zero, 0) == 9
        commit(zero, store(2, 0, 4))
        wait_for(lambda: flag_of(two, 0) == 4)


def test_what_is_committed_is_delivered_before_the_end() -> None:
    with proxies(2, ProxySettings(channels=1)) as (zero, one):
        commit(zero, *(store(1, n % FLAGS, n) for n in range(40)))
        zero.close(5.0)
        assert [flag_of(one, flag) for flag in range(FLAGS)] == [32 + flag for flag in range(FLAGS)]


def test_a_peer_that_is_gone_keeps_nobody_else_from_what_is_theirs() -> None:
    with proxies(3, ProxySettings(channels=2)) as (zero, one, two):
        one.close(5.0)
        wait_for(lambda: zero.left == {1})
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
        assert "lie outside of 1048576 registered" in str(zero.fault)


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
