"""W ranks in one process and one thread: each rank is a flight, `interleave` advances them step by step.

The twin of a real group for tests, examples and virtual ranks on one GPU: same calls, same order, real sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator, offsets, sum_in_order
from moe_mk.comm.failure import Changes, GroupStatus
from moe_mk.errors import CommError
from moe_mk.flight import Flight, InFlight


class LockstepWorld:
    """The mail boxes that the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.boxes: dict[tuple[int, int], dict[int, tuple[str, Tensor]]] = defaultdict(dict)
        self.status = GroupStatus()
        self.epoch = 0
        self.recovering: dict[int, int] = {}
        """Ranks that have called `recover` in this epoch, with their numbers."""
        self.largest = 0
        """Of the numbers of the last recovery."""

    def communicators(self) -> list[LockstepCommunicator]:
        return [LockstepCommunicator(self, rank) for rank in range(self.size)]


class LockstepCommunicator(Communicator):
    """One emulated rank. Posts to every peer, yields once, takes from every peer."""

    def __init__(self, world: LockstepWorld, rank: int) -> None:
        super().__init__(status=world.status)
        self.world, self.rank, self.size = world, rank, world.size
        self._calls, self._changes = 0, Changes()

    @property
    def changes(self) -> Changes:
        """Not of the status, which the ranks of one process share."""
        return self._changes

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        self._count_sent(phase, rows, send)
        starts = offsets(send)
        outgoing = [rows[starts[peer] : starts[peer + 1]] for peer in range(self.size)]
        return torch.cat((yield from self._exchange(outgoing, receive, phase)))

    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        self._count_sent(phase, rows, [rows.shape[0]] * self.size)
        return torch.cat((yield from self._exchange([rows] * self.size, counts, phase)))

    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        """Sum in rank order, in f32."""
        self._count_reduced(phase, x)
        parts = yield from self._exchange([x.view(1, *x.shape)] * self.size, [1] * self.size, phase)
        return sum_in_order([part[0] for part in parts])

    def _recover(self, number: int) -> Flight[int]:
        """The last rank to come forgets what was under way; the others wait for it."""
        world, epoch = self.world, self.world.epoch
        world.recovering[self.rank] = number
        if len(world.recovering) == self.size:
            self._forget_calls()
        yield InFlight("recovery")
        if world.epoch == epoch:
            missing = min(set(range(self.size)) - world.recovering.keys())
            raise CommError("did not call recover()", rank=self.rank, phase="recovery", peer=missing)
        self._calls = 0
        return world.largest

    def _epoch(self) -> int:
        return self.world.epoch

    def _forget_calls(self) -> None:
        """Empty the mail boxes; those below zero hold memory that ranks share, which is no call."""
        for box in [box for box in self.world.boxes if box[0] >= 0]:
            del self.world.boxes[box]
        self.world.largest = max(self.world.recovering.values())
        self.world.recovering.clear()
        self.world.epoch += 1

    def _exchange(self, outgoing: Sequence[Tensor], expected: Sequence[int], phase: str) -> Flight[list[Tensor]]:
        self.check(phase)
        epoch = self.status.epoch
        with self.abort_on_error(drops=False):
            call = self._post(outgoing, phase)
            yield InFlight(phase)
            self.check_epoch(epoch, phase)
            inbox = self._inbox(phase, call)
            for peer in range(self.size):
                if inbox[peer][0] != phase:
                    raise CommError(f"is in phase {inbox[peer][0]!r} instead", rank=self.rank, phase=phase, peer=peer)
                if len(inbox[peer][1]) != expected[peer]:
                    text = f"sent {len(inbox[peer][1])} rows, expected {expected[peer]}"
                    raise CommError(text, rank=self.rank, phase=phase, peer=peer)
            return [inbox[peer][1] for peer in range(self.size)]

    def _post(self, outgoing: Sequence[Tensor], phase: str) -> int:
        call, self._calls = self._calls, self._calls + 1
        for peer, part in enumerate(outgoing):
            self.world.boxes[call, peer][self.rank] = (phase, part.clone())
        return call

    def _inbox(self, phase: str, call: int) -> dict[int, tuple[str, Tensor]]:
        self.check(phase)
        inbox = self.world.boxes.pop((call, self.rank))
        for peer in range(self.size):
            if peer not in inbox:
                raise CommError(f"made no such call (number {call})", rank=self.rank, phase=phase, peer=peer)
        return inbox
