"""Rows into the windows of peers and sums out of them, by native kernels that write and read there themselves.

Same results as `rows_torch`, bit for bit. A call of a few tokens is mostly the Python around the kernels, so
that whatever stays the same is made at the first call over a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_mk.kernels.native.exchange import ROW_TYPES, ExchangeCalls, Rounding, RowFormat
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.one_sided.buffers import OneSidedBufferSlot
from moe_mk.prepare_finalize.one_sided.rows_torch import Arrived, DispatchHandle, Encode, RowBytes, Sent, WireTypes
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import Routing

GROUP = 128


@dataclass(frozen=True)
class _SlotCalls:
    """What the calls of one layer over one buffer have in common."""

    calls: ExchangeCalls
    values_RX: Tensor
    """All rows that the own window has room for, as they are received."""
    sums_RH: Tensor
    values_at: int
    sums_at: int
    """Addresses."""


class KernelRows:
    """Written into windows by native kernels, which round FP8 rows on the way; their buffer knows what was sent."""

    def __init__(self, context: TransportContext, size: RowBytes) -> None:
        self._size, self._wire, self._dtype = size, context.wire, context.dtype.dtype
        self._types, self._hidden, self._slots = WireTypes.of(context.wire), context.hidden_size, context.num_slots
        scale_dtype = self._types.scales or torch.uint8
        self._form = RowFormat(size.values, size.scales, size.top_k, rounding_of(context), scale_dtype)
        self._plain = context.wire.dtype if isinstance(context.wire, Plain) else None
        tables = context.tables
        self._tables = tables.rank_of_P.to(torch.int32).contiguous(), tables.slot_of_P.to(torch.int32).contiguous()
        self._calls_of_slot: WeakKeyDictionary[OneSidedBufferSlot, _SlotCalls] = WeakKeyDictionary()

    def send(
        self, buffer: OneSidedBufferSlot, x_TH: Tensor, routing: Routing, encode: Encode
    ) -> tuple[Sent, list[int]]:
        """Write all rows in one call, the own ones where they are read, then a flag a peer."""
        prepared = self._calls_of_slot.get(buffer) or self._first_call(buffer)
        rounding = self._form.rounding is not Rounding.NONE and x_TH.dtype in ROW_TYPES and x_TH.stride(1) == 1
        as_is = rounding or (x_TH.dtype is self._plain and x_TH.stride(1) == 1)
        x = (x_TH, None) if as_is else self._encoded(x_TH, encode)
        ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
        if ids_TK.dtype is not torch.int32 or not ids_TK.is_contiguous():
            ids_TK = ids_TK.to(torch.int32).contiguous()
        if weights_TK.dtype is not torch.float32 or not weights_TK.is_contiguous():
            weights_TK = weights_TK.to(torch.float32).contiguous()
        dense = ids_TK, weights_TK
        while (counts := prepared.calls.dispatch(x, dense, buffer.epoch, rounding=rounding)) is None:
            assert buffer.exchange is not None
            buffer.make_room(buffer.exchange.counts[:])
        return None, counts

    def arrived(self, buffer: OneSidedBufferSlot, sent_W: list[int]) -> list[int]:
        """Rows received from each rank."""
        del sent_W  # the exchange has it
        exchange = buffer.exchange
        assert exchange is not None
        received_W = exchange.arrived(buffer.epoch, buffer.patience_us)
        return exchange.received_from(buffer.await_rows()) if received_W is None else received_W

    def receive(self, buffer: OneSidedBufferSlot, received_W: list[int]) -> Arrived:
        """Take tails apart; values are those of the window, copied to their place where they lie apart."""
        prepared, total = self._calls_of_slot[buffer], sum(received_W)
        first = buffer.seam_row - sum(received_W[: buffer.left + 1])
        if buffer.size > 2:  # others than the two whose rows meet at the seam
            buffer.take_pages_around_seam(first, first + total)
        values_to = prepared.values_at + first * self._size.values
        scales_RX, ids_RK, weights_RK = prepared.calls.receive(total, values_to)
        if total > buffer.sums_with_pages:
            buffer.take_pages_of_sums(total)
        x_RH = QuantTensor(prepared.values_RX[first : first + total], scales_RX, self._wire)
        return x_RH, ids_RK, weights_RK, prepared.sums_RH[:total]

    def show(self, handle: DispatchHandle) -> None:
        """Signal every peer that the sums of its rows are written."""
        assert handle.buffer.exchange is not None
        handle.buffer.exchange.show(handle.epoch)

    def add_up(self, handle: DispatchHandle, y_RH: Tensor, own: slice) -> Tensor:
        """Add the sums of every rank where they lie, the own ones among y_RH."""
        buffer, prepared = handle.buffer, self._calls_of_slot[handle.buffer]
        if y_RH is handle.sums_RH:
            own_at = prepared.sums_at + own.start * buffer.region.sum_bytes
        else:
            own_XH = y_RH[own].to(self._dtype).contiguous()
            own_at = own_XH.data_ptr()
        return prepared.calls.collect(own_at, handle.epoch, buffer.patience_us, buffer.await_sums)

    def _first_call(self, buffer: OneSidedBufferSlot) -> _SlotCalls:
        assert buffer.exchange is not None
        calls = ExchangeCalls(buffer.exchange, self._form, self._tables, self._slots, self._hidden, self._dtype)
        with torch.inference_mode(False):  # else no experts could write sums there outside of that mode
            values_RX, sums_RH = buffer.values_RB.view(self._types.values), buffer.sums_RB.view(self._dtype)
        made = _SlotCalls(calls, values_RX, sums_RH, values_RX.data_ptr(), sums_RH.data_ptr())
        self._calls_of_slot[buffer] = made
        return made

    def _encoded(self, x_TH: Tensor, encode: Encode) -> tuple[Tensor, Tensor | None]:
        """Values, close within a row, and scales that travel."""
        if x_TH.dtype is self._plain:
            return (x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()), None
        x = encode(x_TH)
        values_TX = x.values if x.values.stride(1) == 1 else x.values.contiguous()
        return values_TX, None if x.scales is None or not self._size.scales else x.scales.contiguous()


def rounding_of(context: TransportContext) -> Rounding:
    """What the kernels can make of rows on their way: FP8 by groups of 128 of a token."""
    wire = context.wire
    if not isinstance(wire, Fp8Block) or wire.block != (1, GROUP):
        return Rounding.NONE
    return Rounding.FP8_UE8M0 if wire.ue8m0 else Rounding.FP8
