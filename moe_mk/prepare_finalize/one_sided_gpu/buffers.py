"""Windows of the GPU one-sided transport: how ranks map them, and the state of one call at a time.

The first way that every rank supports is used:

    one allocation      ranks of one process
    a file in memory    processes whose kernels are interpreted on a CPU
    symmetric memory    processes with a GPU each, memory allocated by torch's symmetric memory
    CUDA IPC            any processes of a host, two on one GPU included: handles of ordinary memory

All ranks agree on one of the last two: each reports what it lacks, and CUDA IPC is used if any rank lacks something.

During a call nothing is read on the host: calls are counted on the device, and a late peer is reported to the host
about one call later. So are counts and expert ids of a peer that are out of range; its rows are dropped, and nothing is
indexed by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.lockstep import LockstepCommunicator
from moe_mk.comm.symmetric.setup import PHASE, open_heap, shared_in_world
from moe_mk.errors import CommError, unless_signalled
from moe_mk.external.device import identity, synchronize
from moe_mk.external.device_memory import addresses_of, describe_window, library, open_window, window_of
from moe_mk.flight import wait
from moe_mk.kernels.native.exchange import FaultKind, PeerFault
from moe_mk.kernels.triton.one_sided import Windows, await_flags
from moe_mk.prepare_finalize.buffer_pool import BufferSlot
from moe_mk.trace.clock import now

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
    torch_memory: Any,
    otherwise: Callable[[Communicator, int, torch.device], Mapped],
) -> Mapped:
    """By torch's symmetric memory if every rank has that and a GPU of its own. gpu: identifies a GPU of the host."""
    own, problem = window_of(num_bytes, device, torch_memory)
    synchronize(device)  # zeros before anybody knows of it
    reasons = _reasons_against(wait(comm.gather_texts(f"{gpu}\n{problem}", PHASE)))
    if reasons:
        mapped = otherwise(comm, num_bytes, device)
        return Mapped(mapped.own, mapped.addresses, mapped.held, f"{mapped.how}, not symmetric memory: {reasons}")
    assert own is not None and torch_memory is not None
    try:
        addresses, handle = addresses_of(
            own, comm.library_group(), torch_memory, lambda text: wait(comm.gather_texts(text, PHASE))
        )
    except unless_signalled(RuntimeError) as error:
        raise CommError(str(error), rank=comm.rank, phase=PHASE, layer=comm.layer) from error
    return Mapped(own, addresses, handle, "symmetric memory")


def by_ipc(comm: Communicator, num_bytes: int, device: torch.device) -> Mapped:
    """By handles of the driver."""
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    synchronize(device)
    opened = [
        own if rank == comm.rank else open_window(text, num_bytes)
        for rank, text in enumerate(wait(comm.gather_texts(describe_window(own), PHASE)))
    ]
    return Mapped(own, [window.data_ptr() for window in opened], opened, "CUDA IPC")


def _reasons_against(notes: list[str]) -> str:
    gpus, problems = zip(*(note.partition("\n")[::2] for note in notes), strict=True)
    reasons = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if len(set(gpus)) < len(gpus):
        first = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        reasons.append(f"ranks {', '.join(str(r) for r, gpu in enumerate(gpus) if gpu == first)} share GPU {first}")
    return "; ".join(reasons)


PHASES = ("dispatch", "combine")


