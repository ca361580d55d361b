"""TCP between proxies: where to listen, who may connect, and sockets as pipes.

A rank listens on one address and tells it to the group together with a random token, over the communicator it was
given. Whoever connects must bring the token of the rank it connects to, and gets in return the token of its own rank:
strangers are closed. Tokens travel in the clear, so they keep out who cannot listen to the network, no more.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import ipaddress
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from moe_mk.comm.fork import in_child
from moe_mk.comm.network.frames import LinkEnded, LinkError
from moe_mk.comm.network.link import Pipe
from moe_mk.errors import ConfigError

LOOPBACK = "127.0.0.0/8"
MAGIC = b"moe-mk proxy 1\0\0"
TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<16s{TOKEN_BYTES}sHHIQ")
_KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 15}
"""A side that was not told of the end of a connection finds out after 2 s; 30 s without any answer end one."""
_WELCOME = struct.Struct(f"<16s{TOKEN_BYTES}sQ")
HELLO_BYTES, WELCOME_BYTES = _HELLO.size, _WELCOME.size
_ASK_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


class TcpPipe(Pipe):
    """A connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, number in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, number)
        self._socket = connected

    def send(self, parts: list[memoryview]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as problem:
            raise LinkEnded(f"sending failed: {problem.strerror or problem}") from problem

    def receive(self, into: memoryview) -> int:
        try:
            got = self._socket.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as problem:
            raise LinkEnded(f"receiving failed: {problem.strerror or problem}") from problem
        if not got:
            raise LinkEnded("the connection was closed")
        return got

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()


@dataclass(frozen=True)
class Address:
    """Where a rank listens, and what a caller must know."""

    host: str
    port: int
    token: bytes


@dataclass(frozen=True)
class Hello:
    """What a caller says: who it is, which channel this is, and how many groups of the other side it has applied.

    attempt: how often it has called for this channel, from 1. A call that it has given up may be heard after a later
    one; what that says was applied is out of date, and it is refused.
    """

    token: bytes
    rank: int
    channel: int
    attempt: int
    applied: int

    def pack(self) -> bytes:
        """HELLO_BYTES."""
        return _HELLO.pack(MAGIC, self.token, self.rank, self.channel, self.attempt, self.applied)

    @classmethod
    def unpack(cls, data: bytes, token: bytes) -> Hello:
        """Raises LinkError for a stranger."""
        magic, theirs, rank, channel, attempt, applied = _HELLO.unpack(data)
        if magic != MAGIC or not hmac.compare_digest(theirs, token):
            raise LinkError("a stranger has called")
        return cls(theirs, rank, channel, attempt, applied)


def welcome(token: bytes, applied: int) -> bytes:
    """The answer to a caller that belongs here: its own token, and the groups of its own applied so far."""
    return _WELCOME.pack(MAGIC, token, applied)


def call(
    address: Address, hello: Hello, own_token: bytes, timeout_s: float, clock: Callable[[], float]
) -> tuple[TcpPipe, int]:
    """Connect to a listening rank; the groups of ours that it has applied come with the pipe.

    timeout_s: for all of it. Raises LinkError where nobody listens or another answers, LinkEnded where it is worth
    another attempt: no answer in time, a connection that was closed, no descriptor left in this process.
    """
    where, until = f"{address.host}:{address.port}", clock() + timeout_s
    try:
        connected = socket.create_connection((address.host, address.port), timeout=timeout_s)
    except OSError as problem:
        text = f"nobody answers at {where}: {problem.strerror or problem} [kernel.network names the addresses to use]"
        again = isinstance(problem, TimeoutError) or problem.errno in (errno.EMFILE, errno.ENFILE)
        raise (LinkEnded if again else LinkError)(text) from problem
    in_child(connected, socket.socket.close)
    try:
        connected.sendall(hello.pack())
        answer = b""
        while len(answer) < WELCOME_BYTES:
            connected.settimeout(max(until - clock(), 0.001))
            piece = connected.recv(WELCOME_BYTES - len(answer))
            if not piece:
                raise LinkEnded(f"{where} has hung up before it answered")
            answer += piece
        magic, token, applied = _WELCOME.unpack(answer)
        if magic != MAGIC or not hmac.compare_digest(token, own_token):
            raise LinkError(f"{where} is not the rank that was called")
        return TcpPipe(connected), applied
    except LinkError:
        connected.close()
        raise
    except OSError as problem:
        connected.close()
        raise LinkEnded(f"{where} has not answered: {problem.strerror or problem}") from problem


def listen(network: str) -> tuple[socket.socket, Address]:
    """Listen on this host's address in a network, and on no other, at a port the system chooses."""
    listener = listen_at(address_in(network), 0)
    host, port = listener.getsockname()
    return listener, Address(host, port, secrets.token_bytes(TOKEN_BYTES))


def listen_at(host: str, port: int) -> socket.socket:
    """A socket that listens there and does not block; 0 is a port the system chooses. Raises OSError."""
    listener = in_child(socket.socket(socket.AF_INET, socket.SOCK_STREAM), socket.socket.close)
    try:
        # Connections that were accepted at a port do not keep it from being listened at once more.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def network_of(network: str) -> ipaddress.IPv4Network:
    """The addresses a setting stands for. Raises ConfigError."""
    try:
        return ipaddress.IPv4Network(network, strict=False)
    except ValueError as problem:
        text = f"kernel.network={network!r} is no IPv4 network; write one as 10.0.0.0/24"
        raise ConfigError(text) from problem


def address_in(network: str, addresses: Callable[[], dict[str, str]] | None = None) -> str:
    """The IPv4 address of this host in a network such as 10.0.0.0/24. Raises ConfigError where it has none."""
    wanted = network_of(network)
    found = (addresses or own_addresses)()
    for address in found.values():
        if ipaddress.IPv4Address(address) in wanted:
            return address
    have = ", ".join(f"{name} {address}" for name, address in found.items()) or "none"
    raise ConfigError(f"kernel.network={network} holds no address of this host, which has {have}")


def own_addresses() -> dict[str, str]:
    """The first IPv4 address of each network device that is up."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
