"""Windows of GPUs that every rank can reach, by the first way that serves all of them.

    one piece           ranks of one process
    a file in memory    processes whose kernels are interpreted on a CPU
    symmetric memory    processes with a GPU each: torch maps what it has taken for that
    CUDA IPC            any processes of a host, two on one GPU included: handles of ordinary memory

The last two are a choice of all ranks together: each says what it lacks, and one that lacks anything is enough for IPC.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.lockstep import LockstepCommunicator
from moe_mk.comm.symmetric.setup import PHASE, open_heap, shared_in_world
from moe_mk.errors import CommError
from moe_mk.external.device import identity, synchronize
from moe_mk.external.device_memory import describe_window, open_window
from moe_mk.external.symmetric_memory import SymmetricMemory, addresses_of, library, window_of
from moe_mk.flight import land
from moe_mk.trace.clock import now

NOTE_BYTES = 1024
WINDOW_BYTES = 4096
"""Windows of one piece of memory begin at multiples of this."""


@dataclass(frozen=True)
class Mapped:
    """This rank's window of zeros, the addresses of all, and how they were mapped."""

    own: Tensor
    addresses: list[int]
    held: object
    """What must live as long as the addresses are used."""
    how: str


def map_windows(comm: Communicator, num_bytes: int, device: torch.device) -> Mapped:
    """Open a window on every rank, all in the same order. Raises CommError where peers cannot be mapped."""
    if isinstance(comm, LockstepCommunicator):
        stride = -(-num_bytes // WINDOW_BYTES) * WINDOW_BYTES
        whole = shared_in_world(comm, comm.size * stride, device)
        own = whole[comm.rank * stride : comm.rank * stride + num_bytes]
        return Mapped(own, [whole.data_ptr() + rank * stride for rank in range(comm.size)], whole, "one piece")
    if device.type == "cpu":
        heap = open_heap(comm, 0, num_bytes, now)
        for rank in range(comm.size):  # kernels write where they like: pages must be there
            heap.reserve(rank, 0, num_bytes)
        addresses = [heap.address(rank) for rank in range(comm.size)]
        return Mapped(heap.data(comm.rank, 0, num_bytes), addresses, heap, "a file in memory")
    return between_gpus(comm, num_bytes, device, identity(device), library(), by_ipc)


def between_gpus(
    comm: Communicator,
    num_bytes: int,
    device: torch.device,
    gpu: str,
    torch_memory: SymmetricMemory | None,
    otherwise: Callable[[Communicator, int, torch.device], Mapped],
) -> Mapped:
    """By torch's symmetric memory if every rank has that and a GPU of its own. gpu: what tells GPUs of a host apart."""
    own, problem = window_of(num_bytes, device, torch_memory)
    synchronize(device)  # zeros before anybody knows of it
    reasons = _reasons_against(_exchanged(comm, f"{gpu}\n{problem}"))
    if reasons:
        mapped = otherwise(comm, num_bytes, device)
        return Mapped(mapped.own, mapped.addresses, mapped.held, f"{mapped.how}, not symmetric memory: {reasons}")
    assert own is not None and torch_memory is not None
    try:
        addresses, handle = addresses_of(own, comm.library_group(), torch_memory, lambda text: _exchanged(comm, text))
    except RuntimeError as error:
        raise CommError(str(error), rank=comm.rank, phase=PHASE, layer=comm.layer) from error
    return Mapped(own, addresses, handle, "symmetric memory")


def by_ipc(comm: Communicator, num_bytes: int, device: torch.device) -> Mapped:
    """By handles of the driver."""
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    synchronize(device)
    opened = [
        own if rank == comm.rank else open_window(text, num_bytes)
        for rank, text in enumerate(_exchanged(comm, describe_window(own)))
    ]
    return Mapped(own, [window.data_ptr() for window in opened], opened, "CUDA IPC")


def _reasons_against(notes: list[str]) -> str:
    """Why not all ranks can; empty if they can."""
    gpus, problems = zip(*(note.partition("\n")[::2] for note in notes), strict=True)
    reasons = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if len(set(gpus)) < len(gpus):
        first = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        reasons.append(f"ranks {', '.join(str(r) for r, gpu in enumerate(gpus) if gpu == first)} share GPU {first}")
    return "; ".join(reasons)


def _exchanged(comm: Communicator, text: str) -> list[str]:
    """What every rank says."""
    encoded = text.encode()[:NOTE_BYTES]
    note = torch.tensor([list(encoded.ljust(NOTE_BYTES))], dtype=torch.uint8, device="cpu")
    rows = land(comm.all_gather(note, [1] * comm.size, PHASE))
    return [bytes(row).decode(errors="replace").rstrip(" ") for row in rows.tolist()]
