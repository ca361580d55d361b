"""The listening socket: strangers in numbers, callers that say nothing, no descriptors left, and when it is open."""

import contextlib
import errno
import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from moe_mk.comm.network.frames import LinkEnded
from moe_mk.comm.network.proxy import ProxySettings
from moe_mk.comm.network.tcp import (
    HELD_PER_PEER,
    LONGEST_PAUSE_S,
    LOOPBACK,
    PATIENCE_S,
    TOKEN_BYTES,
    Acceptor,
    Address,
    Hello,
    TcpPipe,
    call,
    listen,
)
from moe_mk.trace.clock import now
from tests.support.network_ends import store
from tests.support.network_proxies import cut, flag_of, proxies, wait_for


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@contextlib.contextmanager
def a_door(wanted: list[int]) -> Iterator[tuple[Acceptor, Clock, list[Hello]]]:
    """A door for as many peers as `wanted` holds, by hand; and whom it has let in."""
    let_in: list[Hello] = []

    def admit(hello: Hello, pipe: TcpPipe) -> None:
        let_in.append(hello)
        pipe.close()

    clock = Clock()
    door = Acceptor(*listen(LOOPBACK), clock, admit, lambda: wanted[0])
    door.tend()
    try:
        yield door, clock, let_in
    finally:
        door.close()


def caller(door: Acceptor, stated: bytes = b"") -> socket.socket:
    made = socket.create_connection((door.address.host, door.address.port), timeout=5.0)
    made.sendall(stated)
    select.select([door], [], [], 5.0)
    door.answer()
    return made


def is_ended(connected: socket.socket) -> bool:
    connected.settimeout(0.0)
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def test_of_callers_without_a_token_two_are_held_for_each_missing_peer_and_the_oldest_makes_room() -> None:
    with a_door([2]) as (door, _, let_in):
        strangers = [caller(door) for _ in range(10)]
        assert [is_ended(each) for each in strangers] == [True] * 6 + [False] * 4
        assert door.most_held == 4 == 2 * HELD_PER_PEER
        member = caller(door, Hello(door.address.token, 1, 0, 1, 0).pack())
        assert let_in == [Hello(door.address.token, 1, 0, 1, 0)] and door.most_held == 4
        assert [is_ended(each) for each in strangers] == [True] * 6 + [False] * 4, "it needs no place among them"
        for each in (*strangers, member):
            each.close()


def test_a_greeting_in_pieces_has_one_deadline_for_all_of_them() -> None:
    with a_door([1]) as (door, clock, let_in):
        hello = Hello(door.address.token, 1, 0, 1, 0).pack()
        slow, quick = caller(door, hello[:1]), caller(door, hello[:20])
        for place in range(1, 9):
            clock.s += PATIENCE_S / 9
            slow.sendall(hello[place : place + 1])
            if place == 4:
                quick.sendall(hello[20:])
            select.select([door], [], [], 5.0)
            door.answer()
            assert not is_ended(slow), "still in time"
        assert len(let_in) == 1
        clock.s += PATIENCE_S / 4
        slow.sendall(hello[9:10])
        door.tend()
        assert is_ended(slow)
        slow.close(), quick.close()


@pytest.mark.parametrize("words", [Hello(b"x" * TOKEN_BYTES, 1, 0, 1, 0).pack(), b"GET / HTTP/1.0\r\n\r\n" * 8])
def test_strangers_are_closed_and_not_let_in(words: bytes) -> None:
    with a_door([1]) as (door, _, let_in), caller(door, words) as stranger:
        assert is_ended(stranger) and not let_in


def test_the_port_is_open_while_peers_are_missing_and_closed_when_all_have_come() -> None:
    wanted = [1]
    with a_door(wanted) as (door, _, _):
        waiting = caller(door)
        wanted[0] = 0
        door.tend()
        assert is_ended(waiting) and door.listener is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((door.address.host, door.address.port), timeout=5.0)
        wanted[0] = 1
        door.tend()
        caller(door).close()
        waiting.close()


def test_without_a_descriptor_calls_wait_in_the_backlog_and_nothing_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_door([1]) as (door, clock, let_in):
        listener = door.listener
        assert listener is not None

        class Full:
            fileno, close = listener.fileno, listener.close
            accepts = 0

            def accept(self) -> None:
                self.accepts += 1
                raise OSError(errno.EMFILE, "Too many open files")

        door.listener = full = Full()  # type: ignore[assignment]
        member = caller(door, Hello(door.address.token, 1, 0, 1, 0).pack())
        for _ in range(100):
            assert not select.select([door], [], [], 0.0)[0], "readable: whoever waits for it would spin"
            door.tend()
        assert full.accepts == 1 and door.trouble == "Too many open files"
        for number in range(2, 9):  # it looks again, at longer and longer intervals
            clock.s += LONGEST_PAUSE_S
            door.tend()
            assert select.select([door], [], [], 5.0)[0]
            door.answer()
            assert full.accepts == number
        door.listener = listener
        clock.s += LONGEST_PAUSE_S
        door.tend()
        select.select([door], [], [], 5.0)
        door.answer()
        assert len(let_in) == 1 and door.trouble == ""
        member.close()


