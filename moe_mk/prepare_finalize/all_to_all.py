"""All-to-all over torch.distributed: one copy of a token for each rank that holds one of its experts.

The default between processes and hosts where no EP library is installed.

    dispatch  counts, then rows [values | scales | ids | weights] sorted by destination, token order kept inside one
    combine   the same splits in reverse; the source rank adds the received rows in rank order, in f32

Two baselines for measurements are registered as well. `all_to_all_p2p` sends one message to each peer, 2 (W - 1) in
all, with the same result bit for bit: over gloo, whose all-to-all is made of messages, all are posted at once; over any
other communicator they go in W - 1 rounds, in round s to the rank s places after this one, so that no peer receives two
at a time. `all_to_all_v` gathers a table of all routings first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator, offsets
from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.comm.failure import Failure
from moe_mk.config.problem import Problem
from moe_mk.config.traits import DEVICES
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits, Volume
from moe_mk.prepare_finalize.packing import Rows, opened, put, tails
from moe_mk.prepare_finalize.rows.exchange import RowExchange, Write, kept_bytes
from moe_mk.quant.wire import as_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens


class PointToPoint(Communicator):
    """One rank's view of a group whose all-to-all goes by messages; everything else is the group's own."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.kept, inner.status)
        self.inner, self.rank, self.size, self.layer = inner, inner.rank, inner.size, inner.layer
        self.traffic, self.lock = inner.traffic, inner.lock
        self.messages: Counter[str] = Counter()
        """Sent and received to and from peers, by phase."""

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        """Send the first send[0] rows to rank 0, and so on; what stays here is copied."""
        self.messages[phase] += 2 * (self.size - 1)
        if isinstance(self.inner, DistributedCommunicator):
            return (yield from self.inner.all_to_all(rows, send, receive, phase))
        starts, received_at = offsets(send), offsets(receive)
        received = torch.empty((sum(receive), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        mine = slice(received_at[self.rank], received_at[self.rank + 1])
        received[mine] = rows[starts[self.rank] : starts[self.rank + 1]]
        parts = [rows[starts[peer] : starts[peer + 1]] for peer in range(self.size)]
        holes = [received[received_at[peer] : received_at[peer + 1]] for peer in range(self.size)]
        yield from self._in_rounds(parts, holes, phase)
        return received

    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """The group's own."""
        return (yield from self.inner.all_gather(rows, counts, phase))

    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        """The group's own."""
        return (yield from self.inner.all_reduce(x, phase))

    def library_group(self) -> object:
        """The group's own."""
        return self.inner.library_group()

    def number_layer(self) -> None:
        """The group's own."""
        self.inner.number_layer()

    def _report(self, failure: Failure) -> None:
        self.inner._report(failure)

    def _recover(self) -> Flight[None]:
        yield from self.inner._recover()

    def _epoch(self) -> int:
        return self.inner._epoch()

    def _count_stayed(self, phase: str, rows: Tensor, count: int) -> None:
        """Nothing: messages alone are counted."""

    def _others(self) -> Iterator[tuple[int, int]]:
        """(to, from) of each round."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size, (self.rank - step) % self.size

    def _in_rounds(self, parts: Sequence[Tensor], holes: Sequence[Tensor], phase: str) -> Flight[None]:
        for to, source in self._others():
            send, receive = [0] * self.size, [0] * self.size
            send[to], receive[source] = len(parts[to]), len(holes[source])
            holes[source].copy_((yield from self.inner.all_to_all(parts[to], send, receive, phase)))
        if self.size == 1:
            yield InFlight(phase)


@dataclass(frozen=True)
class DispatchHandle:
    """How the rows of one dispatch find back."""

    token_X: Tensor
    """int64. The token behind each row sent, destination by destination."""
    sent: Sequence[int]
    received: Sequence[int]
    num_tokens: int


@PREPARE_FINALIZE.register("all_to_all")
class AllToAll(PrepareFinalize):
    """Uneven all-to-all, one copy of a token per destination rank."""

    collectives: ClassVar[int] = 3
    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="torch.distributed all-to-all, one copy of a token per rank; between processes without an EP library",
        kinds=DEVICES,
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=frozenset({"plain", "fp8", "int8", "mxfp8", "nvfp4"}),
        min_ranks=2,
        graph_safe=False,
        deterministic=True,
    )

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._exchange = RowExchange(context.comm, context.device)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Send each token to the ranks of its experts, with the ids that are local there."""
        c = self.context
        x_wire = self.encode(x_TH)
        with c.spans.span("dispatch"):
            rank_TK = torch.where(
                routing.ids_TK >= 0, c.tables.rank_of_P[routing.ids_TK.clamp_min(0).long()], routing.ids_TK
            )
            peer_X, token_X = self._destinations(rank_TK)
            sent = torch.bincount(peer_X, minlength=c.comm.size).tolist()
            # Counts first: peers must size their buffers before rows arrive.
            received = yield from self.announce(sent)
            c.comm.check_counts(received, c.max_num_tokens, "dispatch counts")
            values_TB = as_bytes(x_wire.values)
            tails_XB = self._tails(peer_X, token_X, rank_TK, x_wire.scales, routing)
            widths = values_TB.shape[1], tails_XB.shape[1]
            rows = yield from self._exchange.dispatch(
                _writer(values_TB, token_X, tails_XB), widths, sent, received, "dispatch"
            )
            x_RH, slots_RK, weights_RK = opened(rows, c.wire, c.top_k)
            c.comm.check_ids(slots_RK, received, c.num_slots, "slot", "dispatch")
        handle = DispatchHandle(token_X, sent, received, x_TH.shape[0])
        expected_N = self.expected_of_rows(len(slots_RK))
        return RowTokens(x_RH, slots_RK, weights_RK, c.num_slots, handle, expected_N=expected_N, most_K=self.most_K)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Send sums back the way the rows came, and add them up per token."""
        handle, exchange = tokens.handle, self._exchange
        assert isinstance(handle, DispatchHandle)
        with self.context.spans.span("combine"):
            back = yield from exchange.combine(output.y, handle.token_X, handle.sent, handle.received, "combine")
            y_TH = exchange.summed([back.parts], (handle.num_tokens, output.y.shape[1]), output.y.dtype)
            exchange.scratch.give(back.memory)
            return y_TH

    def announce(self, sent: Sequence[int]) -> Flight[list[int]]:
        """Tell each rank how many rows it will get; return how many each will send."""
        return (yield from self.context.comm.exchange_counts(sent, "dispatch counts"))

    def _destinations(self, rank_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs (rank, token) of all rows to send, by rank, then by token."""
        ranks_W = torch.arange(self.context.comm.size, dtype=rank_TK.dtype, device=rank_TK.device)
        wanted_WT = (rank_TK[None] == ranks_W[:, None, None]).any(dim=2)
        peer_X, token_X = torch.nonzero(wanted_WT, as_tuple=True)
        return peer_X, token_X

    def _tails(
        self, peer_X: Tensor, token_X: Tensor, rank_TK: Tensor, scales_TX: Tensor | None, routing: Routing
    ) -> Tensor:
        """What follows the values of each row: assignments that go elsewhere become -1 and weigh nothing there."""
        physical_XK = routing.ids_TK[token_X]
        there_XK = rank_TK[token_X] == peer_X[:, None]
        slots_XK = torch.where(there_XK, self.context.tables.slot_of_P[physical_XK.clamp_min(0).long()], -1)
        weights_XK = torch.where(there_XK, routing.weights_TK[token_X], 0.0)
        scales_XX = None if scales_TX is None else scales_TX[token_X]
        return tails(scales_XX, slots_XK.to(torch.int32), weights_XK.to(torch.float32))

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """Host memory in which rows are packed, kept for the next call."""
        return kept_bytes(problem)


def _writer(values_TB: Tensor, token_X: Tensor, tails_XB: Tensor) -> Write:
    def write(to: Rows, span: slice) -> None:
        put(to.values, values_TB, token_X[span])
        put(to.tails, tails_XB[span])

    return write


@PREPARE_FINALIZE.register("all_to_all_p2p")
class AllToAllByMessages(AllToAll):
    """The same rows in the same order, each exchange as W - 1 messages sent and W - 1 received."""

    traits: ClassVar[TransportTraits] = replace(
        AllToAll.traits,
        summary="all-to-all as one message to each rank; a baseline, or where a group has no all-to-all",
        wire=frozenset({"plain", "fp8"}),
    )

    def __init__(self, context: TransportContext) -> None:
        super().__init__(replace(context, comm=PointToPoint(context.comm)))

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """The rows of all-to-all, and a fixed cost for each message."""
        rows = super().volume(problem)
        return replace(rows, collectives=rows.collectives * 2 * (problem.ranks - 1))


@PREPARE_FINALIZE.register("all_to_all_v")
class AllToAllV(AllToAll):
    """Every rank first learns from everybody how many rows go where: an all-gather before each all-to-all.

    The baseline that fused dispatch operators are measured against: two collectives a dispatch, of which the first
    brings W x W numbers to every rank although it needs W of them. Source: AllToAllV in front of the MoE operators of
    Ascend's CANN.
    """

    traits: ClassVar[TransportTraits] = replace(
        AllToAll.traits,
        summary="all-gather of the routing table, then a variable all-to-all; a slow baseline",
        wire=frozenset({"plain", "fp8"}),
    )

    def announce(self, sent: Sequence[int]) -> Flight[list[int]]:
        """Gather the table of rows from each rank to each, and read the own column."""
        comm = self.context.comm
        mine_1W = torch.tensor([list(sent)], dtype=torch.int64, device="cpu")
        table_WW = yield from comm.all_gather(mine_1W, [1] * comm.size, "dispatch counts")
        return [int(count) for count in table_WW[:, comm.rank].tolist()]

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """The rows of all-to-all; the table costs a round trip more than counts alone."""
        rows = super().volume(problem)
        return replace(rows, collectives=rows.collectives + 1)
