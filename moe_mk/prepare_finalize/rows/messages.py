"""Few rows: one message to each rank with their number, and one back with their sums, written and read by kernels.

A message holds a header of fixed size, in which the rows are counted, then the rows in two blocks:

    dispatch   [ header | values of all rows | tails of all rows: scales, ids, weights ]
    combine    [ header | sums of all rows ]

A rank whose rows may exceed `Communicator.eager_bytes` sends the header alone; its rows follow in a second exchange.
`MessageRows` are the rows of one call whose stages run apart. `FusedMessages` is a whole layer in two native calls over
the same messages, so that peers may run either: routing and dispatch, then experts and sums of received rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import memmove
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_mk.comm.header import ANY, HEADER_BYTES, Arrival, Envelope
from moe_mk.flight import wait
from moe_mk.kernels.native.exchange import Exchange, ExchangeCalls, WindowPlaces
from moe_mk.kernels.native.layer import NativeParts, PreparedExchangeCall, Stage
from moe_mk.kernels.native.library import Native
from moe_mk.prepare_finalize.base import Multiply, TransportContext
from moe_mk.prepare_finalize.packing import Rows
from moe_mk.prepare_finalize.rows.formats import FUSED_TOKENS, Encode, KernelRowFormat
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import Routing

if TYPE_CHECKING:
    from moe_mk.prepare_finalize.all_to_all import AllToAll


class MessageRows:
    """The rows and sums of one call at a time. What does not change between calls is made once."""

    def __init__(self, context: TransportContext, form: KernelRowFormat, native: Native) -> None:
        comm, size = context.comm, form.size
        nowhere, no_flags = [0] * comm.size, [0] * (2 * comm.size)
        places = WindowPlaces(
            comm.rank, nowhere, [size.values] * comm.size, nowhere, no_flags, nowhere, nowhere, nowhere, no_flags,
            nowhere, context.max_num_tokens,
        )  # fmt: skip
        self.format, self.rank, self.size, self.sent, self.num_tokens = form, comm.rank, comm.size, [0] * comm.size, 0
        """sent: rows by rank."""
        self.exchange = Exchange(native, places)
        self.exchange.layer = comm.layer
        self.sum_bytes = context.hidden_size * context.dtype.dtype.itemsize
        self.calls = ExchangeCalls(
            self.exchange, form.form, form.tables, context.num_slots, context.hidden_size, context.dtype.dtype
        )
        self._values, self._row_bytes = size.values, size.values + size.tail
        self._columns = size.values // form.types.values.itemsize
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._own_at = 0

    def open(self, num_tokens: int) -> None:
        """Provide memory for the messages to all ranks, to which the next dispatch writes."""
        room, seam = self._room_and_seam(num_tokens)
        self._memory = torch.empty(self.size * room, dtype=torch.uint8, device="cpu")  # gloo reads it until it is sent
        first = self._memory.data_ptr() + seam
        seams = list(range(first, first + self.size * room, room))
        self.exchange.write_to(seams, seams, room=num_tokens)
        self.num_tokens = num_tokens

    def written(self, counts: list[int]) -> dict[int, Envelope]:
        """The messages for the other ranks. counts: rows by rank of the dispatch."""
        (room, seam), view, going = self._room_and_seam(self.num_tokens), self._memory.numpy().data, {}
        self.sent = counts
        for rank, count in enumerate(counts):
            at = rank * room + seam - count * self._values
            if rank == self.rank:
                self._own_at = at
            else:
                going[rank] = Envelope(self._memory, view, at, count * self._row_bytes, count)
        return going

    def _room_and_seam(self, num_tokens: int) -> tuple[int, int]:
        """Bytes of a message with all tokens, and where its values end and its tails begin."""
        return HEADER_BYTES + num_tokens * self._row_bytes, HEADER_BYTES + num_tokens * self._values

    def send(self, x_TH: Tensor, routing: Routing, encode: Encode) -> dict[int, Envelope]:
        """Write the rows of every rank; returns those of the others."""
        self.open(x_TH.shape[0])
        x, dense, rounding = self.format.arguments(x_TH, routing, encode)
        counts = self.calls.dispatch(x, dense, 0, rounding=rounding)
        assert counts is not None, "there is room for every token at every rank"
        return self.written(counts)

    def read(self, arrived: Mapping[int, Arrival], counts: list[int]) -> None:
        """Let kernels read the rows of all ranks where they are. counts: rows by rank."""
        places = _addresses(arrived, self.size, self._memory.data_ptr() + self._own_at)
        tails = [at + count * self._values for at, count in zip(places, counts, strict=True)]
        self.exchange.read_from(places, tails, counts)

    def receive(self, arrived: Mapping[int, Arrival], counts: list[int]) -> tuple[QuantTensor, Tensor, Tensor]:
        """Rows of all ranks in rank order, ids (R, K) int32 and weights (R, K) f32. Raises CommError for a bad slot."""
        self.read(arrived, counts)
        total = sum(counts)
        values_RX = torch.empty((total, self._columns), dtype=self.format.types.values, device="cpu")
        scales_RX, ids_RK, weights_RK = self.calls.receive(total, values_RX.data_ptr())
        return QuantTensor(values_RX, scales_RX, self.format.wire), ids_RK, weights_RK

    def own_rows(self) -> Rows:
        """The rows that stay on this rank."""
        size = self.format.size
        return rows_of(self._memory[self._own_at :], self.sent[self.rank], size.values, size.tail)

    def token_X(self) -> Tensor:
        """int64. The token behind each row sent, rank by rank."""
        return self.exchange.tokens_sent()

    def return_sums(self, y_RH: Tensor, received: Sequence[int]) -> dict[int, Envelope]:
        """Copy sums, contiguous and in the order of received rows, for the ranks that have sent rows, or get some."""
        going, at = {}, y_RH.data_ptr()
        for peer, count in enumerate(received):
            num_bytes = count * self.sum_bytes
            if peer != self.rank and (count or self.sent[peer]):
                going[peer] = envelope = Envelope.empty(num_bytes, count)
                memmove(envelope.tensor.data_ptr() + HEADER_BYTES, at, num_bytes)
            at += num_bytes
        return going

    def read_sums(self, arrived: Mapping[int, Arrival]) -> None:
        """Let kernels read the sums of other ranks where they are."""
        self.exchange.sum_from(_addresses(arrived, self.size, 0))

    def add_up(self, y_RH: Tensor, received: Sequence[int], arrived: Mapping[int, Arrival]) -> Tensor:
        """The sums of every rank for each token, (T, H): in rank order from zero in f32, rounded once."""
        self.read_sums(arrived)
        return self.calls.add_up(y_RH.data_ptr() + sum(received[: self.rank]) * self.sum_bytes)


def _addresses(arrived: Mapping[int, Arrival], size: int, own: int) -> list[int]:
    """Of what has arrived, by rank; own: of this rank."""
    places = [own] * size
    for peer, arrival in arrived.items():
        places[peer] = arrival.address
    return places


class _LayerCall(MessageRows):
    """One call of a whole layer at a time: received rows and their sums are kept for the next call."""

    def __init__(self, context: TransportContext, form: KernelRowFormat, parts: NativeParts) -> None:
        super().__init__(context, form, parts[0].native)
        comm, hidden = context.comm, context.hidden_size
        self.calls.expect(torch.bfloat16, hidden, rounding=form.form.scale_bytes > 0)
        self.meter = comm.traffic.meter(comm.size, comm.rank, self._row_bytes, self.sum_bytes, messages=True)
        self.layer = PreparedExchangeCall(self.calls, parts, self.meter.words)
        self._hidden, self.room = hidden, 0
        self.sums_RH = torch.empty((0, hidden), dtype=torch.bfloat16, device="cpu")

    def make_room(self, rows: int) -> None:
        self.room = max(rows, 2 * self.room)
        self._values_RB = torch.empty((self.room, self._values), dtype=torch.uint8, device="cpu")
        with torch.inference_mode(False):
            self.sums_RH = torch.empty((self.room, self._hidden), dtype=torch.bfloat16, device="cpu")
        self.layer.block.values, self.layer.block.sums = self._values_RB.data_ptr(), self.sums_RH.data_ptr()
        self.layer.make_room(self.room, self.room, (0, self.room))

    def run(self, first: Stage, stop: Stage) -> None:
        stage: int = first
        while stage < stop:
            status = self.layer.resume(stage, stop)
            stage = self.layer.stage
            self.layer.check(status, stage)

    def token_X(self) -> Tensor:
        return self.layer.tokens_sent(self.num_tokens)


class FusedMessages:
    """A `LayerCall`. What does not change between calls is prepared once for each call that is open at a time.

    apart: the transport; its own steps end calls with parts that do not fit into messages.
    """

    def __init__(
        self, context: TransportContext, form: KernelRowFormat, parts: NativeParts, apart: AllToAll, multiply: Multiply
    ) -> None:
        self.routes, self._comm, self._apart, self._multiply = parts[2] is not None, context.comm, apart, multiply
        self._parts, self._ran = (context, form, parts), context.spans.ledger.ran
        size, self._sum_bytes = form.size, context.hidden_size * torch.bfloat16.itemsize
        self._most = min(FUSED_TOKENS, context.max_num_tokens, context.comm.eager_bytes // (size.values + size.tail))
        self._idle: list[_LayerCall] = []

    def is_ready(self, num_tokens: int) -> bool:
        """Whether all rows fit into one message to each rank."""
        return num_tokens <= self._most

    def __call__(
        self, x_TH: Tensor, load_E: Tensor | None, routing: tuple[Tensor, Tensor] | None = None,
        first: Stage = Stage.ROUTE, *, skip: bool = False, routed: Callable[[], None] | None = None,
        shared_weights_T: Tensor | None = None, captured: int | None = None,
    ) -> Tensor:  # fmt: skip
        assert not skip, "peers would not skip them"
        try:
            call = self._idle.pop() if self._idle else _LayerCall(*self._parts)
            y_TH, layer = torch.empty_like(x_TH), call.layer
            call.open(x_TH.shape[0])
            stop = Stage.SHARED if routed is None else Stage.DISPATCH
            status = layer.begin(x_TH, load_E, routing, y_TH, 0, first, stop, shared_weights_T, captured)
            layer.check(status, Stage.DISPATCH)
            if routed is not None:
                routed()
                call.run(Stage.DISPATCH, Stage.SHARED)
            self._finish(call, call.written(layer.counts), y_TH)
            self._idle.append(call)
            return y_TH
        except BaseException as error:
            self._comm.fail(error)
            raise

    def _finish(self, call: _LayerCall, going: dict[int, Envelope], y_TH: Tensor) -> None:
        """Exchange rows, run the experts, exchange sums; shared experts run while rows are on their way."""
        comm, apart = self._comm, None
        meanwhile = partial(call.run, Stage.SHARED, Stage.AWAIT_ROWS)
        arrived = comm.swap_now(going, dict.fromkeys(going, ANY), "dispatch counts", meanwhile)
        received = self._apart.counts_of(arrived, call.sent)
        total = sum(received)
        if not all(arrival.num_bytes or not arrival.num_rows for arrival in arrived.values()):
            apart = self._apart.run_apart(call, arrived, received, self._multiply)
        else:
            wait(comm.skip("dispatch"))
            if total > call.room:
                call.make_room(total)
            call.read(arrived, received)
            few = max(max(received), max(call.sent)) * self._sum_bytes <= comm.eager_bytes
            call.run(Stage.RECEIVE, Stage.AWAIT_SUMS if few else Stage.SHOW_SUMS)
            comm.give_back(arrived.values())
            if not few:
                apart = self._apart.combine_apart(call.sums_RH[:total], call, received)
        if apart is not None:
            y_TH.copy_(wait(apart))
            self._ran("combine", type(self._apart), y_TH.nbytes)
            call.run(Stage.ADD_SHARED, Stage.DONE)
            return
        sums = call.return_sums(call.sums_RH, received)
        awaited = {peer: call.sent[peer] * self._sum_bytes for peer in sums}
        arrived = comm.swap_now(sums, awaited, "combine")
        call.read_sums(arrived)
        call.run(Stage.ADD_SUMS, Stage.DONE)
        comm.give_back(arrived.values())


def rows_of(blocks: Tensor, count: int, value_bytes: int, tail_bytes: int) -> Rows:
    """The rows of one message: views of its two blocks."""
    seam, end = count * value_bytes, count * (value_bytes + tail_bytes)
    return Rows(blocks[:seam].view(count, value_bytes), blocks[seam:end].view(count, tail_bytes))


def sealed(rows: Rows) -> Envelope:
    """Rows as the two blocks of a message."""
    count, (value_bytes, tail_bytes) = len(rows), rows.widths
    envelope = Envelope.empty(count * (value_bytes + tail_bytes), count)
    to = rows_of(envelope.rows, count, value_bytes, tail_bytes)
    to.put(rows)
    return envelope
