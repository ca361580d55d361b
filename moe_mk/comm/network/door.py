"""Where peers call: a listening socket, open while peers are missing, and callers that have not said who they are yet.

Strangers may call as well, in any number. Of callers that have not brought a token yet, at most two for each missing
peer are held, each for a short time; a further one takes the place of the oldest. A member sends its greeting with its
first bytes, so that it is seldom among those; one that is calls again (`Proxy.connect`). Where this process has no
descriptor left, nobody is taken for a while and `trouble` says why.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_mk.comm.fork import in_child
from moe_mk.comm.network.frames import LinkError
from moe_mk.comm.network.tcp import HELLO_BYTES, Address, Hello, TcpPipe, listen_at

PATIENCE_S = 1.0
"""How long a caller may take to say who it is."""
HELD_PER_PEER = 2
"""Callers that may be held for each missing peer."""
AT_ONCE = 64
"""Calls that are taken before others have their turn."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""How long no call is taken after the system has refused one, doubled each time."""


@dataclass
class _Caller:
    connected: socket.socket
    began_s: float
    said: bytes = b""


def _refuse(hello: Hello, pipe: TcpPipe) -> None:
    """Let nobody in."""
    pipe.close()


@dataclass(eq=False)
class Door:
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
    most_held: int = 0
    """Callers that were ever held at once."""
    _callers: list[_Caller] = field(default_factory=list)
    _events: select.epoll = field(default_factory=select.epoll)
    _is_listening: bool = False
    _is_closed: bool = False
    _pause_s: float = 0.0
    _pause_until_s: float = 0.0

    def __post_init__(self) -> None:
        in_child(self, Door._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: what is registered there stays so for the parent. Sockets close themselves."""
        self._events.close()

    def fileno(self) -> int:
        """Readable when somebody calls or speaks."""
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
        """Take what calls there are, and hear what callers have said."""
        for caller in list(self._callers):
            self._hear(caller)
        most = HELD_PER_PEER * self.wanted()
        for _ in range(AT_ONCE):
            if self._is_closed or not self._is_listening or not self._tried(self._take):
                break
            while len(self._callers) > most:
                self._hang_up(self._callers[0])
            self.most_held = max(self.most_held, len(self._callers))
        self.tend()

    def close(self) -> None:
        """Take no more calls, and refer to nobody: what those hold would go with the next collection only."""
        self._is_closed = True
        self.admit, self.wanted = _refuse, int
        self._shut()
        self._events.close()

    def _take(self) -> bool:
        """One call; whether there was one."""
        assert self.listener is not None
        try:
            connected, _ = self.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
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
        except OSError as problem:
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
            piece = caller.connected.recv(HELLO_BYTES - len(caller.said))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        caller.said += piece
        if not piece:
            self._hang_up(caller)
        elif len(caller.said) == HELLO_BYTES:
            self._let_in(caller)

    def _let_in(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self._events.unregister(caller.connected.fileno())
        try:
            self.admit(Hello.unpack(caller.said, self.address.token), TcpPipe(caller.connected))
        except (LinkError, OSError):
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
