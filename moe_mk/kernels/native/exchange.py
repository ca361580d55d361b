"""Dispatch and combine through shared memory windows: writes rows to peers, reads rows, and sums rows in rank order.

Windows are addresses; the caller guarantees that they are mapped and large enough. Results are bit-identical for any
number of threads and instruction set, and equal to the reference: FP8 as `reference/quantize_rows`, sums from zero in
rank order in f32, rounded once.

    dispatch  sorts tokens by destination rank, writes values (unchanged, or quantised to FP8) and tails
              [scales | slots | weights], and sets one flag per peer
    arrived   polls flags until they have reached an epoch, for a limited time
    receive   splits tails, and copies rows stored apart into order
    show      sends peers the positions of their sums
    collect   polls flags like `arrived`, then adds the rows of all ranks to their tokens

`Exchange` is a set of windows; `ExchangeCalls` are the calls of one layer, whose structures are filled in once: for
small batches the Python code around a kernel dominates its time. `add_rows` applies the same sum to tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch

from moe_mk.errors import CommError, ShapeError
from moe_mk.kernels.native.exchange_abi import CAddUp, CFault, CReceive, CSend, CWindows
from moe_mk.kernels.native.experts_mode import Rounding
from moe_mk.kernels.native.layout import SCALE_BLOCK
from moe_mk.kernels.native.library import Isa, Native, Status
from moe_mk.kernels.native.selfcheck import is_compiled, loaded

ROW_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The dtypes of rows that can be quantised or summed."""
BYTES_FOR_THREADS = 1 << 20
"""Calls that move fewer bytes use one thread: waking a second one takes longer."""
EPOCHS = 1 << 32
UNASSIGNED_RANK = -1
"""The rank of a call without windows: no part of the sums is its own."""
FormOfRows = tuple[torch.dtype, int, int, bool, bool]
"""dtype, columns, column stride in elements, whether rows are quantised by the kernel, whether without scales."""
Apart = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]
"""Scales (R, X) or None, ids (R, K) int32, weights (R, K) f32."""


class FaultKind(IntEnum):
    """`FaultKind` of csrc/exchange.h: the word of a peer that is out of range."""

    TOO_MANY_ROWS = 1
    """The count of a dispatch flag."""
    SUMS_BEYOND = 2
    """The offset of a combine flag."""
    NO_SUCH_SLOT = 3
    """A slot in the tail of a received row."""
    OTHER_LAYER = 4
    """The layer number of a flag."""
    PEER_FAILED = 5
    """A flag that reports a failure; the cause is in a separate note."""


_FAULTS = {
    FaultKind.TOO_MANY_ROWS: ("dispatch", "sent {value} rows into a region of {limit}"),
    FaultKind.SUMS_BEYOND: (
        "combine", "its sums for this rank begin at row {value}, at most {limit} rows of other ranks precede them"
    ),
    FaultKind.NO_SUCH_SLOT: (
        "dispatch", "row {row} is for slot {value}, out of range (0 <= slot < {limit}, or -1 for no expert here)"
    ),
    FaultKind.OTHER_LAYER: (
        "", "is in a call of layer number {value}, this rank in one of {limit} (modulo 255); all ranks must make the "
        "same calls, from one thread"
    ),
    FaultKind.PEER_FAILED: ("", "its call failed"),
}  # fmt: skip


@dataclass(frozen=True)
class PeerFault:
    """A word of a peer that is out of range as a size, an offset or an index: `MoeMkFault`."""

    kind: FaultKind
    peer: int
    value: int
    limit: int
    row: int = 0

    def error(self, rank: int, epoch: int, layer: str, phase: str = "") -> CommError:
        """The error with peer, phase, value and limit; the same for native kernels and torch.

        phase: used for faults that can occur in any phase.
        """
        of_fault, text = _FAULTS[self.kind]
        phase = of_fault or phase
        filled = text.format(value=self.value, limit=self.limit, row=self.row)
        return CommError(f"epoch {epoch}: {filled}", rank=rank, phase=phase, layer=layer, peer=self.peer)


