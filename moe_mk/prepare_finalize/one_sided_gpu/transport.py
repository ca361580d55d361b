"""One-sided transport between GPUs of one host: Triton kernels write tokens to peers and read sums from them.

For GPUs with peer access where no EP library is installed. Compiled for sm_90 and run in Triton's interpreter; not yet
measured on a GPU. Processes map each other's windows by torch's symmetric memory where every rank has a GPU of its own,
else by CUDA IPC; `reached_by` lists which, and why.

    dispatch  one launch copies rows [values | scales | ids | weights] to every rank of their experts and sets its flag
    arrival   (W, M) rows, those of each source at the front of its part; the ids of the rest are -1
    combine   experts' sums are stored where peers read them; one flag, then each rank adds its own in order, in f32

No count is read on the host and no size depends on the routing: calls can be captured in a CUDA graph. A token whose
ids are all -1 is not sent, so a graph of M tokens serves fewer. The next call reports ranks that did not answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.failure import Failure
from moe_mk.comm.symmetric.setup import reasons_against_heap
from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import CommError, UnsupportedError
from moe_mk.external.library import find
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits
from moe_mk.prepare_finalize.buffer_pool import BufferPool
from moe_mk.prepare_finalize.packing import pack, packed_row_bytes, unpack
from moe_mk.quant.wire import row_bytes
from moe_mk.shapes import expect
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens

if TYPE_CHECKING:
    from moe_mk.prepare_finalize.one_sided_gpu.buffers import GpuBufferSlot

NAME = "one_sided_gpu"
LINE_BYTES = 16
"""Rows are copied 16 bytes at a time."""
LOOKS = 1 << 26


@dataclass(frozen=True)
class DispatchHandle:
    """How the sums of one dispatch find back."""

    buffer: GpuBufferSlot
    slots_WT: Tensor
    """int32. The place of each token among those sent to a rank; -1 where it does not go."""
    sums_RH: Tensor


class GpuBufferPool(BufferPool["GpuBufferSlot"]):
    """The windows that layers of a group share."""

    geometry: tuple[int, int, int, torch.dtype, torch.device]
    """Tokens of a rank at most, bytes of a row with its scales, ids and weights, bytes of a sum, its dtype."""

    def abort(self, failure: Failure) -> None:
        """Nothing: kernels of peers read flags a bounded number of times, and the group refuses further calls."""

    def _make(self, comm: Communicator) -> GpuBufferSlot:
        from moe_mk.prepare_finalize.one_sided_gpu.buffers import GpuBufferSlot

        if any(bool((each.active_W == 0).any()) for each in self.slots):
            fix = "finalize each call before the next is prepared"
            refusal = UnsupportedError("one more window needs every rank, and some are left out", [fix])
            refusal.harmless_to_peers = True
            raise refusal
        rows, packed, sum_bytes, _, device = self.geometry
        return GpuBufferSlot(comm, rows, -(-packed // LINE_BYTES) * LINE_BYTES, sum_bytes, device)


@PREPARE_FINALIZE.register(NAME)
class OneSidedGpu(PrepareFinalize):
    """Triton kernels on addresses of peers' windows, one copy of a token per rank."""

    pads_rows: ClassVar[bool] = True
    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="Triton kernels write into the memory of peers' GPUs, inside one host; compiled, not yet measured",
        kinds=frozenset({"cuda"}),
        min_arch=(8, 0),
        library="triton",
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=TransportTraits.ANY_WIRE,
        min_ranks=2,
        one_node=True,
        masks_ranks=True,
        graph_safe=True,
        deterministic=True,
    )
    looks = LOOKS
    """At a flag, before a rank counts as late."""

    def __init__(self, context: TransportContext) -> None:
        """Check that the group can share memory; windows are opened by the first call, together with all ranks."""
        super().__init__(context)
        find("triton")
        from moe_mk.kernels.triton.numerics import INTERPRETED

        reasons = reasons_against_heap(context.comm)
        if context.device.type != "cuda" and not INTERPRETED:
            reasons.append(f"runs on cuda, this device is {context.device.type}")
        reasons += [reason.text for reason in _odd_sums(row_bytes(context.dtype, context.hidden_size))]
        if reasons:
            raise UnsupportedError(f"transport '{NAME}' cannot serve this group", reasons)
        self._packed = packed_row_bytes(context.wire, context.hidden_size, context.top_k)
        sum_bytes = row_bytes(context.dtype, context.hidden_size)
        geometry = context.max_num_tokens, self._packed, sum_bytes, context.dtype.dtype, context.device
        self._pool = GpuBufferPool.of(context.comm, geometry)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Write each token to the ranks of its experts."""
        from moe_mk.kernels.triton.one_sided import send_rows, slots_of

        c = self.context
        c.comm.check("dispatch")
        self.expect_room(x_TH)
        x_wire = self.encode(x_TH)
        with c.spans.span("dispatch"):
            buffer = self._pool.take(c.comm)
            rank_TK = c.tables.ranks(routing.ids_TK)
            ranks_W = torch.arange(c.comm.size, dtype=rank_TK.dtype, device=rank_TK.device)
            visits_WT = (rank_TK[None] == ranks_W[:, None, None]).any(dim=2) & (buffer.active_W != 0)[:, None]
            slots_WT = slots_of(visits_WT)
            rows_TB = pack(x_wire, routing.ids_TK.to(torch.int32), routing.weights_TK.to(torch.float32))
            rows_TB = pad(rows_TB, (0, buffer.windows.row_bytes - self._packed))
            rows_WTB = rows_TB.expand(c.comm.size, *rows_TB.shape)
            send_rows(buffer.windows, rows_WTB, slots_WT, buffer.call_1, buffer.done_1)
            yield InFlight("dispatch")
            counts_W, _ = buffer.await_flags("dispatch", self.looks)
            # All places of the window are rows; unfilled ones have no experts.
            windows, expected_N = buffer.windows, self.expected_in_window(x_TH.shape[0])
            rows_RB = windows.rows(buffer.own).view(-1, windows.row_bytes)[:, : self._packed]
            x_RH, physical_RK, weights_RK = unpack(rows_RB, c.wire, c.hidden_size, c.top_k)
            physical_RK = buffer.checked(counts_W, physical_RK, c.tables.rank_of_P.shape[0])
            sums_RH = windows.sums(buffer.own).view(-1, windows.sum_bytes).view(c.dtype.dtype)
            handle = DispatchHandle(buffer, slots_WT, sums_RH)
            return replace(self.local_rows(x_RH, physical_RK, weights_RK, handle, expected_N), out_RH=sums_RH)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        from moe_mk.kernels.triton.one_sided import pull_sums, show

        handle, c = tokens.handle, self.context
        assert isinstance(handle, DispatchHandle)
        buffer = handle.buffer
        if not buffer.busy:
            raise CommError("this call was finalized before", rank=c.comm.rank, phase="combine")
        with c.spans.span("combine"):
            if output.y.data_ptr() != handle.sums_RH.data_ptr():
                handle.sums_RH.copy_(output.y)
            show(buffer.windows, buffer.call_1)
            yield InFlight("combine")
            _, status_W = buffer.await_flags("combine", self.looks)
            y_TH = pull_sums(buffer.windows, handle.slots_WT, status_W, c.hidden_size, c.dtype.dtype)
            buffer.busy = False
            return y_TH

    @property
    def reached_by(self) -> list[str]:
        """How peers access the open windows, and why no better way is used."""
        return [buffer.how for buffer in self._pool.slots]

    def leave_out(self, active_W: Tensor) -> None:
        """Change who takes part, int32 (W,): 0 for ranks that no rank sends to or waits for.

        A rank learns of the failure of another by CommError and not from here; who stays must be agreed on by all.
        Captured graphs read it anew; 1 takes a rank back. Raises UnsupportedError before the first call, which opens
        the windows together with every rank; ShapeError for a wrong shape or dtype. No host sync.
        """
        expect("active_W", active_W, "W", (torch.int32, torch.bool), W=self.context.comm.size)
        if not self._pool.slots:
            refusal = f"transport '{NAME}' has no windows yet, and opening them needs every rank"
            raise UnsupportedError(refusal, ["make one call with every rank, such as one of 0 tokens, beforehand"])
        for buffer in self._pool.slots:
            buffer.active_W.copy_(active_W)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Sums are moved 16 bytes at a time; not yet measured on a GPU, so selected only when pinned."""
        reasons = [
            *super().reasons_against(problem),
            *_odd_sums(row_bytes(problem.sums, problem.config.model.hidden_size)),
        ]
        if problem.config.kernel.prepare_finalize != NAME:
            text = "compiled for sm_90 but not yet measured on a GPU: selected only when pinned"
            reasons.append(Reason("unmeasured", text, f"kernel.prepare_finalize = {NAME}"))
        return reasons

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        hidden, limit = problem.config.model.hidden_size, problem.config.kernel.max_num_tokens
        row = packed_row_bytes(problem.dtype, hidden, problem.config.router.top_k) + LINE_BYTES
        return problem.ranks * (limit * (row + row_bytes(problem.sums, hidden)) + 256)


def _odd_sums(num_bytes: int) -> list[Reason]:
    if num_bytes % LINE_BYTES == 0:
        return []
    return [Reason("hidden", f"a sum of {num_bytes} bytes does not divide into {LINE_BYTES}", "another hidden size")]
