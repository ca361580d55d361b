"""Where peers call: a listening socket, and callers that have not said who they are yet."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_mk.comm.proxy.frames import LinkError
from moe_mk.comm.proxy.tcp import HELLO_BYTES, Address, Hello, TcpPipe

PATIENCE_S = 5.0
"""How long a caller may take to say who it is."""
MOST_CALLERS = 4096


@dataclass
class _Caller:
    connected: socket.socket
    began_s: float
    said: bytes = b""


def _nobody(hello: Hello, pipe: TcpPipe) -> None:
    """Admits no one."""
    pipe.close()


@dataclass
class Door:
    """Takes calls without ever waiting for one. `admit` gets the greeting of a member and the pipe to it."""

    listener: socket.socket
    address: Address
    clock: Callable[[], float]
    admit: Callable[[Hello, TcpPipe], None]
    _callers: list[_Caller] = field(default_factory=list)

    def answer(self) -> None:
        """Take what calls there are, hear what callers have said, and hang up on strangers and on the silent."""
        while len(self._callers) < MOST_CALLERS:
            try:
                connected, _ = self.listener.accept()
            except (BlockingIOError, OSError):
                break
            connected.setblocking(False)
            self._callers.append(_Caller(connected, self.clock()))
        self._callers = [caller for caller in self._callers if self._goes_on(caller)]

    @property
    def is_busy(self) -> bool:
        """Whether somebody has called and not said who."""
        return bool(self._callers)

    def close(self) -> None:
        """Take no more calls."""
        for caller in self._callers:
            caller.connected.close()
        self._callers, self.admit = [], _nobody
        self.listener.close()

    def _goes_on(self, caller: _Caller) -> bool:
        """Whether a caller still has to say more."""
        try:
            piece = caller.connected.recv(HELLO_BYTES - len(caller.said))
        except BlockingIOError:
            if self.clock() - caller.began_s < PATIENCE_S:
                return True
            piece = b""
        except OSError:
            piece = b""
        if not piece:
            caller.connected.close()
            return False
        caller.said += piece
        if len(caller.said) < HELLO_BYTES:
            return True
        try:
            self.admit(Hello.unpack(caller.said, self.address.token), TcpPipe(caller.connected))
        except LinkError:
            caller.connected.close()
        return False
