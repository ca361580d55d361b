"""Waiting for ranks of other hosts, and memory for what is on its way to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_mk.comm.network.proxy import Proxy
from moe_mk.comm.symmetric.flags import PULSE_S, Clock, Waiting

GRACE_S = 0.5
"""How long a peer that has left may have done so because of one that has not been seen to end yet."""


@dataclass
class Staging:
    """Memory for rows on their way out, taken and freed in the same order."""

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


class WaitingForHosts(Waiting):
    """Wait for the proxy to bring something from another host, and for processes of this one as before."""

    def __init__(
        self, rank: int, phase: str, epoch: int, layer: str, *, near: Waiting,
        near_dead: Callable[[], int | None], far: frozenset[int], proxy: Proxy, timeout_s: float, clock: Clock,
    ) -> None:  # fmt: skip
        """near_dead: a rank of this host whose process has ended, if there is one."""
        super().__init__(rank, phase, epoch, layer)
        self._near, self._near_dead, self._far, self._proxy = near, near_dead, far, proxy
        self._timeout_s, self._clock, self._began, self._verdict = timeout_s, clock, clock(), ""
        self._dead: int | None = None
        self._left_at: float | None = None

    def pause(self, peer: int) -> None:
        """Raise only after one more look at what is waited for."""
        if self._verdict:
            raise self.error(peer if self._dead is None else self._dead, self._verdict)
        if peer in self._far:
            self._proxy.window.arrived.wait(PULSE_S)
            self._proxy.window.arrived.clear()
            self._look(peer)
        else:
            self._near.pause(peer)
            if self._proxy.lost or self._proxy.fault is not None:
                self._look(peer)

    def _look(self, peer: int) -> None:
        lost = self._proxy.lost
        if self._proxy.fault is not None:
            self._verdict = f"the proxy of this rank has failed: {self._proxy.fault}"
        elif lost:
            # Whoever is awaited may have met it first and given up: the one that was lost is named.
            self._dead = next(iter(lost))
            self._verdict = lost[self._dead]
        elif self._clock() - self._began > self._timeout_s:
            text = f"sent nothing within {self._timeout_s:g} s [kernel.timeout_s]; it is dead, stuck or late"
            self._verdict = "; ".join(filter(None, (text, self._proxy.resuming())))
        elif peer in self._proxy.left and not self._proxy.resuming():
            self._look_who_made_it_leave(self._proxy.left[peer])

    def _look_who_made_it_leave(self, ended: str) -> None:
        """A process that is killed loses its connections a moment before it counts as ended."""
        now = self._clock()
        self._left_at = now if self._left_at is None else self._left_at
        self._dead = self._near_dead()
        if self._dead is not None:
            self._verdict = "its process has ended"
        elif now - self._left_at > GRACE_S:
            self._verdict = "has closed its windows" + (f" after {ended}" if ended else "")
