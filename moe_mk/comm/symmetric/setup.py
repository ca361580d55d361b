"""Opening a symmetric heap over a group: ranks of one process share its memory, processes of one host a file.

Between processes the group is used for two small gathers: who is there and what the file is called, then whether
everybody has mapped it. A rank that could not, because it runs on another host, ends the attempt on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import torch

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.comm.lockstep import LockstepCommunicator
from moe_mk.comm.symmetric.flags import (
    Clock,
    WaitingForProcess,
    WaitingInLockstep,
    reasons_against_words,
    words_of,
)
from moe_mk.comm.symmetric.heap import SymmetricHeap, WindowShape
from moe_mk.comm.symmetric.memory import Memory, attach, create, unlink
from moe_mk.errors import CommError, UnsupportedError, unless_signalled
from moe_mk.flight import wait
from moe_mk.process import Process, WatchedProcess

PHASE = "window set-up"
NOTE_BYTES = 512
"""Of a note at least: every run sends as much, whatever the numbers of its processes."""
X = TypeVar("X")


def reasons_against_heap(comm: Communicator) -> list[str]:
    """Why the ranks of a group can share no memory, as far as one rank can determine; empty if they can."""
    kinds = (LockstepCommunicator, DistributedCommunicator)
    reasons = [] if isinstance(comm, kinds) else [f"a {type(comm).__name__} joins neither processes nor virtual ranks"]
    return [*reasons, *filter(None, [reasons_against_words()])]


def open_heap(
    comm: Communicator, num_flags: int, data_bytes: int, clock: Clock, *, notes_bytes: int = 0
) -> SymmetricHeap:
    """Open the same heap on every rank; all ranks must do so in the same order.

    clock: seconds, for deadlines. notes_bytes: see `WindowShape`.
    Between processes it blocks until every rank has come; virtual ranks do not wait.
    Raises UnsupportedError for a group that shares nothing, CommError if ranks disagree or are on several hosts.
    """
    if reasons := reasons_against_heap(comm):
        raise UnsupportedError("no memory can be shared in this group", reasons)
    shape = WindowShape(comm.size, num_flags, data_bytes, notes_bytes)
    if isinstance(comm, LockstepCommunicator):
        memory = Memory(shape.total_bytes, shared_in_world(comm, shape.total_bytes, torch.device("cpu")))
        return SymmetricHeap(memory, words_of(memory.bytes), shape, comm.rank, partial(WaitingInLockstep, comm.rank))
    assert isinstance(comm, DistributedCommunicator)
    with Opening(comm, shape, range(comm.size)) as opening:
        problem = opening.tried(opening.create)[1]
        notes = opening.agreed({"name": opening.name, "problem": problem})
        opening.agreed({"problem": opening.tried(lambda: opening.attach(notes))[1]})
    assert opening.memory is not None
    peers = [WatchedProcess.of(Process(**note["process"])) for note in notes]
    # Numbers, so that the heap keeps no group alive.
    waits = partial(WaitingForProcess, comm.rank, peers=peers, timeout_s=comm.timeout_s, clock=clock)
    return SymmetricHeap(opening.memory, words_of(opening.memory.bytes), shape, comm.rank, waits, comm.layer)


class Opening:
    """A heap that is being opened, together with every rank: the memory of this host, and the notes of all ranks.

    A context that takes the name of the file away at its end.
    """

    failed = "not all ranks can map one piece of shared memory"
    remedy = " [kernel.prepare_finalize = all_to_all where ranks are on several hosts or in several containers]"
    problems: tuple[type[Exception], ...] = (OSError,)
    """Of one rank, which the others must hear of."""

    def __init__(self, comm: Communicator, shape: WindowShape, near: Sequence[int]) -> None:
        """near: the ranks that share memory with this one, itself included."""
        self.comm, self.shape, self.near = comm, shape, near
        self.name = ""
        self.memory: Memory | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.name:
            unlink(self.name)  # everybody has mapped it, or never will; whoever is left removes it

    def create(self) -> None:
        """The first rank of a host makes its file, with the pages of all flags and notes; a rank alone needs none."""
        if len(self.near) == 1:
            self.memory = Memory(self.shape.total_bytes)
        elif self.comm.rank == self.near[0]:
            self.name, memory = create(self.shape.total_bytes)
            self.memory = memory
            for rank in self.near:
                start, data_at = rank * self.shape.window_bytes, self.shape.data_at
                memory.reserve(start, data_at)
                notes_at = start + data_at + self.shape.data_bytes - self.shape.notes_bytes
                memory.reserve(notes_at, self.shape.notes_bytes)

    def attach(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """The others map it. notes: of all ranks."""
        self.name = str(notes[self.near[0]]["name"])
        if self.memory is None:
            self.memory = attach(self.name, self.shape.total_bytes)

    def tried(self, make: Callable[[], X]) -> tuple[X | None, str]:
        """The result of `make`, or the problem in words."""
        try:
            return make(), ""
        except unless_signalled(*self.problems) as problem:
            return None, str(problem)

    def agreed(self, note: Mapping[str, object]) -> list[dict[str, Any]]:
        """Everybody's note, with its process. Raises CommError on every rank where one has a problem, or differs."""
        own = {"bytes": self.shape.total_bytes, "process": vars(Process.this()), **note}
        notes = [json.loads(text) for text in wait(self.comm.gather_texts(json.dumps(own).ljust(NOTE_BYTES), PHASE))]
        for peer, other in enumerate(notes):
            if other["bytes"] != own["bytes"]:
                self.fail(f"opens windows of {other['bytes']} bytes in all, this rank {own['bytes']}", peer)
        lines = [f"rank {rank}: {other['problem']}" for rank, other in enumerate(notes) if other["problem"]]
        if lines:
            self.fail(f"{self.failed}: {'; '.join(lines)}{self.remedy}")
        return notes

    def fail(self, text: str, peer: int | None = None) -> NoReturn:
        raise CommError(text, rank=self.comm.rank, phase=PHASE, layer=self.comm.layer, peer=peer, on_all_ranks=True)


def shared_in_world(comm: LockstepCommunicator, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed bytes on a device that all ranks of one process hold; the n-th of a rank is the n-th of every rank.

    Raises CommError if another rank has opened another size. Numbers below zero are no calls of collectives.
    """
    boxes, number = comm.world.boxes, -1
    while comm.rank in boxes[number, 0]:
        number -= 1
    box = boxes[number, 0]
    if box:
        shared = next(iter(box.values()))[1]
    elif device.type == "cpu":  # pages that are taken as they are written
        shared = Memory(num_bytes).bytes
    else:
        shared = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if shared.numel() != num_bytes:
        text = f"opens {shared.numel()} bytes of shared memory, this rank {num_bytes}"
        raise CommError(text, rank=comm.rank, phase=PHASE, peer=next(iter(box)))
    box[comm.rank] = (PHASE, shared)
    if len(box) == comm.size:  # everybody holds it: the world need not
        box.update(dict.fromkeys(box, (PHASE, shared[:0].clone())))
    return shared
