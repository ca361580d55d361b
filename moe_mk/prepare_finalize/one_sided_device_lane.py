"""One lane of the one-sided transport on GPUs: the windows of all ranks by address, and who was late in which call.

Windows lie in memory that every rank can reach: one piece for ranks of one process, CUDA IPC between processes of a
host, a file in memory where kernels are interpreted on a CPU. Nothing on the host is asked while a call is under way:
calls are counted on the device, and lateness reaches the host one call later or so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.lockstep import LockstepCommunicator
from moe_mk.comm.symmetric_setup import open_heap, shared_in_world
from moe_mk.errors import CommError
from moe_mk.external.device import synchronize
from moe_mk.external.device_memory import describe_window, open_window
from moe_mk.flight import land
from moe_mk.kernels.triton.one_sided import Windows, await_flags
from moe_mk.trace.clock import now

PHASES = ("dispatch", "combine")
NOTE_BYTES = 1024
WINDOW_BYTES = 4096
"""Windows of one piece of memory begin at multiples of this."""


class DeviceLane:
    """The windows of all ranks for one call at a time. `busy` says whether one is."""

    def __init__(self, comm: Communicator, rows: int, row_bytes: int, sum_bytes: int, device: torch.device) -> None:
        self.busy, self.rank, self.size, self.device, self.layer = False, comm.rank, comm.size, device, ""
        shape = Windows(torch.zeros(comm.size, dtype=torch.int64, device=device), comm.rank, rows, row_bytes, sum_bytes)
        self.own, bases, self._held = _mapped(comm, shape.num_bytes, device)
        bases_W = torch.tensor(bases, dtype=torch.int64, device=device)
        self.windows = Windows(bases_W, comm.rank, rows, row_bytes, sum_bytes)
        self.call_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.done_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self.active_W = torch.ones(comm.size, dtype=torch.int32, device=device)
        """0 for ranks that are left out: nothing is sent to them, and nobody waits for them. Read at every launch."""
        self._late_2W = torch.zeros((2, comm.size), dtype=torch.int64, device=device)
        self._seen_2W = torch.zeros((2, comm.size), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")

    def serve(self, layer: str) -> None:
        """Begin the next call. Raises CommError if a rank is known to have been late in an earlier one."""
        self.busy, self.layer = True, layer
        self.expect_punctual()

    def expect_punctual(self) -> None:
        """Raise CommError for the first rank that the host has heard to be late; it may hear of it a call later."""
        late_2W = self._seen_2W.tolist()
        for phase, calls in zip(PHASES, late_2W, strict=True):
            for peer, call in enumerate(calls):
                if call:
                    text = f"epoch {call}: raised no flag in time; it is dead, stuck or late"
                    raise CommError(text, rank=self.rank, phase=phase, layer=self.layer, peer=peer)

    def await_flags(self, phase: str, looks: int) -> tuple[Tensor, Tensor]:
        """Counts and status of all ranks; who is late in this call is noted on the device, and told to the host."""
        counts_W, status_W = await_flags(
            self.windows, self.call_1, sums=phase == "combine", looks=looks, active_W=self.active_W
        )
        late_W = self._late_2W[PHASES.index(phase)]
        first_W = (late_W == 0) & (status_W != 0) & (self.active_W != 0)
        late_W.copy_(torch.where(first_W, self.call_1, late_W))
        self._seen_2W.copy_(self._late_2W, non_blocking=True)
        return counts_W, status_W


def _mapped(comm: Communicator, num_bytes: int, device: torch.device) -> tuple[Tensor, list[int], object]:
    """This rank's window, the addresses of all, and what must be held as long as they are used. Windows are zeros."""
    if isinstance(comm, LockstepCommunicator):
        stride = -(-num_bytes // WINDOW_BYTES) * WINDOW_BYTES
        whole = shared_in_world(comm, comm.size * stride, device)
        own = whole[comm.rank * stride : comm.rank * stride + num_bytes]
        return own, [whole.data_ptr() + rank * stride for rank in range(comm.size)], whole
    if device.type == "cpu":
        heap = open_heap(comm, 0, num_bytes, now)
        for rank in range(comm.size):  # kernels write where they like: pages must be there
            heap.reserve(rank, 0, num_bytes)
        return heap.data(comm.rank, 0, num_bytes), [heap.address(rank) for rank in range(comm.size)], heap
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    synchronize(device)  # zeros before anybody knows of it
    opened = [
        own if rank == comm.rank else open_window(text, num_bytes)
        for rank, text in enumerate(_exchanged(comm, describe_window(own)))
    ]
    return own, [window.data_ptr() for window in opened], opened


def _exchanged(comm: Communicator, text: str) -> list[str]:
    """What every rank says."""
    encoded = text.encode()
    assert len(encoded) <= NOTE_BYTES
    note = torch.tensor([list(encoded.ljust(NOTE_BYTES))], dtype=torch.uint8, device="cpu")
    rows = land(comm.all_gather(note, [1] * comm.size, "window set-up"))
    return [bytes(row).decode().rstrip() for row in rows.tolist()]
