"""Who may connect, what strangers get, and where a rank listens."""

import contextlib
import socket
import threading

import pytest

from moe_mk.comm.network.command import Op, TransferCommand
from moe_mk.comm.network.frames import HEADER_BYTES, Frame, Kind, LinkError
from moe_mk.comm.network.proxy import Proxy, ProxySettings
from moe_mk.comm.network.tcp import (
    HELLO_BYTES,
    LOOPBACK,
    TOKEN_BYTES,
    WELCOME_BYTES,
    Address,
    Hello,
    address_in,
    call,
    listen,
    own_addresses,
    welcome,
)
from moe_mk.errors import ConfigError
from moe_mk.trace.clock import now
from tests.support.network_ends import links_of, own_window
from tests.support.network_proxies import wait_for


def test_a_greeting_is_read_with_the_right_token_only() -> None:
    hello = Hello(b"t" * TOKEN_BYTES, 3, 1, 7, 1 << 40)
    assert len(hello.pack()) == HELLO_BYTES and len(welcome(b"t" * TOKEN_BYTES, 5)) == WELCOME_BYTES
    assert Hello.unpack(hello.pack(), b"t" * TOKEN_BYTES) == hello
    for data, token in ((hello.pack(), b"u" * TOKEN_BYTES), (b"G" + hello.pack()[1:], b"t" * TOKEN_BYTES)):
        with pytest.raises(LinkError, match="a stranger has called"):
            Hello.unpack(data, token)


@pytest.mark.parametrize(
    "answer,text",
    [
        (welcome(b"x" * TOKEN_BYTES, 0), "is not the rank that was called"),
        (b"", "has hung up before it answered"),
        (None, "timed out"),
    ],
)
def test_an_impostor_that_answers_is_not_believed(answer: bytes | None, text: str) -> None:
    with socket.socket() as impostor:
        impostor.bind(("127.0.0.1", 0))
        impostor.listen(1)
        address = Address("127.0.0.1", impostor.getsockname()[1], b"t" * TOKEN_BYTES)

        def serve() -> None:
            connected, _ = impostor.accept()
            with connected:
                while answer is None and connected.recv(100):
                    continue
                connected.recv(HELLO_BYTES)
                connected.sendall(answer or b"")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(LinkError, match=text):
            call(address, Hello(address.token, 0, 0, 1, 0), b"o" * TOKEN_BYTES, 0.3, now)
        thread.join()


@pytest.mark.parametrize("asked", [False, True])
def test_a_reply_nobody_asked_for_ends_the_link_and_names_the_member(asked: bool) -> None:
    """A member speaks to rank 0 over a socket of its own."""
    window = own_window(1 << 16)
    zero = Proxy(0, [1], window, listen(LOOPBACK), now, ProxySettings(channels=1), links_of(window))
    zero.start({1: Address("127.0.0.1", 9, b"o" * TOKEN_BYTES)})
    with contextlib.ExitStack() as stack:
        stack.callback(zero.close, 0.0)
        member = stack.enter_context(socket.create_connection((zero.address.host, zero.address.port), timeout=20.0))
        member.sendall(Hello(zero.address.token, 1, 0, 1, 0).pack())
        assert member.recv(WELCOME_BYTES, socket.MSG_WAITALL) == welcome(b"o" * TOKEN_BYTES, 0)
        if asked:
            assert zero.commit(0, TransferCommand(Op.GET, 1, 8, 100, 0))
            get = Frame.unpack(member.recv(HEADER_BYTES, socket.MSG_WAITALL))
            assert get.kind is Kind.GET
            member.sendall(Frame(Kind.REPLY, get.number, size=8, at=100).pack() + b"answered")
        member.sendall(Frame(Kind.REPLY, 0, size=8, at=100).pack() + b"unasked!")
        wait_for(lambda: 1 in zero.lost)
        assert zero.lost[1].startswith(
            "link 0 between ranks 0 and 1 (127.0.0.1:9) was lost: rank 1 sent a frame that is refused: a reply of 8"
        )
        assert bytes(zero.window.registered[100:108]) == (b"answered" if asked else b"\0" * 8)
        with contextlib.suppress(ConnectionResetError):  # until the other side closes
            while member.recv(1 << 16):
                continue
        assert zero.fault is None


def test_a_rank_listens_on_one_address_of_the_network_it_is_given() -> None:
    listener, address = listen(LOOPBACK)
    with listener:
        assert listener.getsockname()[0] == address.host == "127.0.0.1" and address.port > 0
        other, elsewhere = listen(LOOPBACK)
        other.close()
        assert len(address.token) == TOKEN_BYTES and address.token != elsewhere.token


def test_the_address_is_that_of_this_host_in_the_network() -> None:
    devices = {"lo": "127.0.0.1", "eth0": "192.168.4.7", "ib0": "10.0.3.9"}
    assert address_in("10.0.0.0/16", lambda: devices) == "10.0.3.9"
    assert address_in("192.168.4.0/24", lambda: devices) == "192.168.4.7"
    assert address_in("10.0.3.9/16", lambda: devices) == "10.0.3.9", "a network may be named by an address in it"
    assert "127.0.0.1" in own_addresses().values()
    text = r"kernel.network=172.16.0.0/12 holds no address of this host, which has lo 127.0.0.1, eth0 192.168.4.7, ib0"
    with pytest.raises(ConfigError, match=text):
        address_in("172.16.0.0/12", lambda: devices)
    with pytest.raises(ConfigError, match=r"kernel.network='eth0' is no IPv4 network; write one as 10.0.0.0/24"):
        address_in("eth0", lambda: devices)
