"""Rows into the windows of peers and sums out of them, by native kernels that write and read there themselves.

What `one_sided_rows` does with torch, bit for bit. A call of a few tokens is mostly the Python around the kernels, so
that whatever stays the same is made at the first call over a lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_mk.kernels.native.exchange import ROW_TYPES, Rounding, RowFormat
from moe_mk.kernels.native.exchange_calls import ExchangeCalls
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.one_sided.buffers import Lane
from moe_mk.prepare_finalize.one_sided.rows_torch import Arrived, Encode, RowBytes, Sent, WayHome, WireTypes
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import Routing

GROUP = 128


@dataclass(frozen=True)
class _LaneCalls:
    """What the calls of one layer over one lane have in common."""

    calls: ExchangeCalls
    values_RX: Tensor
    """All rows that the own window has room for, as they are received."""
    sums_RH: Tensor
    values_at: int
    sums_at: int
    """Addresses."""


class KernelRows:
    """Written into windows by native kernels, which round FP8 rows on the way; their lane knows what was sent."""

    def __init__(self, context: TransportContext, size: RowBytes) -> None:
        self._size, self._wire, self._dtype = size, context.wire, context.dtype.dtype
        self._types, self._hidden, self._slots = WireTypes.of(context.wire), context.hidden_size, context.num_slots
        scale_dtype = self._types.scales or torch.uint8
        self._form = RowFormat(size.values, size.scales, size.top_k, rounding_of(context), scale_dtype)
        self._plain = context.wire.dtype if isinstance(context.wire, Plain) else None
        tables = context.tables
        self._tables = tables.rank_of_P.to(torch.int32).contiguous(), tables.slot_of_P.to(torch.int32).contiguous()
        self._of_lane: WeakKeyDictionary[Lane, _LaneCalls] = WeakKeyDictionary()

    def send(self, lane: Lane, x_TH: Tensor, routing: Routing, encode: Encode) -> tuple[Sent, list[int]]:
        """Write all rows in one call, the own ones where they are read, then a flag a peer."""
        of_lane = self._of_lane.get(lane) or self._first_call(lane)
        rounding = self._form.rounding is not Rounding.NONE and x_TH.dtype in ROW_TYPES and x_TH.stride(1) == 1
        x = (x_TH, None) if rounding else self._encoded(x_TH, encode)
        dense = _dense(routing.ids_TK, torch.int32), _dense(routing.weights_TK, torch.float32)
        while (counts := of_lane.calls.dispatch(x, dense, lane.epoch, rounding=rounding)) is None:
            assert lane.exchange is not None
            lane.make_room(lane.exchange.counts[:])
        return None, counts

    def arrived(self, lane: Lane, sent_W: list[int]) -> list[int]:
        """Rows received from each rank."""
        del sent_W  # the exchange knows
        exchange = lane.exchange
        assert exchange is not None
        received_W = exchange.arrived(lane.epoch, lane.patience_us)
        return exchange.received_from(lane.await_rows()) if received_W is None else received_W

    def receive(self, lane: Lane, received_W: list[int]) -> Arrived:
        """Take tails apart; values are those of the window, copied to their place where they lie apart."""
        of_lane, total = self._of_lane[lane], sum(received_W)
        first = lane.seam_row - sum(received_W[: lane.left + 1])
        if lane.size > 2:  # others than the two whose rows meet at the seam
            lane.take_pages_around_seam(first, first + total)
        values_to = of_lane.values_at + first * self._size.values
        scales_RX, ids_RK, weights_RK = of_lane.calls.receive(total, values_to)
        lane.take_pages_of_sums(total)
        x_RH = QuantTensor(of_lane.values_RX[first : first + total], scales_RX, self._wire)
        return x_RH, ids_RK, weights_RK, of_lane.sums_RH[:total]

    def show(self, home: WayHome) -> None:
        """Tell every peer that the sums of its rows are there."""
        assert home.lane.exchange is not None
        home.lane.exchange.show(home.epoch)

    def add_up(self, home: WayHome, y_RH: Tensor, own: slice) -> Tensor:
        """Add the sums of every rank where they lie, the own ones among y_RH."""
        lane, of_lane = home.lane, self._of_lane[home.lane]
        if y_RH is home.sums_RH:
            own_at = of_lane.sums_at + own.start * lane.region.sum_bytes
        else:
            own_XH = y_RH[own].to(self._dtype).contiguous()
            own_at = own_XH.data_ptr()
        return of_lane.calls.collect(own_at, home.epoch, lane.patience_us, lane.await_sums)

    def _first_call(self, lane: Lane) -> _LaneCalls:
        assert lane.exchange is not None
        calls = ExchangeCalls(lane.exchange, self._form, self._tables, self._slots, self._hidden, self._dtype)
        with torch.inference_mode(False):  # else no experts could write sums there outside of that mode
            values_RX, sums_RH = lane.values_RB.view(self._types.values), lane.sums_RB.view(self._dtype)
        made = _LaneCalls(calls, values_RX, sums_RH, values_RX.data_ptr(), sums_RH.data_ptr())
        self._of_lane[lane] = made
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


def _dense(x_TK: Tensor, dtype: torch.dtype) -> Tensor:
    return x_TK if x_TK.dtype is dtype and x_TK.is_contiguous() else x_TK.to(dtype).contiguous()
