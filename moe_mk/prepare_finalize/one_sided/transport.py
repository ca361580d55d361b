"""One-sided dispatch and combine: ranks of one host write tokens into each other's memory and read sums from there.

The default between CPU processes of one host: no sockets, no intermediate copy, no exchange of counts.

    dispatch  put rows [values | scales | ids | weights] where the peer reads them, then one flag with their count
    combine   each rank has its sums in its own window, then one flag; the source rank adds them in rank order, in f32

Native kernels write the windows where they are compiled, else torch does: one pass over a token gathers it, rounds it
(FP8) and writes it to each of its ranks. Received rows are read in the window until their call is finalized. Experts
may write their sums where peers read them (`RowTokens.out_RH`); other sums are copied there. Results equal those of
`all_to_all` bit for bit.

`FusedOneSided` is a layer over the same windows as one native call: routing, dispatch, experts and combine. The
protocol is that of `OneSided`, so some ranks of a group may make this call while others run the separate steps.
The native call waits for peers for at most `PATIENCE_US`; after that, and where pages of a window are missing, it
returns, and is resumed when `OneSidedBufferSlot` has waited or reserved them. Errors are those of the separate steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_mk.comm.communicator import offsets
from moe_mk.comm.symmetric.flags import WORD_BYTES
from moe_mk.comm.symmetric.setup import reasons_against_heap
from moe_mk.comm.traffic import RowMeter
from moe_mk.config.problem import Problem
from moe_mk.errors import CommError, UnsupportedError
from moe_mk.flight import Flight, InFlight
from moe_mk.kernels.native.exchange import ExchangeCalls, ready
from moe_mk.kernels.native.layer import LayerCall, NativeParts, PreparedExchangeCall, Stage
from moe_mk.kernels.native.library import Status
from moe_mk.prepare_finalize.base import (
    PREPARE_FINALIZE,
    LayerParts,
    PrepareFinalize,
    TransportContext,
    TransportTraits,
)
from moe_mk.prepare_finalize.one_sided.buffers import OneSidedBufferPool, OneSidedBufferSlot, RegionShape
from moe_mk.prepare_finalize.packing import ID_BYTES, packed_row_bytes
from moe_mk.prepare_finalize.rows.formats import (
    FUSED_TOKENS,
    Encode,
    KernelRowFormat,
    RowBytes,
    by_rank,
    exchanged_parts,
)
from moe_mk.prepare_finalize.rows.sums import Part, add_up
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.quant.wire import WireTypes, as_bytes, from_bytes, row_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens

DISPATCH, COMBINE = InFlight("dispatch"), InFlight("combine")
Sent = tuple[Tensor, ...] | None
"""The tokens sent to each rank, ascending; None: kernels keep them in their buffer."""
Arrived = tuple[QuantTensor, Tensor, Tensor, Tensor]
"""Rows, ids (R, K) int32, weights (R, K) f32, and where the sums of the rows go."""


class DispatchHandle(NamedTuple):
    """How the sums of one dispatch find back."""

    buffer: OneSidedBufferSlot
    epoch: int
    sent: Sent
    """The tokens sent to each rank, ascending."""
    sent_W: list[int]
    received_W: list[int]
    num_tokens: int
    sums_RH: Tensor
    """This rank's sums as peers read them."""


