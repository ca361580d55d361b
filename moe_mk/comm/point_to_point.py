"""An all-to-all made of messages: every rank sends one to each peer and receives one from each, 2 (W - 1) in all.

The plain algorithm beside the collective: what `all_to_all_single` does, bit for bit, without asking a backend for it.
Over a gloo group, whose all-to-all is made of messages anyway, all are posted at once; over any other communicator they
go in W - 1 rounds, in round s to the rank s further on, so that no peer gets two at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator, offsets
from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.comm.failure import Failure
from moe_mk.flight import Flight, InFlight


class PointToPoint(Communicator):
    """One rank's view of a group whose all-to-all goes by messages; everything else is the group's own."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.kept, inner.status)
        self.inner, self.rank, self.size, self.layer = inner, inner.rank, inner.size, inner.layer
        self.traffic, self.lock = inner.traffic, inner.lock
        self.messages: Counter[str] = Counter()
        """Sent and received to and from peers, by phase."""

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        """Send the first send[0] rows to rank 0, and so on; what stays here is copied."""
        self.messages[phase] += 2 * (self.size - 1)
        if isinstance(self.inner, DistributedCommunicator):
            return (yield from self.inner.all_to_all(rows, send, receive, phase))
        starts, landing = offsets(send), offsets(receive)
        received = torch.empty((sum(receive), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        mine = slice(landing[self.rank], landing[self.rank + 1])
        received[mine] = rows[starts[self.rank] : starts[self.rank + 1]]
        parts = [rows[starts[peer] : starts[peer + 1]] for peer in range(self.size)]
        holes = [received[landing[peer] : landing[peer + 1]] for peer in range(self.size)]
        yield from self._in_rounds(parts, holes, phase)
        return received

    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """The group's own."""
        return (yield from self.inner.all_gather(rows, counts, phase))

    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        """The group's own."""
        return (yield from self.inner.all_reduce(x, phase))

    def library_group(self) -> object:
        """The group's own."""
        return self.inner.library_group()

    def number_layer(self) -> None:
        """The group's own."""
        self.inner.number_layer()

    def _report(self, failure: Failure) -> None:
        self.inner._report(failure)

    def _recover(self) -> Flight[None]:
        yield from self.inner._recover()

    def _epoch(self) -> int:
        return self.inner._epoch()

    def _count_stayed(self, phase: str, rows: Tensor, count: int) -> None:
        """Nothing: messages alone are counted."""

    def _others(self) -> Iterator[tuple[int, int]]:
        """(to, from) of each round."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size, (self.rank - step) % self.size

    def _in_rounds(self, parts: Sequence[Tensor], holes: Sequence[Tensor], phase: str) -> Flight[None]:
        for to, source in self._others():
            send, receive = [0] * self.size, [0] * self.size
            send[to], receive[source] = len(parts[to]), len(holes[source])
            holes[source].copy_((yield from self.inner.all_to_all(parts[to], send, receive, phase)))
        if self.size == 1:
            yield InFlight(phase)
