"""One-sided: ranks of one host write tokens into each other's memory, and read the sums from there.

The choice between CPU processes of one host: no sockets, no copy in between, no exchange of counts.

    dispatch  put rows [values | scales | ids | weights] where the peer reads them, then one flag with their count
    combine   each peer has its sums in its own window, then one flag; the home rank adds them in rank order, in f32

Native kernels write the windows where they are compiled, torch does elsewhere: one pass over a token gathers, rounds
(FP8) and writes it to every rank it visits. Received rows are read in the window until their call is finalized.
Experts may write their sums where peers read them (`RowTokens.out_RH`); those of others are copied there. Results are
those of `all_to_all`, bit for bit, in every way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moe_mk.comm.communicator import offsets
from moe_mk.comm.symmetric_setup import reasons_against_heap
from moe_mk.comm.symmetric_words import WORD_BYTES
from moe_mk.config.problem import Problem
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.flight import Flight, InFlight
from moe_mk.kernels.native.exchange import ROW_TYPES
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits, Volume
from moe_mk.prepare_finalize.one_sided_lane import Lane, Lanes
from moe_mk.prepare_finalize.one_sided_rows import KernelRows, PutRows, RowBytes, Sent
from moe_mk.prepare_finalize.one_sided_window import RegionShape
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant.blocked import BlockedScheme
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.quant.wire import from_bytes, row_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens


@dataclass(frozen=True)
class WayHome:
    """How the sums of one dispatch find back."""

    lane: Lane
    epoch: int
    sent: Sent
    """The tokens sent to each rank, ascending."""
    sent_W: Sequence[int]
    received_W: Sequence[int]
    num_tokens: int
    sums_RH: Tensor
    """This rank's sums as peers read them."""


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
        open_calls=Lanes.MOST,
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
        self._region = RegionShape(context.max_num_tokens, self._size.values, self._size.tail, sums)
        self._lanes = Lanes.of(context.comm, self._region)
        self._put, self._kernels = PutRows(context, self._size), KernelRows(context, self._size)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Write each token to the ranks of its experts, with the ids that are local there."""
        c = self.context
        if x_TH.shape[0] > c.max_num_tokens:
            raise ShapeError(
                f"x has T={x_TH.shape[0]} tokens, a window holds {c.max_num_tokens} of each rank "
                "[kernel.max_num_tokens]; raise the limit or bring fewer tokens a call"
            )
        with c.spans.span("dispatch"), self._failing_for_good():
            lane = self._lanes.take(c.comm)
            way = self._way(lane)
            sent, sent_W = way.send(lane, self._outgoing(x_TH, way), routing)
            self._note("dispatch", sent_W, self._region.value_bytes + self._region.tail_bytes)
            yield InFlight("dispatch")
            counts = lane.await_rows() | {c.comm.rank: sent_W[c.comm.rank]}
            received_W = [counts[rank] for rank in range(c.comm.size)]
            values_RB, scales_RB, ids_RK, weights_RK = way.receive(lane, received_W)
            sums_RH = lane.own_sums(len(values_RB)).view(c.dtype.dtype)
            home = WayHome(lane, lane.epoch, sent, sent_W, received_W, x_TH.shape[0], sums_RH)
            x_RH = self._decoded(values_RB, scales_RB)
            return RowTokens(x_RH, ids_RK, weights_RK, c.num_slots, home, sums_RH)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Show the sums to the peers, and add up what they have, per token."""
        home, c = tokens.handle, self.context
        assert isinstance(home, WayHome)
        lane = home.lane
        if lane.epoch != home.epoch or not lane.busy:
            raise CommError(f"epoch {home.epoch} was finalized before", rank=c.comm.rank, phase="combine")
        with c.spans.span("combine"), self._failing_for_good():
            first_of_W, y_RH = offsets(home.received_W), output.y
            own = slice(first_of_W[c.comm.rank], first_of_W[c.comm.rank + 1])
            if not _is_same(y_RH, home.sums_RH):
                for rows in (slice(0, own.start), slice(own.stop, None)):
                    home.sums_RH[rows] = y_RH[rows]
            lane.show_all_sums(first_of_W)
            self._note("combine", home.received_W, self._region.sum_bytes)
            yield InFlight("combine")
            firsts = lane.await_sums()
            own_XH = y_RH[own].to(c.dtype.dtype).contiguous()
            y_TH = self._way(lane).add_up(lane, home.sent, firsts, own_XH, home.num_tokens)
            lane.busy = False
            return y_TH

    def _way(self, lane: Lane) -> PutRows | KernelRows:
        """How rows go through a lane: by kernels where it has them."""
        return self._put if lane.exchange is None else self._kernels

    def _outgoing(self, x_TH: Tensor, way: PutRows | KernelRows) -> QuantTensor | Tensor:
        """Tokens in the wire scheme; as they are where they are rounded on the way."""
        wire = self.context.wire
        if isinstance(wire, Plain) and x_TH.dtype == wire.dtype:
            return QuantTensor(x_TH, None, wire)
        if isinstance(way, KernelRows) and way.rounds and x_TH.dtype in ROW_TYPES and x_TH.stride(1) == 1:
            return x_TH
        return self.encode(x_TH)

    @contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """After an error a peer may be one call ahead: no later call may use its windows."""
        try:
            yield
        except GeneratorExit:
            raise  # left alone in the air, as an abandoned flight is; its lane stays taken
        except BaseException as error:
            self._lanes.failed(error)
            raise

    def _decoded(self, values_RB: Tensor, scales_RB: Tensor) -> QuantTensor:
        """Rows as they lie in the window. Scales are of their own memory."""
        wire = self.context.wire
        if isinstance(wire, Plain):
            return QuantTensor(values_RB.view(wire.dtype), None, wire)
        assert isinstance(wire, BlockedScheme)
        scales_RX = None if wire.is_static else from_bytes(scales_RB, wire.scale_dtype)
        return QuantTensor(values_RB.view(wire.element.dtype), scales_RX, wire)

    def _note(self, phase: str, rows_of_W: Sequence[int], row_bytes: int) -> None:
        """Count what went to others: rows in whole, and a flag a peer. What stays here goes nowhere."""
        comm = self.context.comm
        rows = [row_bytes * count for count in rows_of_W]
        flags = [WORD_BYTES] * comm.size
        rows[comm.rank] = flags[comm.rank] = 0
        comm.traffic.sent(phase, rows, comm.rank)
        comm.traffic.sent(f"{phase} flags", flags, comm.rank)

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """Each token goes to the distinct other ranks of its experts, a sum comes back from each; flags meet twice."""
        remote = problem.num_tokens * problem.ranks_per_token * (problem.ranks - 1) / problem.ranks
        return Volume(remote, remote, 2)

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """One window of this rank; its pages are taken as calls need them."""
        hidden = problem.config.model.hidden_size
        row = packed_row_bytes(problem.dtype, hidden, problem.config.router.top_k)
        return RegionShape(problem.num_tokens, row, 0, row_bytes(problem.dtype, hidden)).data_bytes(problem.ranks)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        """All tokens of all ranks may want an expert of this one; a window has room for them."""
        return problem.num_tokens * problem.ranks


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bytes in the same order."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
