"""W ranks in one process with a thread each, for code that waits for peers inside a call, as libraries do.

Same calls and results as lockstep. If a rank fails or is late, the others raise CommError after `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

import torch
from torch import Tensor

from moe_mk.comm.failure import Failure
from moe_mk.comm.lockstep import LockstepCommunicator, LockstepWorld
from moe_mk.errors import CommError
from moe_mk.flight import Flight, InFlight

X = TypeVar("X")


class ThreadWorld(LockstepWorld):
    """The mail boxes of W threads. timeout_s: how long a rank waits for a peer that posts nothing."""

    def __init__(self, size: int, *, timeout_s: float = 30.0) -> None:
        super().__init__(size)
        self.timeout_s = timeout_s
        self.changed = Condition()

    def communicators(self) -> list[LockstepCommunicator]:
        """One for each rank; each belongs to one thread."""
        return [ThreadCommunicator(self, rank) for rank in range(self.size)]

    def together(self, jobs: Sequence[Callable[[], X]]) -> list[X]:
        """Run one job a rank, all at once; raises what the first rank that failed raised, once all have ended."""
        grad = torch.is_grad_enabled()

        def with_grad(job: Callable[[], X]) -> X:
            with torch.set_grad_enabled(grad):  # autograd's switch belongs to a thread
                return job()

        with ThreadPoolExecutor(self.size, thread_name_prefix="rank") as ranks:
            return [done.result() for done in [ranks.submit(with_grad, job) for job in jobs]]


class GroupName(str):
    """The name of a rank's group, for libraries that are given no more than that; it knows the group itself."""

    group: ThreadCommunicator


class ThreadCommunicator(LockstepCommunicator):
    """One rank. Posts to every peer, yields once, waits for every peer."""

    world: ThreadWorld

    def library_group(self) -> ThreadCommunicator:
        """Itself: emulated libraries exchange through it."""
        return self

    @property
    def group_name(self) -> GroupName:
        """Name of the group, as process groups have one."""
        name = GroupName(f"threads {id(self.world):x}")
        name.group = self
        return name

    def swap(self, parts: Sequence[Sequence[Tensor]], phase: str) -> list[list[Tensor]]:
        """Give each peer a list of tensors of any sizes, all lists of one length; return theirs by rank. Waits."""
        received: list[list[Tensor]] = [[] for _ in parts]
        for column in zip(*parts, strict=True):
            inbox = self._inbox(phase, self._post(column, phase))
            for peer, mail in enumerate(received):
                mail.append(inbox[peer][1])
        return received

    def _report(self, failure: Failure) -> None:
        """Wake whoever waits: the status of the world is seen by all its threads."""
        with self.world.changed:
            self.world.changed.notify_all()

    def _recover(self, number: int) -> Flight[int]:
        world, epoch = self.world, self.world.epoch
        with world.changed:
            world.recovering[self.rank] = number
            if len(world.recovering) == self.size:
                self._forget_calls()
                world.status.failure = None  # before any rank goes on: its next call may come at once
                world.changed.notify_all()
        yield InFlight("recovery")
        with world.changed:
            if not world.changed.wait_for(lambda: world.epoch > epoch, world.timeout_s):
                missing = min(set(range(self.size)) - world.recovering.keys())
                raise CommError("did not call recover()", rank=self.rank, phase="recovery", peer=missing)
        self._calls = 0
        return world.largest

    def _post(self, outgoing: Sequence[Tensor], phase: str) -> int:
        with self.world.changed:
            call = super()._post(outgoing, phase)
            self.world.changed.notify_all()
        return call

    def _inbox(self, phase: str, call: int) -> dict[int, tuple[str, Tensor]]:
        box = call, self.rank
        with self.world.changed:
            world = self.world
            world.changed.wait_for(
                lambda: len(world.boxes[box]) == self.size or world.status.failure is not None, world.timeout_s
            )
            complete = len(world.boxes[box]) == self.size
            if not complete:
                self.check(phase)
            inbox = world.boxes.pop(box)
        if not complete:
            missing = next(peer for peer in range(self.size) if peer not in inbox)
            text = f"is later than {self.world.timeout_s:g} s"
            raise CommError(text, rank=self.rank, phase=phase, peer=missing)
        return inbox
