"""One-sided: ranks of one host write tokens into each other's memory, and read the sums from there.

The choice between CPU processes of one host: no sockets, no copy in between, no exchange of counts.

    dispatch  put rows [values | scales | ids | weights] into this rank's region at each peer, then one flag with count
    combine   each peer has its sums in its own window, then one flag; the home rank adds them in rank order, in f32

Experts may write their sums where peers read them (`RowTokens.out_RH`); those of others are copied there. Results are
those of `all_to_all`, bit for bit, either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.comm.communicator import offsets
from moe_mk.comm.symmetric_setup import reasons_against_heap
from moe_mk.comm.symmetric_words import WORD_BYTES
from moe_mk.config.problem import Problem
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits, Volume
from moe_mk.prepare_finalize.one_sided_sum import add_up
from moe_mk.prepare_finalize.one_sided_window import Lane, Lanes, RegionShape
from moe_mk.prepare_finalize.packing import ID_BYTES, WEIGHT_BYTES, packed_row_bytes
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.quant.wire import as_bytes, from_bytes, row_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens


@dataclass(frozen=True)
class WayHome:
    """How the sums of one dispatch find back."""

    lane: Lane
    epoch: int
    token_of_W: tuple[Tensor, ...]
    """int64. The tokens sent to each rank, ascending."""
    received: tuple[int, ...]
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
        wire=frozenset({"plain", "fp8"}),
        min_ranks=2,
        one_node=True,
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
        whole = packed_row_bytes(context.wire, context.hidden_size, context.top_k)
        plain_bytes = row_bytes(context.wire, context.hidden_size)
        values = context.hidden_size if isinstance(context.wire, Fp8Block) else plain_bytes
        sums = row_bytes(context.dtype, context.hidden_size)
        self._region = RegionShape(context.max_num_tokens, values, whole - values, sums)
        self._lanes = Lanes.of(context.comm, self._region)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Write each token to the ranks of its experts, with the ids that are local there."""
        c = self.context
        if x_TH.shape[0] > c.max_num_tokens:
            raise ShapeError(
                f"x has T={x_TH.shape[0]} tokens, a window holds {c.max_num_tokens} of each rank "
                "[kernel.max_num_tokens]; raise the limit or bring fewer tokens a call"
            )
        x_wire = self.encode(x_TH)
        with c.spans.span("dispatch"), self._failing_for_good():
            lane = self._lanes.take(c.comm)
            values_TB = as_bytes(x_wire.values)
            token_of_W, tail_of_W = self._sorted_by_rank(x_wire, routing)
            for peer in lane.peers:
                lane.send_rows(peer, values_TB, token_of_W[peer], tail_of_W[peer])
            self._note("dispatch", list(map(len, token_of_W)), self._region.value_bytes + self._region.tail_bytes)
            yield InFlight("dispatch")
            counts = lane.await_rows()
            counts[c.comm.rank] = len(token_of_W[c.comm.rank])
            received = tuple(counts[rank] for rank in range(c.comm.size))
            sums_RH = lane.own_sums(sum(received)).view(c.dtype.dtype)
            home = WayHome(lane, lane.epoch, token_of_W, received, x_TH.shape[0], sums_RH)
            return self._arrived(home, values_TB, tail_of_W[c.comm.rank])

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Show the sums to the peers, and add up what they have, per token."""
        home, c = tokens.handle, self.context
        assert isinstance(home, WayHome)
        lane = home.lane
        if lane.epoch != home.epoch or not lane.busy:
            raise CommError(f"epoch {home.epoch} was finalized before", rank=c.comm.rank, phase="combine")
        with c.spans.span("combine"), self._failing_for_good():
            first_of_W = offsets(home.received)
            own = slice(first_of_W[c.comm.rank], first_of_W[c.comm.rank + 1])
            if not _is_same(output.y, home.sums_RH):
                for rows in (slice(0, own.start), slice(own.stop, None)):
                    home.sums_RH[rows] = output.y[rows]
            for peer in lane.peers:
                lane.show_sums(peer, first_of_W[peer])
            self._note("combine", home.received, self._region.sum_bytes)
            yield InFlight("combine")
            firsts = lane.await_sums()
            parts = [
                lane.sums_at(rank, firsts[rank], len(token_X)).view(c.dtype.dtype) if rank in firsts else output.y[own]
                for rank, token_X in enumerate(home.token_of_W)
            ]
            y_TH = add_up(parts, home.token_of_W, home.num_tokens)
            lane.busy = False
            return y_TH

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

    def _sorted_by_rank(self, x_TH: QuantTensor, routing: Routing) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """For each rank its tokens, ascending, and the tails of their rows. Assignments elsewhere become -1 there."""
        c = self.context
        expert_TK = routing.ids_TK.clamp_min(0).long()
        rank_TK = torch.where(routing.ids_TK >= 0, c.tables.rank_of_P[expert_TK], -1)
        ranks_W = torch.arange(c.comm.size, dtype=rank_TK.dtype, device=rank_TK.device)
        there_WTK = rank_TK == ranks_W[:, None, None]
        peer_X, token_X = torch.nonzero(there_WTK.any(dim=2), as_tuple=True)
        there_XK = there_WTK[peer_X, token_X]
        slots_XK = torch.where(there_XK, c.tables.slot_of_P[expert_TK][token_X], -1).to(torch.int32)
        weights_XK = torch.where(there_XK, routing.weights_TK[token_X], 0.0).to(torch.float32)
        scales = () if x_TH.scales is None else (as_bytes(x_TH.scales)[token_X],)
        tails_XB = torch.cat((*scales, as_bytes(slots_XK), as_bytes(weights_XK)), dim=1)
        sizes = torch.bincount(peer_X, minlength=c.comm.size).tolist()
        return torch.split(token_X, sizes), torch.split(tails_XB, sizes)

    def _arrived(self, home: WayHome, own_TB: Tensor, own_tails_XB: Tensor) -> RowTokens:
        """Copy the rows of all ranks out of the window, in rank order; from here on peers may write again."""
        c, region = self.context, self._region
        values_RB = torch.empty((sum(home.received), region.value_bytes), dtype=torch.uint8, device="cpu")
        tails = []
        for source, rows_XB in enumerate(torch.split(values_RB, list(home.received))):
            if source == c.comm.rank:
                torch.index_select(own_TB, 0, home.token_of_W[source], out=rows_XB)
                tails.append(own_tails_XB)
            else:
                values, tail = home.lane.rows_from(source, home.received[source])
                rows_XB.copy_(values)
                tails.append(tail)
        tails_RB = torch.cat(tails)
        weights_at = region.tail_bytes - c.top_k * WEIGHT_BYTES
        ids_at = weights_at - c.top_k * ID_BYTES
        ids_RK = from_bytes(tails_RB[:, ids_at:weights_at], torch.int32)
        weights_RK = from_bytes(tails_RB[:, weights_at:], torch.float32)
        x_RH = self._decoded(values_RB, tails_RB[:, :ids_at])
        return RowTokens(x_RH, ids_RK, weights_RK, c.num_slots, home, home.sums_RH)

    def _decoded(self, values_RB: Tensor, scales_RB: Tensor) -> QuantTensor:
        wire = self.context.wire
        if isinstance(wire, Fp8Block):
            return QuantTensor(values_RB.view(torch.float8_e4m3fn), from_bytes(scales_RB, wire.scale_dtype), wire)
        assert isinstance(wire, Plain)
        return QuantTensor(values_RB.view(wire.dtype), None, wire)

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
