"""The listening socket: strangers in numbers, callers that say nothing, no descriptors left, and when it is open."""

import contextlib
import errno
import select
import socket
from collections.abc import Iterator

import pytest

from moe_mk.comm.network.proxy import ProxySettings
from moe_mk.comm.network.tcp import (
    HELD_PER_PEER,
    LONGEST_PAUSE_S,
    LOOPBACK,
    PATIENCE_S,
    TOKEN_BYTES,
    Acceptor,
    Hello,
    TcpPipe,
    listen,
)
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
        assert len(door._callers) == 4 == 2 * HELD_PER_PEER
        member = caller(door, Hello(door.address.token, 1, 0, 1, 0).pack())
        assert let_in == [Hello(door.address.token, 1, 0, 1, 0)] and len(door._callers) == 4
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
