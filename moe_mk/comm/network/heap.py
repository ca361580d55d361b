"""A symmetric heap over several hosts: shared memory inside a host, a proxy for the windows of other hosts.

The contract is that of `SymmetricHeap`. A put to another host becomes a command of 16 bytes. Its rows are copied once,
into memory that the proxy reads (`Staging`), unless they are in this rank's own window: those must stay unchanged until
`quiet`, or until the peer has answered. On both paths a signal is visible after the puts that precede it.

    registered memory of a rank    [ data of its window, which peers write | staging ]

`WaitingForHosts` waits for ranks of other hosts and reports the rank that was lost.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from moe_mk.comm.failure import Failure
from moe_mk.comm.network.command import Op, TransferCommand
from moe_mk.comm.network.proxy import Proxy
from moe_mk.comm.symmetric.flags import PULSE_S, WORD_BYTES, Clock, WaitingForProcess, Words, word_of
from moe_mk.comm.symmetric.heap import StartWaiting, SymmetricHeap, WindowShape
from moe_mk.comm.symmetric.memory import Memory
from moe_mk.errors import ShapeError
from moe_mk.process import WatchedProcess, in_child

ENDED = "its process has ended"
GRACE_S = 0.5
"""How long a peer that has left may have done so because of one that has not been seen to end yet."""


CHUNK_BYTES = 1 << 20
"""Bytes that are staged before the proxy is notified: it sends while the next piece is copied."""
CLOSING_S = 5.0
"""How long the end of a heap waits for confirmations."""
REPORTING_S = 0.2
"""How long it does after a failure, of the report alone."""


@dataclass
class Staging:
    """Memory for rows that are being sent, taken and freed in the same order."""

    at: int
    num_bytes: int
    is_done: Callable[[int, int], bool]
    """Whether a command of a channel is done."""
    _taken: int = 0
    """Bytes since the beginning."""
    _freed: int = 0
    _uses: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Up to where, for which command of which channel."""

    def take(self, size: int) -> int | None:
        """Where so many bytes may be written; None if there is no room yet."""
        to_end = self.num_bytes - self._taken % self.num_bytes
        begins = self._taken + (to_end if size > to_end else 0)
        while self._uses and self.is_done(*self._uses[0][1:]):
            self._freed = self._uses.popleft()[0]
        if not self._uses:
            self._freed = self._taken
        if self._uses and begins + size - self._freed > self.num_bytes:
            return None
        self._taken = begins + size
        return self.at + begins % self.num_bytes

    def used(self, channel: int, place: int) -> None:
        """The bytes taken last belong to this command."""
        self._uses.append((self._taken, channel, place))


class WaitingForHosts(WaitingForProcess):
    """Wait for the proxy to bring something from another host, and for processes of this one as before."""

    def __init__(
        self, rank: int, phase: str, epoch: int, layer: str, *, peers: Sequence[WatchedProcess], timeout_s: float,
        clock: Clock, far: frozenset[int], proxy: Proxy,
    ) -> None:  # fmt: skip
        super().__init__(rank, phase, epoch, layer, peers=peers, timeout_s=timeout_s, clock=clock)
        self._far, self._proxy, self._far_since = far, proxy, clock()
        self._dead: int | None = None
        self._left_at: float | None = None

    def pause(self, peer: int) -> None:
        """Raise only after one more look at what is waited for."""
        if self._verdict:
            raise self.error(peer if self._dead is None else self._dead, self._verdict)
        if peer in self._far:
            is_silent = not self._proxy.window.arrived.wait(PULSE_S)
            self._proxy.window.arrived.clear()
            self._look_far(peer)
            if is_silent and not self._verdict and peer not in self._proxy.left and self._first_dead() == peer:
                self._verdict = ENDED
        else:
            super().pause(peer)
            if self._proxy.lost or self._proxy.fault is not None:
                self._look_far(peer)

    def _first_dead(self) -> int | None:
        """A rank with an ended process, if there is one; those of other hosts cannot be seen."""
        return next((number for number, each in enumerate(self._peers) if each.is_gone()), None)

    def _look_far(self, peer: int) -> None:
        lost = self._proxy.lost
        if self._proxy.fault is not None:
            fault = self._proxy.fault
            self._verdict = f"the proxy of this rank has failed: {str(fault) or type(fault).__name__}"
        elif lost:
            # Whoever is awaited may have met it first and given up: the one that was lost is named.
            self._dead = next(iter(lost))
            self._verdict = lost[self._dead]
        elif self._clock() - self._far_since > self._timeout_s:
            self._verdict = "; ".join(filter(None, (self._late, self._proxy.resuming())))
        elif peer in self._proxy.left and not self._proxy.resuming():
            self._look_who_made_it_leave(self._proxy.left[peer])

    def _look_who_made_it_leave(self, ended: str) -> None:
        """The sockets of a killed process close shortly before the process counts as exited."""
        now = self._clock()
        self._left_at = now if self._left_at is None else self._left_at
        self._dead = self._first_dead()
        if self._dead is not None:
            self._verdict = ENDED
        elif now - self._left_at > GRACE_S:
            self._verdict = "has closed its windows" + (f" after {ended}" if ended else "")


