"""One lane of the one-sided transport on GPUs: the windows of all ranks by address, and who failed in which call.

Windows lie in memory that every rank can reach (`one_sided_device_windows`). Nothing on the host is asked while a call
is under way: calls are counted on the device, and lateness reaches the host one call later or so. So do counts and
expert ids of a peer that are out of range; its rows are left out meanwhile, and nothing is indexed by them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import CommError
from moe_mk.kernels.native.exchange import FaultKind, PeerFault
from moe_mk.kernels.triton.one_sided import Windows, await_flags
from moe_mk.prepare_finalize.one_sided_gpu.buffers import map_windows

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
        self._faults_4W = torch.zeros((4, comm.size), dtype=torch.int64, device=device)
        """By peer: the first call with a count out of range and that count, the same for an expert id."""
        self._faults_seen_4W = self._seen_2W.new_zeros((4, comm.size), pin_memory=device.type == "cuda")
        self._num_experts = 0

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
        """Counts and status of all ranks; who is late in this call is noted on the device, and told to the host."""
        counts_W, status_W = await_flags(
            self.windows, self.call_1, sums=phase == "combine", looks=looks, active_W=self.active_W
        )
        late_W = self._late_2W[PHASES.index(phase)]
        first_W = (late_W == 0) & (status_W != 0) & (self.active_W != 0)
        late_W.copy_(torch.where(first_W, self.call_1, late_W))
        self._seen_2W.copy_(self._late_2W, non_blocking=True)
        return counts_W, status_W

    def checked(self, counts_W: Tensor, ids_RK: Tensor, num_experts: int) -> Tensor:
        """The expert ids of all places of the window, -1 where no row lies or a peer wrote what is out of range.

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