@dataclass(frozen=True)
class RowFormat:
    """The layout of a row at its destination: values, and separately a tail [scales | K ids | K weights]."""

    value_bytes: int
    scale_bytes: int
    top_k: int
    rounding: Rounding = Rounding.NONE
    """The quantisation available for rows of ROW_TYPES: to FP8, or none."""
    scale_dtype: torch.dtype = torch.uint8


@dataclass(frozen=True)
class WindowPlaces:
    """Addresses of the windows of all ranks as mapped by `rank`: `MoeMkWindows` of csrc/exchange.h. 0: none."""

    rank: int
    values_to: Sequence[int]
    back_to: Sequence[int]
    tails_to: Sequence[int]
    flags_to: Sequence[int]
    values_from: Sequence[int]
    back_from: Sequence[int]
    tails_from: Sequence[int]
    flags_from: Sequence[int]
    sums: Sequence[int]
    most_rows: int
    """The most rows a rank may send to another in one call; words of peers are checked against it."""
    failed_from: Sequence[int] = ()
    """Flags in which peers report a failure; empty: in `flags_from` alone."""


def ready() -> Native | None:
    """The kernels if they are in the wheel or compiled already, else None: an exchange never compiles.

    The library is read and checked by the first call that finds it, and by no later one: calls of layers ask for it.
    """
    try:
        return _found()
    except LookupError:
        return None


@cache
def _found() -> Native:
    """Raises LookupError, which is not cached, as long as nothing is compiled."""
    if not is_compiled():
        raise LookupError("the kernels are not compiled")
    return loaded()


class Exchange:
    """The windows of one rank, used by one call at a time from dispatch to combine.

    The structures of the kernels are created once and updated in place.
    """

    def __init__(self, native: Native, places: WindowPlaces, *, isa: Isa | None = None) -> None:
        self.native, self.rank, ranks = native, places.rank, len(places.values_to)
        self.isa, numbers = int(native.isa_or_best(isa)), c_int64 * ranks
        self.room, self.counts, self.received = numbers(), numbers(), numbers()
        """Rows by rank. room: those the mapped pages hold, set by the owner. counts: sent by the last dispatch.
        received: reported by the last flags."""
        self._values_to, self._tails_to = _addresses(places.values_to), _addresses(places.tails_to)
        self._values_from, self._tails_from = _addresses(places.values_from), _addresses(places.tails_from)
        self._sums = _addresses(places.sums)
        self._held: list[Array[c_void_p] | Array[c_int64]] = [
            self._values_to, numbers(*places.back_to), self._tails_to, self.room, _addresses(places.flags_to),
            self._values_from, numbers(*places.back_from), self._tails_from, _addresses(places.flags_from), self._sums,
        ]  # fmt: skip
        self._fault, self.layer, self.epoch = CFault(), "", 0
        """The current layer and epoch, for error messages."""
        self.failure_of: Callable[[int, str], CommError] | None = None
        """Returns the error reported by a failed peer in a phase; None: a generic error is raised."""
        addresses = (addressof(each) for each in (*self._held, self._fault))
        self._failed_from = _addresses(places.failed_from)
        failed_at = addressof(self._failed_from) if places.failed_from else None
        self.block = CWindows(*addresses, places.most_rows, places.rank, ranks, 0, failed_at)
        self.windows = byref(self.block)
        self._token_of, self._tokens = torch.empty(0, dtype=torch.int32, device="cpu"), 0
        self._sent_tokens = 0
        self._received_at, self._functions = addressof(self.received), native.functions

    def token_of(self, tokens: int) -> int:
        """The address of an int32 [W][T] buffer for the tokens of each rank."""
        self._sent_tokens = tokens
        if tokens > self._tokens:
            self._token_of = torch.empty(tokens * len(self.counts), dtype=torch.int32, device="cpu")
            self._tokens = tokens
        return self._token_of.data_ptr()

    def write_to(self, values: list[int], tails: list[int], *, room: int) -> None:
        """Change the addresses that the next dispatch writes to, by rank, with room for so many rows at each."""
        self._values_to[:], self._tails_to[:] = values, tails  # type: ignore[assignment]
        self.room[:] = [room] * len(values)

    def read_from(self, values: list[int], tails: list[int], counts: list[int]) -> None:
        """Change the addresses that rows are received from, by rank, and their numbers, checked by the caller."""
        self._values_from[:], self._tails_from[:] = values, tails  # type: ignore[assignment]
        self.received[:] = counts  # type: ignore[assignment]

    def sum_from(self, sums: list[int]) -> None:
        """Change the addresses of the sums of other ranks."""
        self._sums[:] = sums  # type: ignore[assignment]

    def tokens_sent(self) -> torch.Tensor:
        """int64. The tokens of the last dispatch for rank 0, then those for rank 1, ...: a copy."""
        counts = self.counts[:]
        width = self._sent_tokens
        return torch.cat([self._token_of[rank * width : rank * width + n] for rank, n in enumerate(counts)]).long()

    def arrived(self, epoch: int, microseconds: int) -> list[int] | None:
        """Rows received from each rank after all dispatch flags have arrived, those of this rank included.

        None: not all flags have arrived in time. Raises CommError for a count beyond the window.
        """
        self.received[self.rank], self.epoch = self.counts[self.rank], epoch
        come = self.call("exchange_await", 0, epoch % EPOCHS, microseconds, self._received_at)
        return self.received[:] if come else None

    def received_from(self, counts: Mapping[int, int]) -> list[int]:
        """Rows received from each rank, given the checked counts of all peers after a wait by other means."""
        for peer, count in counts.items():
            self.received[peer] = count
        return self.received[:]

    def call(self, name: str, *arguments: object) -> bool:
        """Call a kernel on these windows; False: peers are late. Raises CommError for a word of a peer out of range."""
        status = self._functions[name](self.windows, *arguments)
        if status == Status.OK:
            return True
        if status == Status.LATE:
            return False
        self.check(name, status, "combine" if name == "exchange_collect" else "dispatch")
        return False

    def check(self, name: str, status: int, phase: str) -> None:
        """Raise the error of a status that is neither OK nor LATE. phase: where the call was."""
        if status == Status.PEER_FAULT:
            found = self._fault
            fault = PeerFault(FaultKind(found.kind), found.peer, found.value, found.limit, found.row)
            if fault.kind is FaultKind.PEER_FAILED and self.failure_of is not None:
                raise self.failure_of(fault.peer, phase)
            raise fault.error(self.rank, self.epoch, self.layer, phase)
        self.native.check(name, status)

    def show(self, epoch: int) -> None:
        """Send each rank the index of its first sum here; sums are in the order of received rows."""
        self._functions["exchange_show"](self.windows, epoch % EPOCHS, self._received_at)


