"""TCP between proxies: sockets as pipes, addresses, and accepting the connections of peers.

A rank listens on one address and sends it to the group with a random token, over the communicator it was given. A peer
that connects must send the token of the rank it connects to, and receives the token of its own rank in the answer;
other connections are closed. Tokens are sent unencrypted: they exclude hosts that cannot read the network's traffic.

The port is open while peers are missing. Connections without a valid token may arrive in any number: at most two for
each missing peer are held, each for a limited time, and a further one replaces the oldest. A peer sends its greeting
with its first bytes, so it is rarely among the replaced ones; if it is, it connects again (`Proxy.connect`). While the
process has no file descriptor left, no connection is accepted, and `trouble` gives the reason.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import ipaddress
import secrets
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_mk.comm.network.frames import LinkEnded, LinkError
from moe_mk.comm.network.link import Pipe
from moe_mk.errors import ConfigError, unless_signalled
from moe_mk.process import in_child

LOOPBACK = "127.0.0.0/8"
MAGIC = b"moe-mk proxy 1\0\0"
TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<16s{TOKEN_BYTES}sHHIQ")
_KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 15}
"""A lost connection is probed after 2 s and ended after 30 s without an answer."""
_WELCOME = struct.Struct(f"<16s{TOKEN_BYTES}sQ")
HELLO_BYTES, WELCOME_BYTES = _HELLO.size, _WELCOME.size
_ASK_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


PATIENCE_S = 1.0
"""How long a caller may take to say who it is."""
HELD_PER_PEER = 2
"""Callers that may be held for each missing peer."""
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)
"""Of this process or its system, for a moment."""
AT_ONCE = 64
"""Calls that are taken before others have their turn."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""How long no call is taken after the system has refused one, doubled each time."""


