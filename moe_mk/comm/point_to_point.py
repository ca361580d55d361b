"""An all-to-all made of messages: every rank sends one to each peer and receives one from each, 2 (W - 1) in all.

The plain algorithm beside the collective: what `all_to_all_single` does, bit for bit, without asking a backend for it.
Over a process group all messages are posted at once (`batch_isend_irecv`); over any other communicator they go in W - 1
rounds, in round s to the rank s further on, so that no peer gets two at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.communicator import Communicator, offsets
from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S, DistributedCommunicator, carrier
from moe_mk.errors import CommError
from moe_mk.flight import Flight, InFlight


class PointToPoint(Communicator):
    """One rank's view of a group whose all-to-all goes by messages; everything else is the group's own."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.kept)
        self.inner, self.rank, self.size, self.layer = inner, inner.rank, inner.size, inner.layer
        self.traffic = inner.traffic
        self.messages: Counter[str] = Counter()
        """Sent and received to and from peers, by phase."""

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        """Send the first send[0] rows to rank 0, and so on; what stays here is copied."""
        starts, landing = offsets(send), offsets(receive)
        received = torch.empty((sum(receive), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        mine = slice(landing[self.rank], landing[self.rank + 1])
        received[mine] = rows[starts[self.rank] : starts[self.rank + 1]]
        parts = [rows[starts[peer] : starts[peer + 1]] for peer in range(self.size)]
        holes = [received[landing[peer] : landing[peer + 1]] for peer in range(self.size)]
        self.messages[phase] += 2 * (self.size - 1)
        if isinstance(self.inner, DistributedCommunicator):
            yield from self._at_once(self.inner, parts, holes, phase)
        else:
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

    def _at_once(
        self, inner: DistributedCommunicator, parts: Sequence[Tensor], holes: Sequence[Tensor], phase: str
    ) -> Flight[None]:
        backends = dict(pair.split(":") for pair in dist.get_backend_config(inner.group).split(","))
        where = carrier(parts[0].device, backends)
        outward = {to: _sendable(parts[to]).to(where) for to, _ in self._others()}
        inward = {source: torch.empty_like(_sendable(holes[source]), device=where) for _, source in self._others()}
        operations = []
        for to, source in self._others():
            operations.append(dist.P2POp(dist.isend, outward[to], group=inner.group, group_peer=to))
            operations.append(dist.P2POp(dist.irecv, inward[source], group=inner.group, group_peer=source))
            self.traffic.moved(phase, to, parts[to].numel() * parts[to].element_size(), self.rank)
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
            yield InFlight(phase)
            for work in works:
                timed = backends[where.type] == "gloo"
                work.wait(timedelta(seconds=inner.timeout_s)) if timed else work.wait()
        except RuntimeError as problem:
            raise self._late(inner, problem, phase) from problem
        for source, message in inward.items():
            if holes[source].numel():
                holes[source].copy_(message.view(holes[source].shape))

    def _late(self, inner: DistributedCommunicator, problem: RuntimeError, phase: str) -> CommError:
        limit = inner.timeout_s or DEFAULT_TIMEOUT_S
        first_line = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        text = f"a peer of {self.size} is dead or later than {limit:g} s [kernel.timeout_s]: {first_line}"
        return CommError(text, rank=self.rank, phase=phase, layer=self.layer)


def _sendable(part: Tensor) -> Tensor:
    """A message of its own: contiguous, and one element where there are no rows, because not all backends send none."""
    return part.contiguous() if part.numel() else torch.zeros((1,), dtype=part.dtype, device=part.device)