def _addresses(addresses: Sequence[int]) -> Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)


class ExchangeCalls:
    """The calls of one layer over one exchange.

    tables: rank_of_P and slot_of_P (int32). slots: number of slots of this rank. dtype: of the sums.
    """

    def __init__(
        self,
        exchange: Exchange,
        form: RowFormat,
        tables: tuple[torch.Tensor, torch.Tensor],
        slots: int,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self.exchange, self._form, self._tables, self._call = exchange, form, tables, exchange.call
        sizes = {"value_bytes": form.value_bytes, "scale_bytes": form.scale_bytes, "top_k": form.top_k}
        rank_of_P, slot_of_P = tables
        counts, isa = addressof(exchange.counts), exchange.isa
        self._send = CSend(
            rank_of=rank_of_P.data_ptr(), slot_of=slot_of_P.data_ptr(), num_experts=len(rank_of_P), counts=counts,
            isa=isa, **sizes,
        )  # fmt: skip
        self._receive = CReceive(counts=addressof(exchange.received), num_slots=slots, **sizes)
        self._firsts = (c_int64 * len(exchange.counts))()
        self._add_up = CAddUp(
            counts=counts, firsts=addressof(self._firsts), columns=hidden, row_type=ROW_TYPES[dtype], isa=isa
        )
        self._send_at, self._receive_at, self._add_up_at = byref(self._send), byref(self._receive), byref(self._add_up)
        self._hidden, self._dtype, self._row_bytes = hidden, dtype, hidden * dtype.itemsize
        self._scale_columns = form.scale_bytes // form.scale_dtype.itemsize
        self._checked: FormOfRows | None = None
        self._element = 0

    def dispatch(
        self,
        x: tuple[torch.Tensor, torch.Tensor | None],
        routing: tuple[torch.Tensor, torch.Tensor],
        epoch: int,
        *,
        rounding: bool = False,
    ) -> list[int] | None:
        """Write every row to its destination ranks, then set one flag per peer. Returns rows by rank.

        None: some rank would get more rows than its window holds. Nothing is written then, and the exchange's `counts`
        are the required numbers.

        x: values (T, X) with their scales, rows of any stride; or, with `rounding`, rows of ROW_TYPES that are
        quantised here. routing: ids (int32; below zero: dropped) and weights (f32), (T, K), contiguous. Raises
        ShapeError for other rows, and for ids out of range.
        """
        (values_TX, scales_TX), (ids_TK, weights_TK), call = x, routing, self._send
        (tokens, columns), (stride, step) = values_TX.shape, values_TX.stride()
        form_of_x = (values_TX.dtype, columns, step, rounding, scales_TX is None)
        if scales_TX is not None or form_of_x != self._checked:
            self._check(values_TX, scales_TX, form_of_x)
        call.x, call.x_stride, call.num_tokens = values_TX.data_ptr(), stride * self._element, tokens
        call.scales = None if scales_TX is None else scales_TX.data_ptr()
        call.ids, call.weights = ids_TK.data_ptr(), weights_TK.data_ptr()
        call.token_of, call.epoch = self.exchange.token_of(tokens), epoch % EPOCHS
        moved = tokens * self._form.value_bytes
        call.threads = 1 if moved < BYTES_FOR_THREADS else self.exchange.native.threads(torch.get_num_threads())
        self._call("exchange_dispatch", self._send_at)
        return self.exchange.counts[:] if call.sent else None

    def receive(self, total: int, values_to: int) -> Apart:
        """Split the tails of all received rows, in rank order.

        values_to: the address of the values, contiguous; values stored apart are copied there. Raises CommError for a
        slot out of range.
        """
        form, call, scales_RX = self._form, self._receive, None
        ids_RK = torch.empty((total, form.top_k), dtype=torch.int32, device="cpu")
        weights_RK = torch.empty((total, form.top_k), dtype=torch.float32, device="cpu")
        if self._scale_columns:
            scales_RX = torch.empty((total, self._scale_columns), dtype=form.scale_dtype, device="cpu")
            call.scales = scales_RX.data_ptr()
        call.values, call.ids, call.weights = values_to, ids_RK.data_ptr(), weights_RK.data_ptr()
        self._call("exchange_receive", self._receive_at)
        return scales_RX, ids_RK, weights_RK

    @property
    def blocks(self) -> tuple[CSend, CReceive, CAddUp]:
        """The structures, for a call that contains all stages. The calls of this object overwrite them."""
        return self._send, self._receive, self._add_up

    def sums_begin_at(self, firsts: Mapping[int, int]) -> None:
        """Set the checked index of the first sum for this rank at each peer."""
        for peer, first in firsts.items():
            self._firsts[peer] = first

    def expect(self, dtype: torch.dtype, columns: int, *, rounding: bool) -> None:
        """Write the format of the rows of all calls into the structures. Raises ShapeError if it is another."""
        self._check(torch.empty((0, columns), dtype=dtype, device="cpu"), None, (dtype, columns, 1, rounding, True))
        self._send.x_stride = columns * dtype.itemsize

    def add_up(self, own: int) -> torch.Tensor:
        """`collect` without flags: the sums of every rank have arrived."""
        return self.collect(own, 0, 0, dict)

    def collect(self, own: int, epoch: int, microseconds: int, wait: Callable[[], Mapping[int, int]]) -> torch.Tensor:
        """Add the sums of all ranks to the tokens of the last dispatch: (T, H); zero for tokens without sums.

        own: the address of the first sum of this rank for itself. If peers are not ready within the given microseconds,
        `wait` is called; it returns for each late peer the checked index of its first sum for this rank. Raises
        CommError for an index out of range.
        """
        tokens, call, exchange = self._send.num_tokens, self._add_up, self.exchange
        y_TH = torch.empty((tokens, self._hidden), dtype=self._dtype, device="cpu")
        call.token_of, call.own, call.out, call.num_tokens = self._send.token_of, own, y_TH.data_ptr(), tokens
        call.epoch, call.microseconds = epoch % EPOCHS, microseconds
        small = tokens * self._row_bytes < BYTES_FOR_THREADS
        call.threads = 1 if small else exchange.native.threads(torch.get_num_threads())
        exchange.epoch = epoch
        if not self._call("exchange_collect", self._add_up_at):
            self.sums_begin_at(wait())  # loaded and checked by wait; the kernel does not load them again
            self._call("exchange_add_up", self._add_up_at)
        return y_TH

    def _check(self, values_TX: torch.Tensor, scales_TX: torch.Tensor | None, form_of_x: FormOfRows) -> None:
        """Raise ShapeError for rows of another format; accepted formats are cached."""
        dtype, columns, step, rounding, _ = form_of_x
        dense = step == 1 and (scales_TX is None or scales_TX.is_contiguous())
        wrong = [] if dense else ["values must be contiguous within a row, scales contiguous"]
        wrong += (
            _wrong_rounded(self._form, dtype, columns) if rounding else _wrong_plain(self._form, values_TX, scales_TX)
        )
        if wrong:
            raise ShapeError("exchange of rows: " + "; ".join(wrong))
        self._send.quantize = self._form.rounding if rounding else Rounding.NONE
        self._send.columns, self._send.row_type = columns, ROW_TYPES.get(dtype, 0)
        self._element, self._checked = dtype.itemsize, form_of_x


def _wrong_plain(form: RowFormat, values_TX: torch.Tensor, scales_TX: torch.Tensor | None) -> list[str]:
    values = values_TX.shape[1] * values_TX.element_size()
    scales = 0 if scales_TX is None else scales_TX.shape[1] * scales_TX.element_size()
    if (values, scales) == (form.value_bytes, form.scale_bytes):
        return []
    return [f"rows have {values} + {scales} bytes, expected {form.value_bytes} + {form.scale_bytes}"]


def _wrong_rounded(form: RowFormat, dtype: torch.dtype, columns: int) -> list[str]:
    if dtype not in ROW_TYPES or columns != form.value_bytes:
        return [f"x is (T, {columns}) {dtype}, expected (T, {form.value_bytes}) of bf16, f16, f32"]
    blocks = -(-form.value_bytes // SCALE_BLOCK)
    if form.scale_bytes != blocks * (4 if form.rounding is Rounding.FP8 else 1):
        return [f"{form.scale_bytes} bytes of scales, {blocks} groups of {SCALE_BLOCK}"]
    return []


def add_rows(
    native: Native, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], out_RH: torch.Tensor, *, isa: Isa | None = None
) -> torch.Tensor:
    """Write the sums of all parts to `out_RH`, contiguous, in a dtype of ROW_TYPES; zeros for rows in no part.

    out[r] is the sum from zero of the row of r in each part, in the order of parts, in f32, rounded once. parts: rows
    (X, H) of the same dtype, and the row of `out_RH` each is added to (int64; ascending, unique).
    """
    held = [rows_XH.contiguous() for rows_XH, _ in parts]
    place_PR = torch.empty((len(parts), len(out_RH)), dtype=torch.int32, device="cpu")
    for place_R, (_, row_X) in zip(place_PR, parts, strict=True):
        place_R[: len(row_X)] = row_X
    numbers = c_int64 * len(parts)
    sums, firsts = (c_void_p * len(parts))(*(rows_XH.data_ptr() for rows_XH in held)), numbers()
    counts = numbers(*(len(rows_XH) for rows_XH in held))
    windows = CWindows(sums=addressof(sums), rank=UNASSIGNED_RANK, num_ranks=len(parts))
    small = out_RH.numel() * out_RH.element_size() < BYTES_FOR_THREADS
    call = CAddUp(
        token_of=place_PR.data_ptr(), counts=addressof(counts), firsts=addressof(firsts), out=out_RH.data_ptr(),
        num_tokens=len(out_RH), columns=out_RH.shape[1], row_type=ROW_TYPES[out_RH.dtype],
        threads=1 if small else native.threads(torch.get_num_threads()), isa=int(native.isa_or_best(isa)),
    )  # fmt: skip
    native.call("exchange_add_up", byref(windows), byref(call))
    return out_RH