class PutRows:
    """Gathered and put with torch operations; for every heap.

    `KernelRows` does the same with native kernels that write there directly, in the same layout bit for bit, so ranks
    of one group may differ. The steps of a call in either:

        send      write values [Q] and tails [scales | ids | weights] of each token to each of its ranks, then a flag
        arrived   wait for the flags of all peers
        receive   the rows of all sources one after the other, in the own window
        add_up    wait for the sums of all peers, then add those of each rank to their tokens, in rank order from zero
                  in f32, rounded once
    """

    def __init__(self, context: TransportContext, size: RowBytes) -> None:
        self._context, self._size, self._types = context, size, WireTypes.of(context.wire)

    def send(
        self, buffer: OneSidedBufferSlot, x_TH: Tensor, routing: Routing, encode: Encode
    ) -> tuple[Sent, list[int]]:
        """Put values and tails at every peer, and the own rows where they are read. Returns counts by rank, too."""
        wire = self._context.wire
        as_it_is = isinstance(wire, Plain) and x_TH.dtype == wire.dtype
        x = QuantTensor(x_TH, None, wire) if as_it_is else encode(x_TH)
        values_TB = as_bytes(x.values)
        token_X, tails_XB, counts = by_rank(self._context, x.scales if self._size.scales else None, routing)
        token_of_W, tail_of_W = torch.split(token_X, counts), torch.split(tails_XB, counts)
        for rank, token_X in enumerate(token_of_W):
            at = buffer.out_at(rank, len(token_X))
            everything = len(token_X) == len(values_TB)  # token_X ascends, each token once
            if rank == buffer.rank:
                torch.index_select(values_TB, 0, token_X, out=buffer.own_values(at, len(token_X)))
                buffer.heap.reserve(rank, buffer.tails_at[rank], tail_of_W[rank].numel())
                buffer.own_tails(rank, len(token_X)).copy_(tail_of_W[rank])
                continue
            buffer.heap.put(rank, at, values_TB, None if everything else token_X)
            buffer.heap.put(rank, buffer.tails_at[buffer.rank], tail_of_W[rank])
            buffer.show_rows(rank, len(token_X))
        return token_of_W, counts

    def arrived(self, buffer: OneSidedBufferSlot, sent_W: list[int]) -> list[int]:
        counts = buffer.await_rows() | {buffer.rank: sent_W[buffer.rank]}
        return [counts[rank] for rank in range(buffer.size)]

    def receive(self, buffer: OneSidedBufferSlot, received_W: list[int]) -> Arrived:
        """Copy rows of the separate regions to their place; values are those of the window."""
        total = sum(received_W)
        values_RB = buffer.own_values(buffer.region.rows_at(buffer.size, buffer.rank, received_W), total)
        for source, rows_XB in enumerate(torch.split(values_RB, received_W)):
            at = buffer.region.values_at(buffer.size, buffer.rank, source, received_W[source])
            there_XB = buffer.own_values(at, received_W[source])
            if there_XB.data_ptr() != rows_XB.data_ptr():
                rows_XB.copy_(there_XB)
        tails_RB = torch.cat([buffer.own_tails(source, count) for source, count in enumerate(received_W)])
        ids_at, weights_at = self._size.scales, self._size.scales + self._size.top_k * ID_BYTES
        ids_RK = from_bytes(tails_RB[:, ids_at:weights_at], torch.int32)  # of a copy: peers cannot change it any more
        buffer.check_slots(ids_RK, received_W, self._context.num_slots)
        weights_RK = from_bytes(tails_RB[:, weights_at:], torch.float32)
        scales = self._types.scales
        scales_RX = None if scales is None else from_bytes(tails_RB[:, :ids_at], scales)
        x_RH = QuantTensor(values_RB.view(self._types.values), scales_RX, self._context.wire)
        buffer.take_pages_of_sums(total)
        return x_RH, ids_RK, weights_RK, buffer.sums_RB[:total].view(self._context.dtype.dtype)

    def show(self, handle: DispatchHandle) -> None:
        """Signal every peer that the sums of its rows are written."""
        first_of_W = offsets(handle.received_W)
        for peer in handle.buffer.peers:
            handle.buffer.show_sums(peer, first_of_W[peer])

    def add_up(self, handle: DispatchHandle, y_RH: Tensor, own: slice) -> Tensor:
        """Read the sums of every rank where they lie, the own ones among y_RH."""
        buffer, sent = handle.buffer, handle.sent
        assert sent is not None
        firsts = buffer.await_sums()
        own_XH = y_RH[own].to(self._context.dtype.dtype).contiguous()
        sums = [
            buffer.sums_of(rank, firsts[rank], len(token_X)).view(own_XH.dtype) if rank in firsts else own_XH
            for rank, token_X in enumerate(sent)
        ]
        parts = [Part(*each) for each in zip(sums, sent, strict=True)]
        y_TH = torch.empty((handle.num_tokens, own_XH.shape[1]), dtype=own_XH.dtype, device=own_XH.device)
        return add_up([parts], y_TH, ready())


