"""One lane of the one-sided transport on GPUs: the windows of all ranks by address, and who was late in which call.

Windows lie in memory that every rank can reach (`one_sided_device_windows`). Nothing on the host is asked while a call
is under way: calls are counted on the device, and lateness reaches the host one call later or so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import CommError
from moe_mk.kernels.triton.one_sided import Windows, await_flags
from moe_mk.prepare_finalize.one_sided_device_windows import map_windows

PHASES = ("dispatch", "combine")


class DeviceLane:
    """The windows of all ranks for one call at a time. `busy` says whether one is."""

    def __init__(self, comm: Communicator, rows: int, row_bytes: int, sum_bytes: int, device: torch.device) -> None:
        self.busy, self.rank, self.size, self.device, self.layer = False, comm.rank, comm.size, device, ""
        shape = Windows(torch.zeros(comm.size, dtype=torch.int64, device=device), comm.rank, rows, row_bytes, sum_bytes)
        mapped = self._mapped = map_windows(comm, shape.num_bytes, device)
        self.own, self.how = mapped.own, mapped.how
        """how: by what way peers reach this window, and why by no better one."""
        bases_W = torch.tensor(mapped.addresses, dtype=torch.int64, device=device)
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
