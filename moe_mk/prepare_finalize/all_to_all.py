"""All-to-all over torch.distributed: one copy of a token for each rank that holds one of its experts.

The default between processes and hosts where no EP library is installed.

    dispatch  counts, then rows [values | scales | ids | weights] sorted by destination, token order kept inside one;
              few rows are sent with their counts, in one exchange
    combine   the same splits in reverse; the source rank adds the received rows in rank order, in f32

Two baselines for measurements are registered as well. `all_to_all_p2p` sends one message to each peer, 2 (W - 1) in
all, with the same result bit for bit: over gloo, whose all-to-all is made of messages, all are posted at once; over any
other communicator they go in W - 1 rounds, in round s to the rank s places after this one, so that no peer receives two
at a time. `all_to_all_v` gathers a table of all routings first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, cast

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator, offsets
from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.comm.failure import Failure
from moe_mk.comm.header import ANY, Arrival, Envelope
from moe_mk.comm.traffic import COUNT_BYTES
from moe_mk.config.problem import Problem
from moe_mk.config.traits import DEVICES
from moe_mk.errors import CommError
from moe_mk.flight import Flight, InFlight
from moe_mk.kernels.native.exchange import ROW_TYPES
from moe_mk.kernels.native.layer import LayerCall
from moe_mk.prepare_finalize.base import (
    PREPARE_FINALIZE,
    LayerParts,
    Multiply,
    PrepareFinalize,
    TransportContext,
    TransportTraits,
    Volume,
)
from moe_mk.prepare_finalize.packing import Rows, joined, opened, put
from moe_mk.prepare_finalize.rows.exchange import RowExchange, kept_bytes
from moe_mk.prepare_finalize.rows.formats import KernelRowFormat, RowBytes, by_rank, exchanged_parts
from moe_mk.prepare_finalize.rows.messages import FusedMessages, MessageRows, rows_of, sealed
from moe_mk.quant.tensor import QuantTensor
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
        at, received_at = offsets(send), offsets(receive)
        received = torch.empty((sum(receive), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        for step in range(self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            part, place = rows[at[to] : at[to + 1]], received[received_at[source] : received_at[source + 1]]
            if step > 0:
                going, coming = [0] * self.size, [0] * self.size
                going[to], coming[source] = send[to], receive[source]
                part = yield from self.inner.all_to_all(part, going, coming, phase)
            place.copy_(part)
        if self.size == 1:
            yield InFlight(phase)
        return received

    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        return (yield from self.inner.all_gather(rows, counts, phase))

    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        return (yield from self.inner.all_reduce(x, phase))

    def library_group(self) -> object:
        return self.inner.library_group()

    def number_layer(self) -> None:
        self.inner.number_layer()

    def _report(self, failure: Failure) -> None:
        self.inner._report(failure)

    def _recover(self, number: int) -> Flight[int]:
        return (yield from self.inner._recover(number))

    def _epoch(self) -> int:
        return self.inner._epoch()

    def _count_stayed(self, phase: str, rows: Tensor, count: int) -> None:
        """Nothing: messages alone are counted."""


@dataclass(frozen=True)
class DispatchHandle:
    """How the rows of one dispatch find back."""

    token_X: Tensor | None
    """int64. The token behind each row sent, destination by destination; None: `call` has them."""
    sent: Sequence[int]
    received: Sequence[int]
    num_tokens: int
    call: MessageRows | None = None
    """Of rows that kernels have sent with their counts."""


@PREPARE_FINALIZE.register("all_to_all")
class AllToAll(PrepareFinalize):
    """Uneven all-to-all, one copy of a token per destination rank."""

    collectives: ClassVar[int] = 3
    counts_first: ClassVar[bool] = False
    """Whether counts are always exchanged before rows, by `announce`."""
    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="torch.distributed all-to-all, one copy of a token per rank; between processes without an EP library",
        kinds=DEVICES,
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=TransportTraits.ANY_WIRE,
        min_ranks=2,
        graph_safe=False,
        deterministic=True,
    )

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._exchange = RowExchange(context.comm, context.device)
        self._size = RowBytes.of(context)
        native = self._exchange.native
        self._format = None if native is None else KernelRowFormat(context, self._size)
        self._idle: list[MessageRows] = []
        """Calls that are not in use."""

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Send each token to the ranks of its experts, with the ids that are local there."""
        c, num_tokens = self.context, x_TH.shape[0]
        eager = not self.counts_first and c.comm.eager_bytes and c.device.type == "cpu"
        few = eager and num_tokens * (self._size.values + self._size.tail) <= c.comm.eager_bytes
        if few and self._format is not None and c.dtype.dtype in ROW_TYPES:
            native = self._exchange.native
            assert native is not None
            call = self._idle.pop() if self._idle else MessageRows(c, self._format, native)
            with c.spans.span("quantise"):  # kernels round rows while they pack them
                going = call.send(x_TH, routing, self.encode)
            with c.spans.span("dispatch"):
                return (yield from self._dispatch_packed(call, going, num_tokens))
        x_wire = self.encode(x_TH)
        with c.spans.span("dispatch"):
            outgoing = _Outgoing(as_bytes(x_wire.values), *by_rank(c, x_wire.scales, routing))  # gathered when written
            if eager:
                return (yield from self._dispatch_eager(outgoing, num_tokens, few=bool(few)))
            # Counts first: peers must size their buffers before rows arrive.
            received = yield from self.announce(outgoing.sent)
            c.comm.check_counts(received, c.max_num_tokens, "dispatch counts")
            rows = yield from self._dispatch(outgoing, outgoing.sent, received)
            return self._opened(rows, DispatchHandle(outgoing.token_X, outgoing.sent, received, num_tokens))

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Send sums back the way the rows came, and add them up per token."""
        handle, comm = tokens.handle, self.context.comm
        assert isinstance(handle, DispatchHandle)
        with self.context.spans.span("combine"):
            call, y_RH = handle.call, output.y
            row_bytes = y_RH.shape[1] * y_RH.element_size()
            few = max(max(handle.received), max(handle.sent)) * row_bytes <= comm.eager_bytes
            if call is not None and few and y_RH.dtype is self.context.dtype.dtype:
                y_RH = y_RH if y_RH.is_contiguous() else y_RH.contiguous()
                comm.traffic.sent("combine", [count * row_bytes for count in handle.received], comm.rank)
                going = call.return_sums(y_RH, handle.received)
                arrived = yield from comm.swap_eager(
                    going, {peer: handle.sent[peer] * row_bytes for peer in going}, "combine"
                )
                y_TH = call.add_up(y_RH, handle.received, arrived)
                comm.give_back(arrived.values())
                self._idle.append(call)
                return y_TH
            token_X = call.token_X() if call is not None else handle.token_X
            assert token_X is not None
            return (yield from self._combine(y_RH, token_X, handle))

    def _combine(self, y_RH: Tensor, token_X: Tensor, handle: DispatchHandle) -> Flight[Tensor]:
        """Sums that do not fit into messages with their counts."""
        exchange = self._exchange
        back = yield from exchange.combine(y_RH, token_X, handle.sent, handle.received, "combine")
        y_TH = exchange.summed([back.parts], (handle.num_tokens, y_RH.shape[1]), y_RH.dtype)
        exchange.scratch.give(back.memory)
        return y_TH

    def fuse_layer(self, parts: LayerParts) -> LayerCall | None:
        """For rows that experts read as they arrive, over messages with rows in them."""
        form, context = self._format, self.context
        if form is None or context.device.type != "cpu" or not context.comm.eager_bytes:
            return None
        native = exchanged_parts(context, form, parts)
        return None if native is None else FusedMessages(context, form, native, self, parts.multiply)

    def run_apart(
        self, call: MessageRows, arrived: Mapping[int, Arrival], received: list[int], multiply: Multiply
    ) -> Flight[Tensor]:
        """The rest of a native call in which rows of some peer follow their count."""
        handle = DispatchHandle(call.token_X(), call.sent, received, call.num_tokens)
        tokens = self._opened((yield from self._with_others(call.own_rows(), arrived, received)), handle)
        return (yield from self.finalize(multiply(tokens), tokens))

    def combine_apart(self, y_RH: Tensor, call: MessageRows, received: list[int]) -> Flight[Tensor]:
        """The rest of a native call with sums that do not fit into messages."""
        token_X = call.token_X()
        return self._combine(y_RH, token_X, DispatchHandle(token_X, call.sent, received, call.num_tokens))

    # Rows that are sent with their counts, and rows of peers that are.

    def _dispatch_packed(self, call: MessageRows, going: Mapping[int, Envelope], num_tokens: int) -> Flight[Tokens]:
        comm = self.context.comm
        self._count_sent(call.sent)
        arrived, received = yield from self._swap(going, call.sent)
        handle = DispatchHandle(None, call.sent, received, num_tokens, call)
        if all(arrival.num_bytes or not arrival.num_rows for arrival in arrived.values()):
            yield from comm.skip("dispatch")
            x_RH, slots_RK, weights_RK = call.receive(arrived, received)
            comm.give_back(arrived.values())
            return self._tokens(x_RH, slots_RK, weights_RK, handle)
        return self._opened((yield from self._with_others(call.own_rows(), arrived, received)), handle)

    def _dispatch_eager(self, outgoing: _Outgoing, num_tokens: int, *, few: bool) -> Flight[Tokens]:
        """Counts, with the rows of ranks that bring few, then the others."""
        comm, own = self.context.comm, cast("Rows | _Outgoing", outgoing)
        peers = [peer for peer in range(comm.size) if peer != comm.rank]
        if few:
            rows = [outgoing.rows(slice(first, last)) for first, last in pairwise(offsets(outgoing.sent))]
            self._count_sent(outgoing.sent)
            going, own = {peer: sealed(rows[peer]) for peer in peers}, rows[comm.rank]
        else:
            comm.traffic.sent("dispatch counts", [COUNT_BYTES] * comm.size, comm.rank)
            going = {peer: Envelope.empty(0, outgoing.sent[peer]) for peer in peers}
        arrived, received = yield from self._swap(going, outgoing.sent)
        handle = DispatchHandle(outgoing.token_X, outgoing.sent, received, num_tokens)
        return self._opened((yield from self._with_others(own, arrived, received)), handle)

    def _with_others(self, own: Rows | _Outgoing, arrived: Mapping[int, Arrival], received: list[int]) -> Flight[Rows]:
        """All rows in rank order: those that came with their counts, and those that come now.

        own: this rank's, where all others are sent already.
        """
        comm, size = self.context.comm, self._size
        parts: list[Rows | None] = [None] * comm.size
        for peer, came in arrived.items():
            if came.num_bytes:
                parts[peer] = rows_of(came.rows, came.num_rows, size.values, size.tail)
        parts[comm.rank] = own if isinstance(own, Rows) else None
        coming = [received[peer] if part is None else 0 for peer, part in enumerate(parts)]
        if isinstance(own, _Outgoing):
            rows = yield from self._dispatch(own, own.sent, coming)
        elif any(coming):  # nothing is written
            rows = yield from self._exchange.dispatch(lambda *_: None, own.widths, [0] * comm.size, coming, "dispatch")
        else:
            yield from comm.skip("dispatch")
            return joined([part for part in parts if part is not None])
        if all(part is None for part in parts):
            return rows
        at = offsets(coming)
        return joined([rows[at[rank] : at[rank + 1]] if part is None else part for rank, part in enumerate(parts)])

    def _swap(
        self, going: Mapping[int, Envelope], sent: Sequence[int]
    ) -> Flight[tuple[Mapping[int, Arrival], list[int]]]:
        """Exchange counts, and rows where they come with them; what peers have announced is checked."""
        arrived = yield from self.context.comm.swap_eager(going, dict.fromkeys(going, ANY), "dispatch counts")
        return arrived, self.counts_of(arrived, sent)

    def counts_of(self, arrived: Mapping[int, Arrival], sent: Sequence[int]) -> list[int]:
        """Rows received from each rank. Raises CommError for more than there can be, and for rows of another size."""
        comm, phase, row_bytes = self.context.comm, "dispatch counts", self._size.values + self._size.tail
        received = [arrived[peer].num_rows if peer in arrived else count for peer, count in enumerate(sent)]
        comm.check_counts(received, self.context.max_num_tokens, phase)
        for peer, arrival in arrived.items():
            if arrival.num_bytes not in (0, arrival.num_rows * row_bytes):
                text = f"announced {arrival.num_rows} rows of {row_bytes} bytes and sent {arrival.num_bytes} bytes"
                raise CommError(text, rank=comm.rank, phase=phase, layer=comm.layer, peer=peer)
        return received

    def _count_sent(self, sent: Sequence[int]) -> None:
        comm, row_bytes = self.context.comm, self._size.values + self._size.tail
        comm.traffic.sent("dispatch counts", [COUNT_BYTES] * len(sent), comm.rank)
        comm.traffic.sent("dispatch", [count * row_bytes for count in sent], comm.rank)

    # Rows that follow their counts.

    def _dispatch(self, outgoing: _Outgoing, sent: Sequence[int], received: Sequence[int]) -> Flight[Rows]:
        widths = outgoing.values_TB.shape[1], outgoing.tails_XB.shape[1]
        return (yield from self._exchange.dispatch(outgoing.write, widths, sent, received, "dispatch"))

    def _opened(self, rows: Rows, handle: DispatchHandle) -> Tokens:
        c = self.context
        x_RH, slots_RK, weights_RK = opened(rows, c.wire, c.top_k)
        c.comm.check_ids(slots_RK, handle.received, c.num_slots, "slot", "dispatch")
        return self._tokens(x_RH, slots_RK, weights_RK, handle)

    def _tokens(self, x_RH: QuantTensor, slots_RK: Tensor, weights_RK: Tensor, handle: DispatchHandle) -> Tokens:
        expected_N = self.expected_of_rows(len(slots_RK))
        return RowTokens(
            x_RH, slots_RK, weights_RK, self.context.num_slots, handle, expected_N=expected_N, most_K=self.most_K
        )

    def announce(self, sent: Sequence[int]) -> Flight[list[int]]:
        """Tell each rank how many rows it will get; return how many each will send."""
        return (yield from self.context.comm.exchange_counts(sent, "dispatch counts"))

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """Host memory in which rows are packed, kept for the next call."""
        return kept_bytes(problem)


@dataclass(frozen=True)
class _Outgoing:
    """Rows to send, by rank, then by token."""

    values_TB: Tensor
    """Of all tokens."""
    token_X: Tensor
    tails_XB: Tensor
    sent: list[int]

    def rows(self, span: slice) -> Rows:
        return Rows(self.values_TB[self.token_X[span]], self.tails_XB[span])

    def write(self, to: Rows, span: slice) -> None:
        put(to.values, self.values_TB, self.token_X[span])
        put(to.tails, self.tails_XB[span])


@PREPARE_FINALIZE.register("all_to_all_p2p")
class AllToAllByMessages(AllToAll):
    """`AllToAll` with each exchange as W - 1 messages sent and W - 1 received."""

    traits: ClassVar[TransportTraits] = replace(
        AllToAll.traits,
        summary="all-to-all as one message to each rank; a baseline, or where a group has no all-to-all",
        wire=frozenset({"plain", "fp8"}),
    )

    def __init__(self, context: TransportContext) -> None:
        super().__init__(replace(context, comm=PointToPoint(context.comm)))

    fuse_layer = PrepareFinalize.fuse_layer

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
    counts_first: ClassVar[bool] = True
    fuse_layer = PrepareFinalize.fuse_layer

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
