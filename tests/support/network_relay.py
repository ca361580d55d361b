"""A network between two ranks that a test can cut or hold up: every connection passes a socket in between."""

import contextlib
import selectors
import socket
import threading
from typing import Self

from moe_mk.comm.network.tcp import Address, listen

HOLD_S = 0.01


class Relay:
    """Forwards connections to an address, in a thread of its own, until it is reported otherwise."""

    def __init__(self, to: Address) -> None:
        self._listener, own = listen("127.0.0.0/8")
        self._listener.setblocking(True)
        self.address = Address(own.host, own.port, to.token)
        self._to, self._pairs = to, dict[socket.socket, socket.socket]()
        self.is_held_up, self.is_cut, self._is_over = threading.Event(), threading.Event(), threading.Event()
        self._events = selectors.DefaultSelector()
        self._events.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._hang_up()
        self._listener.close()

    def _run(self) -> None:
        while not self._is_over.is_set():
            if self.is_cut.is_set():
                self._hang_up()
            if self.is_held_up.is_set():  # connections stay open, and nothing moves
                self._is_over.wait(HOLD_S)
                continue
            for key, _ in self._events.select(HOLD_S):
                if key.fileobj is self._listener:
                    self._join()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pairs:
                    self._forward(key.fileobj)

    def _join(self) -> None:
        caller, _ = self._listener.accept()
        if self.is_cut.is_set():
            caller.close()
            return
        called = socket.create_connection((self._to.host, self._to.port), timeout=20.0)
        self._pairs |= {caller: called, called: caller}
        for each in (caller, called):
            self._events.register(each, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        piece = b""
        with contextlib.suppress(OSError):
            piece = source.recv(1 << 16)
        with contextlib.suppress(OSError):
            self._pairs[source].sendall(piece)
        if not piece:
            self._end(source)

    def _end(self, source: socket.socket) -> None:
        other = self._pairs.pop(source)
        self._pairs.pop(other)
        for each in (source, other):
            self._events.unregister(each)
            each.close()

    def _hang_up(self) -> None:
        while self._pairs:
            self._end(next(iter(self._pairs)))
