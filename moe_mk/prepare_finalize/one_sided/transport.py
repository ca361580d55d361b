"""One-sided dispatch and combine: ranks of one host write tokens into each other's memory and read sums from there.

The default between CPU processes of one host: no sockets, no intermediate copy, no exchange of counts.

    dispatch  put rows [values | scales | ids | weights] where the peer reads them, then one flag with their count
    combine   each rank has its sums in its own window, then one flag; the source rank adds them in rank order, in f32

Native kernels write the windows where they are compiled, else torch does: one pass over a token gathers it, rounds it
(FP8) and writes it to each of its ranks. Received rows are read in the window until their call is finalized. Experts
may write their sums where peers read them (`RowTokens.out_RH`); other sums are copied there. Results equal those of
`all_to_all` bit for bit.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from torch import Tensor

from moe_mk.comm.symmetric.flags import WORD_BYTES
from moe_mk.comm.symmetric.setup import reasons_against_heap
from moe_mk.config.problem import Problem
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits
from moe_mk.prepare_finalize.one_sided.buffers import OneSidedBufferPool, RegionShape
from moe_mk.prepare_finalize.one_sided.rows_native import KernelRows
from moe_mk.prepare_finalize.one_sided.rows_torch import DispatchHandle, PutRows, RowBytes
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant.wire import row_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens

DISPATCH, COMBINE = InFlight("dispatch"), InFlight("combine")


@PREPARE_FINALIZE.register("one_sided")
class OneSided(PrepareFinalize):
    """Puts and flags in shared memory, one copy of a token per destination rank."""

    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="writes into the memory of peers, one copy of a token per rank; between processes of one host",
        kinds=frozenset({"cpu"}),
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=frozenset({"plain", "fp8", "int8", "mxfp8", "nvfp4"}),
        min_ranks=2,
        one_node=True,
        open_calls=OneSidedBufferPool.MAX_OPEN_CALLS,
        graph_safe=False,
    )

    def __init__(self, context: TransportContext) -> None:
        """Check that the group can share memory; windows are opened by the first call, and shared with other layers."""
        super().__init__(context)
        reasons = reasons_against_heap(context.comm)
        if context.device.type != "cpu":
            reasons.append(f"runs on cpu, this device is {context.device.type}")
        if reasons:
            raise UnsupportedError("transport 'one_sided' cannot serve this group", reasons)
        self._size = RowBytes.of(context)
        sums = row_bytes(context.dtype, context.hidden_size)
        region = RegionShape(context.max_num_tokens, self._size.values, self._size.tail, sums)
        self._use(region, OneSidedBufferPool.of(context.comm, region))

    def _use(self, region: RegionShape, pool: OneSidedBufferPool) -> None:
        """Prepare what the calls over windows of a pool have in common."""
        context, comm = self.context, self.context.comm
        self._region, self._pool = region, pool
        self._put, self._kernels = PutRows(context, self._size), KernelRows(context, self._size)
        self._dispatching, self._combining = comm.exclusive("dispatch"), comm.exclusive("combine")
        self._flag_bytes = [0 if peer == comm.rank else WORD_BYTES for peer in range(comm.size)]

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Write each token to the ranks of its experts, with the ids that are local there."""
        c, num_tokens = self.context, x_TH.shape[0]
        if num_tokens > c.max_num_tokens:
            raise ShapeError(
                f"x has T={num_tokens} tokens, a window holds {c.max_num_tokens} of each rank "
                "[kernel.max_num_tokens]; raise the limit or bring fewer tokens a call"
            )
        with c.spans.span("dispatch"):
            try:
                with self._dispatching:
                    if c.comm.status.failure is not None:
                        c.comm.check("dispatch")
                    buffer = self._pool.take(c.comm)
                    way = self._put if buffer.exchange is None else self._kernels
                    sent, sent_W = way.send(buffer, x_TH, routing, self.encode)
                    self._note("dispatch", "dispatch flags", sent_W, self._region.value_bytes + self._region.tail_bytes)
                yield DISPATCH
                with self._dispatching:
                    received_W = way.arrived(buffer, sent_W)
                    x_RH, ids_RK, weights_RK, sums_RH = way.receive(buffer, received_W)
                handle = DispatchHandle(buffer, buffer.epoch, sent, sent_W, received_W, num_tokens, sums_RH)
                return RowTokens(x_RH, ids_RK, weights_RK, self._num_slots, handle, sums_RH)
            except BaseException as error:
                c.comm.fail(error)
                raise

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Signal the sums to the peers, and add up theirs for each token."""
        handle, c, y_RH = tokens.handle, self.context, output.y
        assert isinstance(handle, DispatchHandle)
        buffer, received_W = handle.buffer, handle.received_W
        if buffer.epoch != handle.epoch or not buffer.busy:
            raise CommError(f"epoch {handle.epoch} was finalized before", rank=c.comm.rank, phase="combine")
        with c.spans.span("combine"):
            try:
                with self._combining:
                    way = self._put if buffer.exchange is None else self._kernels
                    first = sum(received_W[: buffer.rank])
                    own = slice(first, first + received_W[buffer.rank])
                    if y_RH is not handle.sums_RH and not _is_same(y_RH, handle.sums_RH):
                        for rows in (slice(0, own.start), slice(own.stop, None)):
                            handle.sums_RH[rows] = y_RH[rows]
                    way.show(handle)
                    self._note("combine", "combine flags", received_W, self._region.sum_bytes)
                yield COMBINE
                with self._combining:
                    y_TH = way.add_up(handle, y_RH, own)
                    buffer.busy = False
                return y_TH
            except BaseException as error:
                c.comm.fail(error)
                raise

    @cached_property
    def _num_slots(self) -> int:
        return self.context.num_slots

    def _note(self, phase: str, flags: str, rows_of_W: list[int], row_bytes: int) -> None:
        """Count what went to others: rows in whole, and a flag a peer. What stays here goes nowhere."""
        comm = self.context.comm
        rows = list(map(row_bytes.__mul__, rows_of_W))
        rows[comm.rank] = 0
        comm.traffic.sent(phase, rows, comm.rank)
        comm.traffic.sent(flags, self._flag_bytes, comm.rank)

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """One window of this rank; its pages are taken as calls need them."""
        hidden = problem.config.model.hidden_size
        row = packed_row_bytes(problem.dtype, hidden, problem.config.router.top_k)
        return RegionShape(problem.num_tokens, row, 0, row_bytes(problem.dtype, hidden)).data_bytes(problem.ranks)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bytes in the same order."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