class TcpPipe(Pipe):
    """A pipe over a connected TCP socket."""

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
        except unless_signalled(BlockingIOError):
            return 0
        except unless_signalled(OSError) as problem:
            raise LinkEnded(f"sending failed: {problem.strerror or problem}") from problem

    def receive(self, into: memoryview) -> int:
        try:
            got = self._socket.recv_into(into)
        except unless_signalled(BlockingIOError):
            return 0
        except unless_signalled(OSError) as problem:
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
    """The greeting of a connecting peer: its rank, the channel, and how many groups of the other side it has applied.

    attempt: how often it has called for this channel, from 1. A call that it has given up may be heard after a later
    one; its number of applied groups is out of date, and it is refused.
    """

    token: bytes
    rank: int
    channel: int
    attempt: int
    applied: int

    def pack(self) -> bytes:
        return _HELLO.pack(MAGIC, self.token, self.rank, self.channel, self.attempt, self.applied)

    @classmethod
    def unpack(cls, data: bytes, token: bytes) -> Hello:
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

    timeout_s: for all of it. Raises LinkError where no process listens or another one answers, LinkEnded where it is
    worth another attempt: no answer in time, a connection that was closed, no descriptor left in this process.
    """
    where, until = f"{address.host}:{address.port}", clock() + timeout_s
    try:
        connected = socket.create_connection((address.host, address.port), timeout=timeout_s)
    except unless_signalled(OSError) as problem:
        text = f"no answer at {where}: {problem.strerror or problem} [kernel.network names the addresses to use]"
        again = isinstance(problem, TimeoutError) or problem.errno in OUT_OF_RESOURCES
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
    except unless_signalled(OSError) as problem:
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
            except unless_signalled(OSError):
                continue  # it has none
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


@dataclass
class _Caller:
    connected: socket.socket
    began_s: float
    greeting: bytes = b""


@dataclass(eq=False)
class Acceptor:
    """Takes calls without ever waiting for one. `admit` gets the greeting of a member and the pipe to it.

    wanted: how many peers are missing that will call; the port is closed while there are none.
    """

    listener: socket.socket | None
    address: Address
    clock: Callable[[], float]
    admit: Callable[[Hello, TcpPipe], None]
    wanted: Callable[[], int]
    trouble: str = ""
    """Why the last attempt to take a call failed; empty after one that did not."""
    _callers: list[_Caller] = field(default_factory=list)
    _events: select.epoll = field(default_factory=select.epoll)
    _is_listening: bool = False
    _is_closed: bool = False
    _pause_s: float = 0.0
    _pause_until_s: float = 0.0

    def __post_init__(self) -> None:
        in_child(self, Acceptor._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: what is registered there stays so for the parent. Sockets close themselves."""
        self._events.close()

    def fileno(self) -> int:
        return self._events.fileno()

    def tend(self) -> None:
        """Open or close the port, and hang up on the silent. Costs little where there is nothing to do."""
        wanted = 0 if self._is_closed else self.wanted()
        if not wanted:
            if self.listener is not None:
                self._shut()
            return
        now = self.clock()
        if now < self._pause_until_s:
            return
        if self.listener is None:
            self._tried(self._reopen)
        if self.listener is not None and not self._is_listening:
            self._events.register(self.listener.fileno(), select.EPOLLIN)
            self._is_listening = True
        for caller in [caller for caller in self._callers if now - caller.began_s > PATIENCE_S]:
            self._hang_up(caller)

    def answer(self) -> None:
        """Accept connections, and read the greetings of pending ones."""
        for caller in list(self._callers):
            self._hear(caller)
        most = HELD_PER_PEER * self.wanted()
        for _ in range(AT_ONCE):
            if self._is_closed or not self._is_listening or not self._tried(self._take):
                break
            while len(self._callers) > most:
                self._hang_up(self._callers[0])
        self.tend()

    def close(self) -> None:
        """Accept no more connections, and drop all references: cycles would be freed by the garbage collector only."""
        self._is_closed = True
        self.admit, self.wanted = lambda hello, pipe: pipe.close(), int
        self._shut()
        self._events.close()

    def _take(self) -> bool:
        assert self.listener is not None
        try:
            connected, _ = self.listener.accept()
        except unless_signalled(BlockingIOError, ConnectionAbortedError):
            return False
        in_child(connected, socket.socket.close)
        connected.setblocking(False)
        caller = _Caller(connected, self.clock())
        self._callers.append(caller)
        self._events.register(connected.fileno(), select.EPOLLIN)
        self._hear(caller)
        return True

    def _reopen(self) -> bool:
        self.listener = listen_at(self.address.host, self.address.port)
        return True

    def _tried(self, what: Callable[[], bool]) -> bool:
        """Do it, or pause where the system refuses: no descriptor or memory is left, or the port is taken."""
        try:
            done = what()
        except unless_signalled(OSError) as problem:
            self.trouble = problem.strerror or str(problem)
            self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._pause_until_s = self.clock() + self._pause_s
            self._deafen()
            return False
        if done:
            self.trouble, self._pause_s = "", 0.0
        return done

    def _hear(self, caller: _Caller) -> None:
        try:
            piece = caller.connected.recv(HELLO_BYTES - len(caller.greeting))
        except unless_signalled(BlockingIOError):
            return
        except unless_signalled(OSError):
            piece = b""
        caller.greeting += piece
        if not piece:
            self._hang_up(caller)
        elif len(caller.greeting) == HELLO_BYTES:
            self._callers.remove(caller)
            self._events.unregister(caller.connected.fileno())
            try:
                self.admit(Hello.unpack(caller.greeting, self.address.token), TcpPipe(caller.connected))
            except unless_signalled(LinkError, OSError):
                caller.connected.close()

    def _hang_up(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        caller.connected.close()  # which takes it out of the events too

    def _deafen(self) -> None:
        """Leave calls in the backlog of the system: a listener that is ready and not accepted from would spin."""
        if self._is_listening and self.listener is not None:
            self._events.unregister(self.listener.fileno())
        self._is_listening = False

    def _shut(self) -> None:
        self._deafen()
        for caller in list(self._callers):
            self._hang_up(caller)
        if self.listener is not None:
            self.listener.close()
        self.listener = None