class GpuBufferSlot(BufferSlot):
    """The windows of all ranks for one call at a time."""

    def __init__(self, comm: Communicator, rows: int, row_bytes: int, sum_bytes: int, device: torch.device) -> None:
        self.rank, self.size, self.device, self.layer = comm.rank, comm.size, device, ""
        shape = Windows(torch.zeros(comm.size, dtype=torch.int64, device=device), comm.rank, rows, row_bytes, sum_bytes)
        mapped = self._mapped = map_windows(comm, shape.num_bytes, device)
        self.own, self.how = mapped.own, mapped.how
        """how: by what way peers reach this window, and why by no better one."""
        bases_W = torch.tensor(mapped.addresses, dtype=torch.int64, device=device)
        self.windows = Windows(bases_W, comm.rank, rows, row_bytes, sum_bytes)
        self.call_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.done_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self.active_W = torch.ones(comm.size, dtype=torch.int32, device=device)
        """0 for ranks that are left out: nothing is sent to them, and no rank waits for them. Read at every launch."""
        self._late_2W = torch.zeros((2, comm.size), dtype=torch.int64, device=device)
        self._seen_2W = torch.zeros((2, comm.size), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._faults_4W = torch.zeros((4, comm.size), dtype=torch.int64, device=device)
        """By peer: the first call with a count out of range and that count, the same for an expert id."""
        self._faults_seen_4W = self._seen_2W.new_zeros((4, comm.size), pin_memory=device.type == "cuda")
        self._num_experts = 0

    def serve(self, comm: Communicator) -> None:
        """Begin the next call. Raises CommError if a rank is known to have been late in an earlier one."""
        self.layer = comm.layer
        self.expect_punctual()

    def expect_punctual(self) -> None:
        """Raise CommError for the first rank that the host has heard to be late; it may hear of it a call later."""
        late_2W = self._seen_2W.tolist()
        for phase, calls in zip(PHASES, late_2W, strict=True):
            for peer, call in enumerate(calls):
                if call:
                    text = f"epoch {call}: raised no flag in time; it is dead, stuck or late"
                    raise CommError(text, rank=self.rank, phase=phase, layer=self.layer, peer=peer)
        for peer, (rows_call, rows, id_call, expert) in enumerate(self._faults_seen_4W.T.tolist()):
            if rows_call:
                fault = PeerFault(FaultKind.TOO_MANY_ROWS, peer, rows, self.windows.max_rows)
                raise fault.error(self.rank, rows_call, self.layer)
            if id_call:
                text = (
                    f"epoch {id_call}: a row is for expert {expert}, out of range (0 <= expert < {self._num_experts}, "
                    "or -1 for none)"
                )
                raise CommError(text, rank=self.rank, phase="dispatch", layer=self.layer, peer=peer)

    def await_flags(self, phase: str, looks: int) -> tuple[Tensor, Tensor]:
        """Counts and status of all ranks; late ranks of this call are recorded on the device and copied to the host."""
        counts_W, status_W = await_flags(
            self.windows, self.call_1, sums=phase == "combine", looks=looks, active_W=self.active_W
        )
        late_W = self._late_2W[PHASES.index(phase)]
        first_W = (late_W == 0) & (status_W != 0) & (self.active_W != 0)
        late_W.copy_(torch.where(first_W, self.call_1, late_W))
        self._seen_2W.copy_(self._late_2W, non_blocking=True)
        return counts_W, status_W

    def checked(self, counts_W: Tensor, ids_RK: Tensor, num_experts: int) -> Tensor:
        """The expert ids of all places of the window, -1 for places without a row and for ids out of range.

        counts_W: rows of each source, as `await_flags` returns them. ids_RK: physical ids, a copy of this rank's own.
        The first call of a peer with a count above the region or an id of no expert is noted for the host.
        """
        self._num_experts, max_rows = num_experts, self.windows.max_rows
        too_many_W = counts_W > max_rows
        self._note(0, too_many_W, counts_W)
        place_X = torch.arange(max_rows, dtype=torch.int32, device=self.device)
        filled_WX = place_X < counts_W.masked_fill(too_many_W, 0)[:, None]
        ids_WX = torch.where(filled_WX.flatten()[:, None], ids_RK, -1).view(self.size, -1)
        out_WX = (ids_WX < -1) | (ids_WX >= num_experts)
        first_W1 = out_WX.to(torch.int32).argmax(dim=1, keepdim=True)
        self._note(2, out_WX.any(dim=1), ids_WX.gather(1, first_W1)[:, 0])
        self._faults_seen_4W.copy_(self._faults_4W, non_blocking=True)
        return ids_WX.masked_fill(out_WX, -1).view(ids_RK.shape)

    def _note(self, kind: int, hit_W: Tensor, value_W: Tensor) -> None:
        call_W, held_W = self._faults_4W[kind], self._faults_4W[kind + 1]
        first_W = (call_W == 0) & hit_W & (self.active_W != 0)
        held_W.copy_(torch.where(first_W, value_W.to(torch.int64), held_W))
        call_W.copy_(torch.where(first_W, self.call_1, call_W))