@PREPARE_FINALIZE.register("one_sided")
class OneSided(PrepareFinalize):
    """Puts and flags in shared memory, one copy of a token per destination rank."""

    name: ClassVar[str] = "one_sided"
    pool: ClassVar[type[OneSidedBufferPool]] = OneSidedBufferPool
    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="writes into the memory of peers, one copy of a token per rank; between processes of one host",
        kinds=frozenset({"cpu"}),
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=TransportTraits.ANY_WIRE,
        min_ranks=2,
        one_node=True,
        open_calls=OneSidedBufferPool.MAX_OPEN_CALLS,
        graph_safe=False,
        deterministic=True,
    )

    def __init__(self, context: TransportContext) -> None:
        """Check that the group can share memory; windows are opened by the first call, and shared with other layers."""
        super().__init__(context)
        comm, reasons = context.comm, self._reasons_against_group(context)
        if context.device.type != "cpu":
            reasons.append(f"runs on cpu, this device is {context.device.type}")
        if reasons:
            raise UnsupportedError(f"transport '{self.name}' cannot serve this group", reasons)
        self._size = RowBytes.of(context)
        sums = row_bytes(context.dtype, context.hidden_size)
        self._region = self._shape((context.max_num_tokens, self._size.values, self._size.tail, sums))
        self._pool = self.pool.of(comm, self._region)
        self._put, self._kernels = PutRows(context, self._size), KernelRows(context, self._size)
        self._flag_bytes = [0 if peer == comm.rank else WORD_BYTES for peer in range(comm.size)]

    def _reasons_against_group(self, context: TransportContext) -> list[str]:
        return reasons_against_heap(context.comm)

    def _shape(self, parts: tuple[int, int, int, int]) -> RegionShape:
        """Return the shape that layers must have in common to share windows. parts: the fields of `RegionShape`."""
        return RegionShape(*parts)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Write each token to the ranks of its experts, with the ids that are local there."""
        c, num_tokens = self.context, x_TH.shape[0]
        self.expect_room(x_TH)
        epoch = c.comm.status.epoch
        with c.spans.span("dispatch"), c.comm.abort_on_error():
            with c.comm.exclusive("dispatch"):
                c.comm.check("dispatch")
                buffer = self._pool.take(c.comm)
                way = self._put if buffer.exchange is None else self._kernels
                sent, sent_W = way.send(buffer, x_TH, routing, self.encode)
                self._note("dispatch", "dispatch flags", sent_W, self._region.value_bytes + self._region.tail_bytes)
            yield DISPATCH
            c.comm.check_epoch(epoch, "dispatch")
            with c.comm.exclusive("dispatch"):
                received_W = way.arrived(buffer, sent_W)
                x_RH, ids_RK, weights_RK, sums_RH = way.receive(buffer, received_W)
            handle = DispatchHandle(buffer, buffer.epoch, sent, sent_W, received_W, num_tokens, sums_RH)
            return RowTokens(x_RH, ids_RK, weights_RK, self._num_slots, handle, sums_RH)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Signal the sums to the peers, and add up theirs for each token."""
        handle, c, y_RH = tokens.handle, self.context, output.y
        assert isinstance(handle, DispatchHandle)
        buffer, received_W = handle.buffer, handle.received_W
        if buffer.epoch != handle.epoch or not buffer.busy:
            raise CommError(f"epoch {handle.epoch} was finalized before", rank=c.comm.rank, phase="combine")
        epoch = c.comm.status.epoch
        with c.spans.span("combine"), c.comm.abort_on_error():
            with c.comm.exclusive("combine"):
                way = self._put if buffer.exchange is None else self._kernels
                first = sum(received_W[: buffer.rank])
                own = slice(first, first + received_W[buffer.rank])
                there = handle.sums_RH
                place = there.data_ptr(), there.shape, there.stride()
                if y_RH is not there and (y_RH.data_ptr(), y_RH.shape, y_RH.stride()) != place:
                    for rows in (slice(0, own.start), slice(own.stop, None)):
                        there[rows] = y_RH[rows]
                way.show(handle)
                self._note("combine", "combine flags", received_W, self._region.sum_bytes)
            yield COMBINE
            c.comm.check_epoch(epoch, "combine")
            with c.comm.exclusive("combine"):
                y_TH = way.add_up(handle, y_RH, own)
                buffer.busy = False
            return y_TH

    def fuse_layer(self, parts: LayerParts) -> LayerCall | None:
        """For rows that experts read as they arrive, over shared memory."""
        form = self._kernels.format
        native = exchanged_parts(self.context, form, parts)
        return None if native is None else FusedOneSided(self.context, self._pool, form, native)

    @cached_property
    def _num_slots(self) -> int:
        return self.context.num_slots

    def _note(self, phase: str, flags: str, rows_of_W: list[int], row_bytes: int) -> None:
        """Count what went to others: rows in whole, and a flag a peer. What stays here goes nowhere."""
        comm = self.context.comm
        rows = list(map(row_bytes.__mul__, rows_of_W))
        rows[comm.rank] = 0
        comm.traffic.sent(phase, rows, comm.rank)
        comm.traffic.sent(flags, self._flag_bytes, comm.rank)

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """One window of this rank; its pages are taken as calls need them."""
        hidden = problem.config.model.hidden_size
        row = packed_row_bytes(problem.dtype, hidden, problem.config.router.top_k)
        return RegionShape(problem.num_tokens, row, 0, row_bytes(problem.sums, hidden)).data_bytes(problem.ranks)


