"""Opening a symmetric heap over a group: ranks of one process share its memory, processes of one host a file.

Between processes the group is used for two small gathers: who is there and what the file is called, then whether
everybody has mapped it. A rank that could not, because it runs on another host, ends the attempt on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.comm.lockstep import LockstepCommunicator
from moe_mk.comm.symmetric.flags import (
    Clock,
    Waiting,
    WaitingForProcess,
    WaitingInLockstep,
    reasons_against_words,
    words_of,
)
from moe_mk.comm.symmetric.heap import SymmetricHeap, WindowShape
from moe_mk.comm.symmetric.memory import Memory, SharedMemory, attach, create, unlink
from moe_mk.errors import CommError, UnsupportedError, unless_signalled
from moe_mk.flight import wait
from moe_mk.process import Process

PHASE = "window set-up"
NOTE_BYTES = 512


def reasons_against_heap(comm: Communicator) -> list[str]:
    """Why the ranks of a group can share no memory, as far as one rank can determine; empty if they can."""
    kinds = (LockstepCommunicator, DistributedCommunicator)
    reasons = [] if isinstance(comm, kinds) else [f"a {type(comm).__name__} joins neither processes nor virtual ranks"]
    return [*reasons, *filter(None, [reasons_against_words()])]


def open_heap(comm: Communicator, num_flags: int, data_bytes: int, clock: Clock) -> SymmetricHeap:
    """Open the same heap on every rank; all ranks must do so in the same order.

    clock: seconds, for deadlines. Between processes it blocks until every rank has come; virtual ranks do not wait.
    Raises UnsupportedError for a group that shares nothing, CommError if ranks disagree or are on several hosts.
    """
    if reasons := reasons_against_heap(comm):
        raise UnsupportedError("no memory can be shared in this group", reasons)
    shape = WindowShape(comm.size, num_flags, data_bytes)
    if isinstance(comm, LockstepCommunicator):
        memory = _MailedMemory(shared_in_world(comm, shape.total_bytes, torch.device("cpu")))
        return SymmetricHeap(memory, words_of(memory.bytes), shape, comm.rank, partial(WaitingInLockstep, comm.rank))
    assert isinstance(comm, DistributedCommunicator)
    return _heap_of_processes(comm, shape, clock)


class _MailedMemory(Memory):
    """The memory behind a tensor that another rank has left in the world's mail boxes."""

    def __init__(self, bytes_: torch.Tensor) -> None:
        self.bytes = bytes_


def shared_in_world(comm: LockstepCommunicator, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed bytes on a device that all ranks of one process hold; the n-th of a rank is the n-th of every rank.

    Raises CommError if another rank has opened another size. Numbers below zero are no calls of collectives.
    """
    boxes, number = comm.world.boxes, -1
    while comm.rank in boxes[number, 0]:
        number -= 1
    box = boxes[number, 0]
    shared = next(iter(box.values()))[1] if box else _zeros(num_bytes, device)
    if shared.numel() != num_bytes:
        text = f"opens {shared.numel()} bytes of shared memory, this rank {num_bytes}"
        raise CommError(text, rank=comm.rank, phase=PHASE, peer=next(iter(box)))
    box[comm.rank] = (PHASE, shared)
    if len(box) == comm.size:  # everybody holds it: the world need not
        box.update(dict.fromkeys(box, (PHASE, shared[:0].clone())))
    return shared


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """On a CPU pages that are taken as they are written."""
    if device.type == "cpu":
        return Memory(num_bytes).bytes
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _heap_of_processes(comm: DistributedCommunicator, shape: WindowShape, clock: Clock) -> SymmetricHeap:
    memory, name, problem = None, "", ""
    try:
        if comm.rank == 0:
            name, memory, problem = _tried(lambda: _created(shape))
        mine = {"name": name, "bytes": shape.total_bytes, "process": vars(Process.this()), "problem": problem}
        notes = exchange_notes(comm, mine, NOTE_BYTES)
        name = str(notes[0]["name"])
        _check_sizes(comm, [int(note["bytes"]) for note in notes])
        _raise_problems(comm, notes)
        if comm.rank:
            _, memory, problem = _tried(lambda: (name, attach(name, shape.total_bytes)))
        _raise_problems(comm, exchange_notes(comm, {"problem": problem}, NOTE_BYTES))
    finally:
        if name:
            unlink(name)  # everybody has mapped it, or never will; whoever is left removes it
    assert memory is not None
    peers = [Process(**note["process"]) for note in notes]
    rank, timeout_s = comm.rank, comm.timeout_s  # numbers, so that the heap keeps no group alive

    def waits(phase: str, epoch: int, layer: str) -> Waiting:
        return WaitingForProcess(rank, phase, epoch, layer, peers=peers, timeout_s=timeout_s, clock=clock)

    return SymmetricHeap(memory, words_of(memory.bytes), shape, rank, waits, comm.layer)


def _created(shape: WindowShape) -> tuple[str, SharedMemory]:
    """A new file, with the pages of all flags taken."""
    name, memory = create(shape.total_bytes)
    try:
        for rank in range(shape.ranks):
            memory.reserve(rank * shape.window_bytes, shape.data_at)
    except unless_signalled(OSError):
        unlink(name)
        raise
    return name, memory


def _tried(make: Callable[[], tuple[str, SharedMemory]]) -> tuple[str, SharedMemory | None, str]:
    """What was made, or the problem in words."""
    try:
        return *make(), ""
    except unless_signalled(OSError) as problem:
        return "", None, str(problem)[: NOTE_BYTES // 2]


def exchange_notes(comm: Communicator, note: dict[str, object], most_bytes: int) -> list[dict[str, Any]]:
    """The note of each rank, in one collective. most_bytes: of its JSON, the same on all ranks."""
    text = json.dumps(note).encode()
    assert len(text) <= most_bytes
    row = torch.tensor([list(text.ljust(most_bytes))], dtype=torch.uint8, device="cpu")
    rows = wait(comm.all_gather(row, [1] * comm.size, PHASE))
    return [json.loads(bytes(other)) for other in rows.tolist()]


def _check_sizes(comm: DistributedCommunicator, sizes: list[int]) -> None:
    """Every rank raises when one differs, each with a peer that has another size than itself."""
    for peer, size in enumerate(sizes):
        if size != sizes[comm.rank]:
            text = f"opens {size} bytes of shared memory, this rank {sizes[comm.rank]}"
            raise CommError(text, rank=comm.rank, phase=PHASE, layer=comm.layer, peer=peer, on_all_ranks=True)


def _raise_problems(comm: DistributedCommunicator, notes: list[dict[str, Any]]) -> None:
    lines = [f"rank {rank}: {note['problem']}" for rank, note in enumerate(notes) if note["problem"]]
    if lines:
        text = "not all ranks can map one piece of shared memory: " + "; ".join(lines)
        text += " [kernel.prepare_finalize = all_to_all where ranks are on several hosts or in several containers]"
        raise CommError(text, rank=comm.rank, phase=PHASE, layer=comm.layer, on_all_ranks=True)