class NetworkHeap(SymmetricHeap):
    """One rank's hold on the windows of all, on this host and on others."""

    is_addressable = False

    def __init__(
        self, memory: Memory, words: Words, shape: WindowShape, rank: int, waiting: StartWaiting, *, proxy: Proxy,
        far: frozenset[int], staging: Staging, layer: str = "",
    ) -> None:  # fmt: skip
        """memory: room for the windows of all ranks; those of `far` are never touched. The heap owns the proxy."""
        super().__init__(memory, words, shape, rank, waiting, layer)
        self.proxy, self.far, self._staging = proxy, far, staging
        self._in_a_hurry = False
        """Whether nothing is waited for any more."""
        self.close = weakref.finalize(self, proxy.close, CLOSING_S)
        """Ends the threads, once what was committed has been confirmed."""
        in_child(self, NetworkHeap._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: the proxy is the parent's to end."""
        super()._leave_to_parent()
        self.close.detach()

    def report(self, failure: Failure, flags: Sequence[int]) -> None:
        """See `SymmetricHeap.report`; then end the threads, as soon as peers have it."""
        self._in_a_hurry = True
        super().report(failure, flags)
        if self.close.detach() is not None:
            self.proxy.close(REPORTING_S)

    def data(self, peer: int, at: int, num_bytes: int) -> Tensor:
        """Bytes of a window of this host as they lie there. Raises ShapeError beyond its end, or on another host."""
        if peer in self.far:
            raise ShapeError(f"the window of rank {peer} is on another host; put into it, or get from it")
        return super().data(peer, at, num_bytes)

    def put(self, peer: int, at: int, rows_RB: Tensor, index_X: Tensor | None = None) -> None:
        """Write rows of bytes into a peer's window, one behind the other; see `SymmetricHeap.put`."""
        if peer not in self.far:
            super().put(peer, at, rows_RB, index_X)
            return
        count, width = rows_RB.shape[0] if index_X is None else index_X.shape[0], rows_RB.shape[1]
        self._check_far(peer, at, count * width)
        if not count * width:
            return
        self.traffic.moved("put", peer, count * width, self.rank)
        own = self._registered_at(rows_RB) if index_X is None else None
        if own is not None:
            for first in range(0, count * width, CHUNK_BYTES):
                size = min(CHUNK_BYTES, count * width - first)
                self._commit(TransferCommand(Op.PUT, peer, size, own + first, at + first))
            return
        at_once = max(CHUNK_BYTES // width, 1)
        for first in range(0, count, at_once):
            rows = slice(first, min(first + at_once, count))
            size = (rows.stop - first) * width
            source = self._staged(peer, size)
            staged_XB = self._own_bytes(source, size).view(-1, width)
            if index_X is None:
                staged_XB.copy_(rows_RB[rows])
            else:
                torch.index_select(rows_RB, 0, index_X[rows], out=staged_XB)
            place = self._commit(TransferCommand(Op.PUT, peer, size, source, at + first * width))
            self._staging.used(self._channel(peer), place)

    def read(self, peer: int, at: int, num_bytes: int) -> Tensor:
        """Bytes of a peer's window: a view on this host, a copy of those on another."""
        if peer not in self.far:
            return super().read(peer, at, num_bytes)
        self._check_far(peer, at, num_bytes)
        self.traffic.moved("get", peer, num_bytes, self.rank)
        pieces = []
        for first in range(0, num_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, num_bytes - first)
            source = self._staged(peer, size)
            place = self._commit(TransferCommand(Op.GET, peer, size, source, at + first))
            self._staging.used(self._channel(peer), place)
            self._until(partial(self._is_done, self._channel(peer), place), "get", peer)
            pieces.append(self._own_bytes(source, size).clone())
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device="cpu")

    def signal(self, peer: int, flag: int, epoch: int, count: int = 0) -> None:
        if peer not in self.far:
            super().signal(peer, flag, epoch, count)
            return
        assert 0 <= flag < self.shape.num_flags + self.size
        self.traffic.moved("signal", peer, WORD_BYTES, self.rank)
        self._commit(TransferCommand(Op.STORE, peer, flag=flag, value=word_of(epoch, count)))

    def add(self, peer: int, counter: int, value: int) -> None:
        """Add a number to a counter of a peer, seen after everything put to it before."""
        self._check()
        self.traffic.moved("add", peer, WORD_BYTES, self.rank)
        if peer in self.far:
            self._commit(TransferCommand(Op.ADD, peer, flag=counter, value=value))
        else:
            assert peer == self.rank, "counters of near peers are added to where they lie"
            self.proxy.window.add(self.rank, counter, value)

    def counter(self, counter: int) -> int:
        """Sum of what all ranks have added to a counter of this rank."""
        self._check()
        return self.proxy.window.counter(counter)

    def quiet(self) -> None:
        """Wait until every peer has all puts and signals of this rank. Raises CommError."""
        super().quiet()
        waiting = self._waiting("quiet", 0, self.layer)
        while (peer := self._unconfirmed()) is not None:
            waiting.pause(peer)

    def _unconfirmed(self) -> int | None:
        for channel in self.proxy.channels:
            if not channel.is_idle:
                taken = list(channel.taken)
                return taken[0].command.peer if taken else min(self.far)
        return None

    def _staged(self, peer: int, size: int) -> int:
        self._check()
        if size > self._staging.num_bytes:
            raise ShapeError(f"a row of {size} bytes exceeds the {self._staging.num_bytes} bytes of staging")
        waiting = self._waiting("put", 0, self.layer)
        while (source := self._staging.take(size)) is None:
            waiting.pause(peer)
        self.reserve(self.rank, source, size)
        return source

    def _commit(self, command: TransferCommand) -> int:
        """Hand a command to the proxy; returns its number in the ring."""
        self._check()
        channel = self._channel(command.peer)
        place = self.proxy.channels[channel].ring.head
        if not self.proxy.commit(channel, command):
            self._until(lambda: self.proxy.commit(channel, command), "put", command.peer)
        return place

    def _until(self, holds: Callable[[], bool], phase: str, peer: int) -> None:
        waiting = self._waiting(phase, 0, self.layer)
        while not holds():
            if self._in_a_hurry:
                raise waiting.error(peer, "is not reached at once")
            waiting.pause(peer)

    def _channel(self, peer: int) -> int:
        return peer % len(self.proxy.channels)

    def _is_done(self, channel: int, place: int) -> bool:
        return self.proxy.channels[channel].ring.tail > place

    def _own_bytes(self, source: int, size: int) -> Tensor:
        return super().data(self.rank, source, size)

    def _registered_at(self, rows_RB: Tensor) -> int | None:
        """Position of rows in the registered memory; None if they are not in it, or not contiguous."""
        registered = super().data(self.rank, 0, self.shape.data_bytes)
        at = rows_RB.data_ptr() - registered.data_ptr()
        inside = 0 <= at and at + rows_RB.numel() <= self.shape.data_bytes
        return at if inside and rows_RB.is_contiguous() else None

    def _check_far(self, peer: int, at: int, num_bytes: int) -> None:
        end = self.proxy.window.data_bytes
        if at < 0 or at + num_bytes > end:
            raise ShapeError(f"bytes {at} to {at + num_bytes} of rank {peer} are outside of a window of {end} bytes")