class _SlotCalls(NamedTuple):
    """State that is common to the calls of one layer over one buffer."""

    calls: ExchangeCalls
    values_RX: Tensor
    """All rows that the own window has room for, as they are received."""
    sums_RH: Tensor


class KernelRows:
    """Rows written into windows by native kernels, which round FP8 rows on the way; their buffer holds what was sent.

    The same results as of `PutRows`, bit for bit. What does not change between calls is made at the first call over a
    buffer.
    """

    def __init__(self, context: TransportContext, size: RowBytes) -> None:
        self.format, self._dtype = KernelRowFormat(context, size), context.dtype.dtype
        self._hidden, self._slots = context.hidden_size, context.num_slots
        self._calls_of_slot: WeakKeyDictionary[OneSidedBufferSlot, _SlotCalls] = WeakKeyDictionary()

    def send(
        self, buffer: OneSidedBufferSlot, x_TH: Tensor, routing: Routing, encode: Encode
    ) -> tuple[Sent, list[int]]:
        """Write all rows in one call, the own ones where they are read, then a flag a peer."""
        prepared = self._calls_of_slot.get(buffer) or self._first_call(buffer)
        x, dense, rounding = self.format.arguments(x_TH, routing, encode)
        while (counts := prepared.calls.dispatch(x, dense, buffer.epoch, rounding=rounding)) is None:
            assert buffer.exchange is not None
            buffer.make_room(buffer.exchange.counts[:])
        return None, counts

    def arrived(self, buffer: OneSidedBufferSlot, sent_W: list[int]) -> list[int]:
        del sent_W  # the exchange has it
        exchange = buffer.exchange
        assert exchange is not None
        received_W = exchange.arrived(buffer.epoch, buffer.patience_us)
        return exchange.received_from(buffer.await_rows()) if received_W is None else received_W

    def receive(self, buffer: OneSidedBufferSlot, received_W: list[int]) -> Arrived:
        """Take tails apart; values are those of the window, copied to their place where they lie apart."""
        prepared, total = self._calls_of_slot[buffer], sum(received_W)
        first = buffer.seam_row - sum(received_W[: buffer.left + 1])
        if buffer.size > 2:  # ranks other than the two adjacent to the seam
            buffer.take_pages_around_seam(first, first + total)
        values_to = prepared.values_RX.data_ptr() + first * self.format.size.values
        scales_RX, ids_RK, weights_RK = prepared.calls.receive(total, values_to)
        if total > buffer.sums_with_pages:
            buffer.take_pages_of_sums(total)
        x_RH = QuantTensor(prepared.values_RX[first : first + total], scales_RX, self.format.wire)
        return x_RH, ids_RK, weights_RK, prepared.sums_RH[:total]

    def show(self, handle: DispatchHandle) -> None:
        assert handle.buffer.exchange is not None
        handle.buffer.exchange.show(handle.epoch)

    def add_up(self, handle: DispatchHandle, y_RH: Tensor, own: slice) -> Tensor:
        """Add the sums of every rank where they lie, the own ones among y_RH."""
        buffer, prepared = handle.buffer, self._calls_of_slot[handle.buffer]
        if y_RH is handle.sums_RH:
            own_at = prepared.sums_RH.data_ptr() + own.start * buffer.region.sum_bytes
        else:
            own_XH = y_RH[own].to(self._dtype).contiguous()
            own_at = own_XH.data_ptr()
        return prepared.calls.collect(own_at, handle.epoch, buffer.patience_us, buffer.await_sums)

    def _first_call(self, buffer: OneSidedBufferSlot) -> _SlotCalls:
        assert buffer.exchange is not None
        form, tables = self.format.form, self.format.tables
        calls = ExchangeCalls(buffer.exchange, form, tables, self._slots, self._hidden, self._dtype)
        with torch.inference_mode(False):  # else no experts could write sums there outside of that mode
            values_RX, sums_RH = buffer.values_RB.view(self.format.types.values), buffer.sums_RB.view(self._dtype)
        made = self._calls_of_slot[buffer] = _SlotCalls(calls, values_RX, sums_RH)
        return made


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
        self._layers: WeakKeyDictionary[OneSidedBufferSlot, PreparedExchangeCall] = WeakKeyDictionary()
        self._most = min(FUSED_TOKENS, context.max_num_tokens)

    def is_ready(self, num_tokens: int) -> bool:
        """Whether the call is small, and buffers of the group are open and can be used by kernels that wait."""
        slots = self._pool.slots
        return num_tokens <= self._most and bool(slots) and all(map(_IS_FUSABLE, slots))

    def __call__(
        self, x_TH: Tensor, load_E: Tensor | None, routing: tuple[Tensor, Tensor] | None = None,
        first: Stage = Stage.ROUTE, *, skip: bool = False, routed: Callable[[], None] | None = None,
        shared_weights_T: Tensor | None = None, captured: int | None = None,
    ) -> Tensor:  # fmt: skip
        """See `LayerCall`. The lock of the group is held from the first stage to the last."""
        assert not skip, "peers would not skip them"
        comm, lock, taken = self._comm, self._lock, list[bool]()
        try:
            try:
                taken.extend(map(lock.acquire, (False,)))  # as in `Exclusive`
                if True not in taken:
                    raise comm.another_thread("dispatch")
                if self._status.failure is not None:
                    comm.check("dispatch")
                y_TH = torch.empty_like(x_TH)
                buffer = self._pool.take(comm)
                layer = self._layers.get(buffer) or self._first_call(buffer)
                stop = Stage.DONE if routed is None else Stage.DISPATCH
                status = layer.begin(x_TH, load_E, routing, y_TH, buffer.epoch, first, stop, shared_weights_T, captured)
                if status != Status.OK or layer.stage != Stage.DONE:
                    self._continue(buffer, layer, status, routed)
                buffer.busy = False
            finally:
                if True in taken:
                    lock.release()
        except BaseException as error:
            comm.fail(error)
            raise
        return y_TH

    def _continue(
        self, buffer: OneSidedBufferSlot, layer: PreparedExchangeCall, status: int, routed: Callable[[], None] | None
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
                first, end = layer.window_rows()
                if buffer.size > 2:  # ranks other than the two adjacent to the seam
                    buffer.take_pages_around_seam(first, end)
                if end - first > buffer.sums_with_pages:
                    buffer.take_pages_of_sums(end - first)
                layer.make_room(end - first, buffer.sums_with_pages, (first, end))
            status = layer.resume(stage)

    def _first_call(self, buffer: OneSidedBufferSlot) -> PreparedExchangeCall:
        context, form, exchange = self._context, self._form, buffer.exchange
        assert exchange is not None
        dtype, hidden = context.dtype.dtype, context.hidden_size
        calls = ExchangeCalls(exchange, form.form, form.tables, context.num_slots, hidden, dtype)
        calls.expect(dtype, hidden, rounding=form.form.scale_bytes > 0)
        heap, me = buffer.heap, buffer.rank
        made = self._layers[buffer] = PreparedExchangeCall(
            calls, self._parts, self._meter.words, window=(heap.address(me), heap.address(me, buffer.sums_at)),
            seam_row=buffer.seam_row, left=buffer.left, microseconds=buffer.patience_us,
        )  # fmt: skip
        return made