def test_nobody_listens_once_all_ranks_are_connected_and_a_rank_whose_link_was_cut_is_let_in_again() -> None:
    with proxies(3, ProxySettings(channels=2)) as made:
        for proxy in made:
            wait_for(lambda proxy=proxy: proxy._door.listener is None)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((proxy.address.host, proxy.address.port), timeout=5.0)
        assert cut(made[0], 1, 2)
        wait_for(lambda: not made[0].resuming() and made[0]._attempts[2, 1] >= 2)
        assert made[0].commit(1, store(2, 0, 7))
        wait_for(lambda: flag_of(made[2], 0) == 7)
        wait_for(lambda: made[0]._door.listener is None)


RANK_0 = """
import json, os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from moe_mk.comm.network.proxy import Proxy, ProxySettings
from moe_mk.comm.network.tcp import LOOPBACK, Address, listen
from moe_mk.trace.clock import now
from tests.support.network_ends import links_of, own_window

listening = listen(LOOPBACK)
window = own_window(1 << 16)
proxy = Proxy(0, [1, 2], window, listening, now, ProxySettings(channels=1), links_of(window))
proxy.start({rank: Address("127.0.0.1", 9, b"o" * 32) for rank in (1, 2)})
print(json.dumps([listening[1].host, listening[1].port, listening[1].token.hex()]), flush=True)

def spent():
    began, cpu = time.perf_counter(), time.process_time()
    time.sleep(0.5)
    return (time.process_time() - cpu) / (time.perf_counter() - began)

sys.stdin.readline()  # strangers are there
flooded = spent()
with open("/dev/null"):  # descriptors are left for others
    pass
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print("full", flush=True)
sys.stdin.readline()  # a member has called
until = now() + 20.0
while not proxy.trouble and now() < until:
    time.sleep(0.01)
trouble, full = proxy.trouble, spent()
for each in held:
    os.close(each)
print("free", flush=True)
until = now() + 40.0
while proxy.missing and now() < until:
    time.sleep(0.01)
print(json.dumps({"held": proxy._door.most_held, "cpu": [flooded, full], "trouble": trouble,
                  "missing": proxy.missing, "fault": str(proxy.fault), "lost": dict(proxy.lost)}), flush=True)
sys.stdin.readline()
proxy.close(0.0)
"""


def test_three_hundred_strangers_keep_neither_descriptors_nor_a_core_nor_members_out() -> None:
    """Rank 0 is a process with 64 descriptors; here are strangers, and ranks 1 and 2."""
    rank_0 = subprocess.Popen([sys.executable, "-c", RANK_0], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank_0.stdin is not None and rank_0.stdout is not None

    def say() -> None:
        rank_0.stdin.write("\n")  # type: ignore[union-attr]
        rank_0.stdin.flush()  # type: ignore[union-attr]

    def hear() -> str:
        return rank_0.stdout.readline().strip()  # type: ignore[union-attr]

    strangers: list[socket.socket] = []
    is_over = threading.Event()
    pipes: list[TcpPipe] = []
    try:
        host, port, token = json.loads(hear())
        address = Address(host, port, bytes.fromhex(token))
        for number in range(300):
            strangers.append(socket.create_connection((host, port), timeout=20.0))
            if number % 2:
                with contextlib.suppress(OSError):
                    strangers[-1].sendall(b"m")
        say()
        assert hear() == "full"

        def join(rank: int) -> None:
            for attempt in range(1, 1000):
                with contextlib.suppress(LinkEnded):
                    hello = Hello(address.token, rank, 0, attempt, 0)
                    pipes.append(call(address, hello, b"o" * TOKEN_BYTES, 2.0, now)[0])
                    return

        def flood() -> None:
            while not is_over.wait(0.001):
                with contextlib.suppress(OSError):
                    strangers.append(socket.create_connection((host, port), timeout=20.0))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 2)] + [threading.Thread(target=flood)]
        for thread in threads:
            thread.start()
        say()
        assert hear() == "free"
        found = json.loads(hear())
        is_over.set()
        for thread in threads:
            thread.join()
        assert found["missing"] == [] and found["lost"] == {} and found["fault"] == "None" and len(pipes) == 2
        assert found["held"] <= 2 * HELD_PER_PEER and found["trouble"] == "Too many open files"
        assert max(found["cpu"]) < 0.5, "of a core, with nothing to do"
    finally:
        is_over.set()
        with contextlib.suppress(OSError):
            say()
        for each in (*strangers, *pipes):
            each.close()
        rank_0.communicate(timeout=30.0)
