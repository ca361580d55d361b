"""A layer over messages with two native calls: routing and dispatch into messages, experts and sums of received ones.

The messages are those of `rows/eager.py`, so peers may run the separate steps. Where rows or sums of any rank do not
fit into one message, the rest of the call is that of the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import memmove
from typing import Protocol

import torch
from torch import Tensor

from moe_mk.comm.header import HEADER_BYTES, Arrival, Envelope
from moe_mk.flight import Flight, wait
from moe_mk.kernels.native import ExchangeLayer, Gating, Places, RowsOfExperts
from moe_mk.kernels.native.exchange import Exchange, ExchangeCalls, WindowPlaces
from moe_mk.kernels.native.exchange_layer import Stage, WindowParts
from moe_mk.prepare_finalize.base import Multiply, TransportContext
from moe_mk.prepare_finalize.packing import Rows
from moe_mk.prepare_finalize.rows.eager import rows_of
from moe_mk.prepare_finalize.rows.formats import FUSED_TOKENS, KernelRowFormat


class Steps(Protocol):
    """The steps of a transport that exchange messages, and those for calls that do not fit into messages."""

    def swap(
        self, going: Mapping[int, Envelope], sent: list[int], meanwhile: Callable[[], None] | None
    ) -> tuple[Mapping[int, Arrival], list[int]]:
        """Exchange rows with their counts; what peers have announced is checked."""

    def run_apart(
        self, going: Outgoing, arrived: Mapping[int, Arrival], received: list[int], multiply: Multiply
    ) -> Flight[Tensor]:
        """The rest of a call in which rows of some peer follow their count."""

    def combine_apart(self, y_RH: Tensor, going: Outgoing, received: list[int]) -> Flight[Tensor]:
        """The rest of a call with sums that do not fit into messages."""


class Outgoing:
    """The rows of one call, written into messages."""

    def __init__(self, layer: ExchangeLayer, sent: list[int], memory: Tensor, own_at: int, num_tokens: int) -> None:
        """sent: rows by rank. memory: bytes of all messages; the rows that stay begin at `own_at`."""
        self.sent, self.num_tokens, self._layer, self._memory, self._own_at = sent, num_tokens, layer, memory, own_at

    @property
    def own_address(self) -> int:
        """Of the first row that stays on this rank."""
        return self._memory.data_ptr() + self._own_at

    def own_rows(self, count: int, value_bytes: int, tail_bytes: int) -> Rows:
        """The rows that stay on this rank."""
        return rows_of(self._memory[self._own_at :], count, value_bytes, tail_bytes)

    @property
    def token_X(self) -> Tensor:
        """int64. The token behind each row sent, rank by rank."""
        return self._layer.tokens_sent(self.num_tokens)


class _OpenCall:
    """The memory of one call at a time: received rows and their sums, kept for the next call."""

    def __init__(self, context: TransportContext, form: KernelRowFormat, fused: FusedMessages) -> None:
        comm, size, hidden = context.comm, form.size, context.hidden_size
        nowhere, no_flags = [0] * comm.size, [0] * (2 * comm.size)
        places = WindowPlaces(
            comm.rank, nowhere, [size.values] * comm.size, nowhere, no_flags, nowhere, nowhere, nowhere, no_flags,
            nowhere, context.max_num_tokens,
        )  # fmt: skip
        self.exchange = Exchange(fused.experts.native, places)
        self.exchange.layer = comm.layer
        calls = ExchangeCalls(self.exchange, form.form, form.tables, context.num_slots, hidden, torch.bfloat16)
        calls.expect(torch.bfloat16, hidden, rounding=form.form.scale_bytes > 0)
        window = WindowParts(0, 0, 0, -1)
        self.layer = ExchangeLayer(calls, fused.experts, fused.gating, fused.places, window, fused.meter.words)
        self._value_bytes, self._hidden, self.room = size.values, hidden, 0
        self.sums_RH = torch.empty((0, hidden), dtype=torch.bfloat16, device="cpu")

    def make_room(self, rows: int) -> None:
        """Room for received rows, and for their sums."""
        self.room = max(rows, 2 * self.room)
        self._values_RB = torch.empty((self.room, self._value_bytes), dtype=torch.uint8, device="cpu")
        with torch.inference_mode(False):
            self.sums_RH = torch.empty((self.room, self._hidden), dtype=torch.bfloat16, device="cpu")
        self.layer.move_window(self._values_RB.data_ptr(), self.sums_RH.data_ptr())
        self.layer.make_room(self.room, self.room, (0, self.room))

    def run(self, first: Stage, stop: Stage) -> None:
        """Stages without waits, from one to another."""
        stage: int = first
        while stage < stop:
            self.layer.check(self.layer.resume(stage, stop), "dispatch")
            stage = self.layer.stage


class FusedMessages:
    """An `ExchangedCall`. What does not change between calls is prepared once for each call that is open at a time."""

    def __init__(
        self,
        context: TransportContext,
        form: KernelRowFormat,
        experts: RowsOfExperts,
        gating: Gating | None,
        places: Places,
        steps: Steps,
        multiply: Multiply,
    ) -> None:
        comm, size = context.comm, form.size
        self.experts, self.gating, self.places, self.routes = experts, gating, places, gating is not None
        self._comm, self._context, self._form, self._steps, self._multiply = comm, context, form, steps, multiply
        self._values, self._row_bytes = size.values, size.values + size.tail
        self._sum_bytes = context.hidden_size * torch.bfloat16.itemsize
        self.meter = comm.traffic.meter(comm.size, comm.rank, self._row_bytes, self._sum_bytes, messages=True)
        self._most = min(FUSED_TOKENS, context.max_num_tokens, comm.eager_bytes // self._row_bytes)
        self._idle: list[_OpenCall] = []
        self.experts_bytes: int | None = None
        self._bytes_of_row = size.values + size.scales + self._sum_bytes

    def is_ready(self, num_tokens: int) -> bool:
        """Whether all rows fit into one message to each rank."""
        return num_tokens <= self._most

    def __call__(
        self,
        x_TH: Tensor,
        load_E: Tensor | None,
        routing: tuple[Tensor, Tensor] | None = None,
        *,
        is_routed: bool = False,
        routed: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """See `ExchangedCall`."""
        try:
            call = self._idle.pop() if self._idle else _OpenCall(self._context, self._form, self)
            y_TH = torch.empty_like(x_TH)
            going = self._send(call, x_TH, load_E, routing, y_TH, routed, is_routed)
            y_TH = self._finish(call, going, y_TH, meanwhile)
            self._idle.append(call)
            return y_TH
        except BaseException as error:
            self._comm.fail(error)
            raise

    def _send(
        self,
        call: _OpenCall,
        x_TH: Tensor,
        load_E: Tensor | None,
        routing: tuple[Tensor, Tensor] | None,
        y_TH: Tensor,
        routed: Callable[[], None] | None,
        is_routed: bool,
    ) -> tuple[Outgoing, dict[int, Envelope]]:
        """Route, and write the rows of every rank into a message: see `EagerCall.send`."""
        tokens, ranks, me, layer = x_TH.shape[0], self._comm.size, self._comm.rank, call.layer
        room, seam = HEADER_BYTES + tokens * self._row_bytes, HEADER_BYTES + tokens * self._values
        memory = torch.empty(ranks * room, dtype=torch.uint8, device="cpu")  # read by gloo until it is sent
        first = memory.data_ptr() + seam
        seams = list(range(first, first + ranks * room, room))
        call.exchange.write_to(seams, seams, room=tokens)
        stop = Stage.AWAIT_ROWS if routed is None else Stage.DISPATCH
        status = layer.begin(x_TH, load_E, routing, y_TH, 0, torch.get_num_threads(), is_routed=is_routed, stop=stop)
        layer.check(status, "dispatch")
        if routed is not None:
            routed()
            call.run(Stage.DISPATCH, Stage.AWAIT_ROWS)
        counts, view, going, own_at = layer.counts, memory.numpy().data, {}, 0
        for rank, count in enumerate(counts):
            at = rank * room + seam - count * self._values
            if rank == me:
                own_at = at
            else:
                going[rank] = Envelope(memory, view, at, count * self._row_bytes, count)
        return Outgoing(layer, counts, memory, own_at, tokens), going

    def _finish(
        self,
        call: _OpenCall,
        sent: tuple[Outgoing, dict[int, Envelope]],
        y_TH: Tensor,
        meanwhile: Callable[[], None] | None,
    ) -> Tensor:
        """Exchange rows, run the experts, exchange sums."""
        (out, going), comm = sent, self._comm
        arrived, received = self._steps.swap(going, out.sent, meanwhile)
        total = sum(received)
        self.experts_bytes = total * self._bytes_of_row
        if not all(arrival.num_bytes or not arrival.num_rows for arrival in arrived.values()):
            self.experts_bytes = None
            return wait(self._steps.run_apart(out, arrived, received, self._multiply))
        wait(comm.skip("dispatch"))
        if total > call.room:
            call.make_room(total)
        places = [out.own_address] * comm.size
        for peer, arrival in arrived.items():
            places[peer] = arrival.address
        tails = [at + count * self._values for at, count in zip(places, received, strict=True)]
        call.exchange.read_from(places, tails, received)
        few = max(max(received), max(out.sent)) * self._sum_bytes <= comm.eager_bytes
        call.run(Stage.RECEIVE, Stage.AWAIT_SUMS if few else Stage.SHOW_SUMS)
        comm.give_back(arrived.values())
        if not few:
            return wait(self._steps.combine_apart(call.sums_RH[:total], out, received))
        sums = self._returned(call, out.sent, received)
        awaited = {peer: out.sent[peer] * self._sum_bytes for peer in sums}
        arrived = comm.swap_now(sums, awaited, "combine")
        places = [0] * comm.size
        for peer, arrival in arrived.items():
            places[peer] = arrival.address
        call.exchange.sum_from(places)
        call.run(Stage.ADD_SUMS, Stage.DONE)
        comm.give_back(arrived.values())
        return y_TH

    def _returned(self, call: _OpenCall, sent: list[int], received: list[int]) -> dict[int, Envelope]:
        """Sums in a message for each rank that has sent rows, or gets some."""
        going, at, me = {}, call.sums_RH.data_ptr(), self._comm.rank
        for peer, count in enumerate(received):
            num_bytes = count * self._sum_bytes
            if peer != me and (count or sent[peer]):
                going[peer] = envelope = Envelope.empty(num_bytes, count)
                memmove(envelope.tensor.data_ptr() + HEADER_BYTES, at, num_bytes)
            at += num_bytes
        return going
