"""Few rows: one message to each rank with their number, and one back with their sums, written and read by kernels.

A message holds a header of fixed size, in which the rows are counted, then the rows in two blocks:

    dispatch   [ header | values of all rows | tails of all rows: scales, ids, weights ]
    combine    [ header | sums of all rows ]

A rank whose rows may exceed `Communicator.eager_bytes` sends the header alone; its rows follow in a second exchange.
What does not change between calls is made once for each call that is open at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import memmove

import torch
from torch import Tensor

from moe_mk.comm.header import HEADER_BYTES, Arrival, Envelope
from moe_mk.kernels.native.exchange import Exchange, ExchangeCalls, WindowPlaces
from moe_mk.kernels.native.library import Native
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.packing import Rows
from moe_mk.prepare_finalize.rows.formats import Encode, KernelRowFormat
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import Routing


class EagerCall:
    """One call at a time, from dispatch to combine: its rows and sums, and the tokens that they are of."""

    def __init__(self, context: TransportContext, form: KernelRowFormat, native: Native) -> None:
        comm, size = context.comm, form.size
        nowhere, no_flags = [0] * comm.size, [0] * (2 * comm.size)
        places = WindowPlaces(
            comm.rank, nowhere, [size.values] * comm.size, nowhere, no_flags, nowhere, nowhere, nowhere, no_flags,
            nowhere, context.max_num_tokens,
        )  # fmt: skip
        self.format, self.rank, self.size, self.sent = form, comm.rank, comm.size, [0] * comm.size
        """sent: rows by rank."""
        self._exchange = Exchange(native, places)
        self._exchange.layer = comm.layer
        self._sum_bytes = context.hidden_size * context.dtype.dtype.itemsize
        self._calls = ExchangeCalls(
            self._exchange, form.form, form.tables, context.num_slots, context.hidden_size, context.dtype.dtype
        )
        self._columns = size.values // form.types.values.itemsize
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._own_at = 0

    def send(self, x_TH: Tensor, routing: Routing, encode: Encode) -> dict[int, Envelope]:
        """Write the rows of every rank; returns those of the others."""
        exchange, tokens, size = self._exchange, x_TH.shape[0], self.format.size
        value_bytes, row_bytes = size.values, size.values + size.tail
        room = HEADER_BYTES + tokens * row_bytes
        memory = self._memory = torch.empty(self.size * room, dtype=torch.uint8, device="cpu")
        seam = HEADER_BYTES + tokens * value_bytes  # values end there, tails begin
        first = memory.data_ptr() + seam
        seams = list(range(first, first + self.size * room, room))
        exchange.write_to(seams, seams, room=tokens)
        x, dense, rounding = self.format.arguments(x_TH, routing, encode)
        counts = self._calls.dispatch(x, dense, 0, rounding=rounding)
        assert counts is not None, "there is room for every token at every rank"
        self.sent, view, going = counts, memory.numpy().data, {}
        for rank, count in enumerate(counts):
            at = rank * room + seam - count * value_bytes
            if rank == self.rank:
                self._own_at = at
            else:
                going[rank] = Envelope(memory, view, at, count * row_bytes, count)
        return going

    def receive(self, arrived: Mapping[int, Arrival], counts: list[int]) -> tuple[QuantTensor, Tensor, Tensor]:
        """Rows of all ranks in rank order, ids (R, K) int32 and weights (R, K) f32. Raises CommError for a bad slot."""
        exchange, value_bytes = self._exchange, self.format.size.values
        places = [self._memory.data_ptr() + self._own_at] * self.size
        for peer, arrival in arrived.items():
            places[peer] = arrival.address
        tails = [at + count * value_bytes for at, count in zip(places, counts, strict=True)]
        exchange.read_from(places, tails, counts)
        total = sum(counts)
        values_RX = torch.empty((total, self._columns), dtype=self.format.types.values, device="cpu")
        scales_RX, ids_RK, weights_RK = self._calls.receive(total, values_RX.data_ptr())
        return QuantTensor(values_RX, scales_RX, self.format.wire), ids_RK, weights_RK

    def own_rows(self) -> Rows:
        """The rows that stay on this rank."""
        return rows_of(
            self._memory[self._own_at :], self.sent[self.rank], self.format.size.values, self.format.size.tail
        )

    def token_X(self) -> Tensor:
        """int64. The token behind each row sent, rank by rank."""
        return self._exchange.tokens_sent()

    def return_sums(self, y_RH: Tensor, received: Sequence[int]) -> dict[int, Envelope]:
        """Copy sums, contiguous and in the order of received rows, for the ranks of these rows."""
        going, at = {}, y_RH.data_ptr()
        for peer, count in enumerate(received):
            num_bytes = count * self._sum_bytes
            if peer != self.rank and (count or self.sent[peer]):
                going[peer] = envelope = Envelope.empty(num_bytes, count)
                memmove(envelope.tensor.data_ptr() + HEADER_BYTES, at, num_bytes)
            at += num_bytes
        return going

    def add_up(self, y_RH: Tensor, received: Sequence[int], arrived: Mapping[int, Arrival]) -> Tensor:
        """The sums of every rank for each token, (T, H): in rank order from zero in f32, rounded once."""
        places = [0] * self.size
        for peer, arrival in arrived.items():
            places[peer] = arrival.address
        self._exchange.sum_from(places)
        return self._calls.add_up(y_RH.data_ptr() + sum(received[: self.rank]) * self._sum_bytes)


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


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all ranks in rank order."""
    return Rows(torch.cat([part.values for part in parts]), torch.cat([part.tails for part in parts]))
