"""W ranks in one process and one thread: each rank is a flight, `interleave` advances them hop by hop.

The twin of a real group for tests, examples and virtual ranks on one GPU: same calls, same order, real sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator, offsets, sum_in_order
from moe_mk.errors import CommError
from moe_mk.flight import Flight, InFlight


class LockstepWorld:
    """The mail boxes that the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.boxes: dict[tuple[int, int], dict[int, tuple[str, Tensor]]] = defaultdict(dict)

    def communicators(self) -> list[LockstepCommunicator]:
        """One for each rank."""
        return [LockstepCommunicator(self, rank) for rank in range(self.size)]


class LockstepCommunicator(Communicator):
    """One emulated rank. Posts to every peer, yields once, takes from every peer."""

    def __init__(self, world: LockstepWorld, rank: int) -> None:
        super().__init__()
        self.world, self.rank, self.size = world, rank, world.size
        self._calls = 0

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        """Cut the rows and exchange the pieces."""
        self._count_sent(phase, rows, send)
        starts = offsets(send)
        outgoing = [rows[starts[peer] : starts[peer + 1]] for peer in range(self.size)]
        return torch.cat((yield from self._exchange(outgoing, receive, phase)))

    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """Give the same rows to every peer. Counted as a group would send them, padded to the longest rank."""
        self._count_sent(phase, rows, [max(counts)] * self.size)
        return torch.cat((yield from self._exchange([rows] * self.size, counts, phase)))

    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        """Sum in rank order, in f32."""
        self._count_reduced(phase, x)
        parts = yield from self._exchange([x.view(1, *x.shape)] * self.size, [1] * self.size, phase)
        return sum_in_order([part[0] for part in parts])

    def _exchange(self, outgoing: Sequence[Tensor], expected: Sequence[int], phase: str) -> Flight[list[Tensor]]:
        call, self._calls = self._calls, self._calls + 1
        for peer, part in enumerate(outgoing):
            self.world.boxes[call, peer][self.rank] = (phase, part.clone())
        yield InFlight(phase)
        inbox = self.world.boxes.pop((call, self.rank))
        for peer in range(self.size):
            if peer not in inbox:
                raise CommError(f"made no such call (number {call})", rank=self.rank, phase=phase, peer=peer)
        return self._opened(inbox, expected, phase)

    def _opened(self, inbox: dict[int, tuple[str, Tensor]], expected: Sequence[int], phase: str) -> list[Tensor]:
        for peer in range(self.size):
            if inbox[peer][0] != phase:
                raise CommError(f"is in phase {inbox[peer][0]!r} instead", rank=self.rank, phase=phase, peer=peer)
            if len(inbox[peer][1]) != expected[peer]:
                text = f"sent {len(inbox[peer][1])} rows, expected {expected[peer]}"
                raise CommError(text, rank=self.rank, phase=phase, peer=peer)
        return [inbox[peer][1] for peer in range(self.size)]
