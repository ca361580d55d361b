"""A layer over one-sided windows as one native call: routing, dispatch, experts and combine.

The protocol is that of `OneSided`, so some ranks of a group may make this call while others run the separate steps.
The native call waits for peers for at most `PATIENCE_US`; after that, and where pages of a window are missing, it
returns, and is resumed when `OneSidedBufferSlot` has waited or reserved them. Errors are those of the separate steps.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_mk.comm.traffic import RowMeter
from moe_mk.kernels.native import ExchangeLayer, Stage
from moe_mk.kernels.native.exchange import ExchangeCalls
from moe_mk.kernels.native.layer import NativeParts
from moe_mk.kernels.native.library import Status
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.one_sided.buffers import OneSidedBufferPool, OneSidedBufferSlot
from moe_mk.prepare_finalize.rows.formats import FUSED_TOKENS, KernelRowFormat

_IS_FUSABLE = attrgetter("is_fusable")


class FusedOneSided:
    """A `LayerCall`. What does not change between calls is prepared once for each buffer."""

    def __init__(
        self, context: TransportContext, pool: OneSidedBufferPool, form: KernelRowFormat, parts: NativeParts
    ) -> None:
        comm, size = context.comm, form.size
        self._comm, self._lock, self._pool, self._status = comm, comm.lock, pool, comm.status
        self._context, self._form, self._parts, self.routes = context, form, parts, parts[2] is not None
        sums = context.hidden_size * context.dtype.dtype.itemsize
        self._meter: RowMeter = comm.traffic.meter(comm.size, comm.rank, size.values + size.tail, sums)
        self._layers: WeakKeyDictionary[OneSidedBufferSlot, ExchangeLayer] = WeakKeyDictionary()
        self._most = min(FUSED_TOKENS, context.max_num_tokens)

    def is_ready(self, num_tokens: int) -> bool:
        """Whether the call is small, and buffers of the group are open and can be used by kernels that wait."""
        slots = self._pool.slots
        return num_tokens <= self._most and bool(slots) and all(map(_IS_FUSABLE, slots))

    def __call__(
        self,
        x_TH: Tensor,
        load_E: Tensor | None,
        routing: tuple[Tensor, Tensor] | None = None,
        first: Stage = Stage.ROUTE,
        *,
        skip: bool = False,
        routed: Callable[[], None] | None = None,
        shared_weights_T: Tensor | None = None,
    ) -> Tensor:
        """See `LayerCall`. The lock of the group is held from the first stage to the last."""
        assert not skip, "peers would not skip them"
        comm, lock = self._comm, self._lock
        try:
            if not lock.acquire(blocking=False):
                raise comm.another_thread("dispatch")
            try:
                if self._status.failure is not None:
                    comm.check("dispatch")
                y_TH = torch.empty_like(x_TH)
                buffer = self._pool.take(comm)
                layer = self._layers.get(buffer) or self._first_call(buffer)
                stop = Stage.DONE if routed is None else Stage.DISPATCH
                status = layer.begin(x_TH, load_E, routing, y_TH, buffer.epoch, first, stop, shared_weights_T)
                if status != Status.OK or layer.stage != Stage.DONE:
                    self._continue(buffer, layer, status, routed)
                buffer.busy = False
            finally:
                lock.release()
        except BaseException as error:
            comm.fail(error)
            raise
        return y_TH

    def _continue(
        self, buffer: OneSidedBufferSlot, layer: ExchangeLayer, status: int, routed: Callable[[], None] | None
    ) -> None:
        """Do what the call has returned for, and resume it, until it is done."""
        while True:
            stage = layer.stage
            if status == Status.LATE and stage == Stage.AWAIT_ROWS:
                layer.exchange.received_from(buffer.await_rows())
                stage = Stage.RECEIVE
            elif status == Status.LATE:
                layer.calls.sums_begin_at(buffer.await_sums())
                stage = Stage.ADD_SUMS
            elif status != Status.OK:
                layer.check(status, stage)
            elif stage == Stage.DONE:
                return
            elif stage == Stage.DISPATCH and routed is not None:
                routed()
                routed = None
            elif stage == Stage.DISPATCH:
                buffer.make_room(layer.counts)
            elif stage == Stage.RECEIVE:
                _make_room(buffer, layer)
            status = layer.resume(stage)

    def _first_call(self, buffer: OneSidedBufferSlot) -> ExchangeLayer:
        context, form, exchange = self._context, self._form, buffer.exchange
        assert exchange is not None
        dtype, hidden = context.dtype.dtype, context.hidden_size
        calls = ExchangeCalls(exchange, form.form, form.tables, context.num_slots, hidden, dtype)
        calls.expect(dtype, hidden, rounding=form.form.scale_bytes > 0)
        heap, me = buffer.heap, buffer.rank
        made = self._layers[buffer] = ExchangeLayer(
            calls, self._parts, self._meter.words, window=(heap.address(me), heap.address(me, buffer.sums_at)),
            seam_row=buffer.seam_row, left=buffer.left, microseconds=buffer.patience_us,
        )  # fmt: skip
        return made


def _make_room(buffer: OneSidedBufferSlot, layer: ExchangeLayer) -> None:
    """Reserve pages for received rows and their sums, and memory for what comes with them."""
    first, end = layer.window_rows()
    if buffer.size > 2:  # ranks other than the two adjacent to the seam
        buffer.take_pages_around_seam(first, end)
    if end - first > buffer.sums_with_pages:
        buffer.take_pages_of_sums(end - first)
    layer.make_room(end - first, buffer.sums_with_pages, (first, end))
