"""Rows straight into windows of peers, rows out of a window, and sums of rows in rank order, on raw memory.

Windows are addresses: whoever calls answers for their being mapped and long enough. Equal inputs give equal bits,
whatever the threads and the instruction set, and those of the reference: FP8 as `reference/quantize_rows`, sums from
zero in rank order in f32, rounded once.

    dispatch  sort tokens by the ranks they visit, write values (as they are, or rounded to FP8 on the way) and tails
              [scales | slots | weights] there, raise a flag a peer
    arrived   look at flags until they have come to an epoch, for no longer than so many microseconds
    receive   tails taken apart, rows that lie elsewhere put in order
    show      tell peers where their sums are
    add_up    the rows of each rank to their tokens; `collect` looks at flags first, as `arrived` does

An `Exchange` is what a set of windows can do for whoever uses it; what one layer sends through it is `exchange_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch

from moe_mk.errors import CommError, ShapeError
from moe_mk.kernels.native.exchange_abi import CAddUp, CFault, CReceive, CSend, CWindows
from moe_mk.kernels.native.layout import SCALE_BLOCK
from moe_mk.kernels.native.library import Isa, Native, Status
from moe_mk.kernels.native.selfcheck import is_compiled, loaded

ROW_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The dtypes of rows that are rounded or added up."""
BYTES_FOR_THREADS = 1 << 20
"""A call that moves less is done before a second thread has woken."""
EPOCHS = 1 << 32
UNASSIGNED_RANK = -1
"""The rank of a call without windows: no part of the sums is its own."""
FormOfRows = tuple[torch.dtype, int, int, bool, bool]
"""dtype, columns, elements from one column to the next, whether they are rounded on the way, whether without scales."""
Apart = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]
"""Scales (R, X) or None where rows have none, ids (R, K) int32, weights (R, K) f32."""


class Rounding(IntEnum):
    """`Quantize` of csrc/exchange.h: what becomes of rows on their way."""

    NONE = 0
    FP8 = 1
    """e4m3 with an f32 scale for every 128 of a row."""
    FP8_UE8M0 = 2
    """The same with powers of two, a byte each."""


class FaultKind(IntEnum):
    """`FaultKind` of csrc/exchange.h: which word of a peer is outside of its limits."""

    TOO_MANY_ROWS = 1
    """The count of a dispatch flag."""
    SUMS_BEYOND = 2
    """The offset of a combine flag."""
    NO_SUCH_SLOT = 3
    """A slot in the tail of a received row."""
    OTHER_LAYER = 4
    """The layer number of a flag."""
    PEER_FAILED = 5
    """A flag that reports a failure; the cause is in a note beside it."""


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
    """A word that a peer wrote and that cannot be used as a size, an offset or an index: `MoeMkFault`."""

    kind: FaultKind
    peer: int
    value: int
    limit: int
    row: int = 0

    def error(self, rank: int, epoch: int, layer: str, phase: str = "") -> CommError:
        """The error that names peer, phase, value and limit, the same for native kernels and torch.

        phase: for faults that may be found in any.
        """
        of_fault, text = _FAULTS[self.kind]
        phase = of_fault or phase
        filled = text.format(value=self.value, limit=self.limit, row=self.row)
        return CommError(f"epoch {epoch}: {filled}", rank=rank, phase=phase, layer=layer, peer=self.peer)


@dataclass(frozen=True)
class RowFormat:
    """How a row lies at its destination: its values in one place, its tail [scales | K ids | K weights] in another."""

    value_bytes: int
    scale_bytes: int
    top_k: int
    rounding: Rounding = Rounding.NONE
    """What can be made of rows that come in one of ROW_TYPES."""
    scale_dtype: torch.dtype = torch.uint8


@dataclass(frozen=True)
class WindowPlaces:
    """Addresses by rank, as `rank` sees the windows of all: `MoeMkWindows` of csrc/exchange.h. 0: none."""

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
    """That a rank may send to another in one call: words of peers are checked against it."""


def ready() -> Native | None:
    """The kernels, if they came with the wheel or somebody has compiled them: an exchange waits for no compiler."""
    return loaded() if is_compiled() else None


class Exchange:
    """One rank's hold on one set of windows, for one call at a time: what was sent is known until it is added up.

    Structures for the kernels are made once and filled in place, so that a call costs what its bytes cost.
    """

    def __init__(self, native: Native, places: WindowPlaces, *, isa: Isa | None = None) -> None:
        self.native, self.rank, ranks = native, places.rank, len(places.values_to)
        self.isa, numbers = int(native.isa_or_best(isa)), c_int64 * ranks
        self.room, self.counts, self.received = numbers(), numbers(), numbers()
        """Rows by rank. room: that there are pages for at each, set by the owner. counts: sent by the last dispatch.
        received: come with the last flags."""
        self._held: list[Array[c_void_p] | Array[c_int64]] = [
            _addresses(places.values_to), numbers(*places.back_to), _addresses(places.tails_to), self.room,
            _addresses(places.flags_to), _addresses(places.values_from), numbers(*places.back_from),
            _addresses(places.tails_from), _addresses(places.flags_from), _addresses(places.sums),
        ]  # fmt: skip
        self._fault, self.layer, self.epoch = CFault(), "", 0
        """layer: that is served now; epoch: of the call under way. For errors."""
        self.failure_of: Callable[[int, str], CommError] | None = None
        """What a peer has reported, given the phase in which it was seen; None: no more than that it failed."""
        addresses = (addressof(each) for each in (*self._held, self._fault))
        self._windows = CWindows(*addresses, places.most_rows, places.rank, ranks, 0)
        self.windows = byref(self._windows)
        self._token_of, self._tokens = torch.empty(0, dtype=torch.int32, device="cpu"), 0
        self._received_at, self._functions = addressof(self.received), native.functions

    def serve(self, layer: str, layer_number: int) -> None:
        """Begin a call of a layer; the number goes with every flag."""
        self.layer, self._windows.layer = layer, layer_number

    def token_of(self, tokens: int) -> int:
        """The address of [W][T] int32 for the tokens of each rank."""
        if tokens > self._tokens:
            self._token_of = torch.empty(tokens * len(self.counts), dtype=torch.int32, device="cpu")
            self._tokens = tokens
        return self._token_of.data_ptr()

    def arrived(self, epoch: int, microseconds: int) -> list[int] | None:
        """Rows received from each rank, once all flags for rows have come; what goes to itself is known by `dispatch`.

        None: not all have come in time. Raises CommError for a count beyond the window.
        """
        self.received[self.rank], self.epoch = self.counts[self.rank], epoch
        come = self.call("exchange_await", 0, epoch % EPOCHS, microseconds, self._received_at)
        return self.received[:] if come else None

    def received_from(self, counts: Mapping[int, int]) -> list[int]:
        """Rows received from each rank, given those of all peers after a wait by other means that has checked them."""
        for peer, count in counts.items():
            self.received[peer] = count
        return self.received[:]

    def call(self, name: str, *arguments: object) -> bool:
        """Call a kernel on these windows; False: peers are late. Raises CommError for a peer's word out of limits."""
        status = self._functions[name](self.windows, *arguments)
        if status == Status.OK:
            return True
        if status == Status.LATE:
            return False
        if status == Status.PEER_FAULT:
            found = self._fault
            fault = PeerFault(FaultKind(found.kind), found.peer, found.value, found.limit, found.row)
            phase = "combine" if name == "exchange_collect" else "dispatch"
            if fault.kind is FaultKind.PEER_FAILED and self.failure_of is not None:
                raise self.failure_of(fault.peer, phase)
            raise fault.error(self.rank, self.epoch, self.layer, phase)
        self.native.check(name, status)
        return False

    def show(self, epoch: int) -> None:
        """Tell each rank the number of the first of its sums here: they lie in the order of the rows received."""
        self._functions["exchange_show"](self.windows, epoch % EPOCHS, self._received_at)


def _addresses(addresses: Sequence[int]) -> Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)


class ExchangeCalls:
    """The calls of one layer over one exchange.

    tables: rank_of_P and slot_of_P (int32). slots: those of this rank. dtype: that of sums.
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
        self._exchange, self._form, self._tables, self._call = exchange, form, tables, exchange.call
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
        """Write every row to every rank it visits, then raise a flag a peer. Returns rows by rank.

        None: some rank would get more rows than there is room for. Nothing is written then, and the exchange's `counts`
        say how many.

        x: values (T, X) with their scales, rows of any stride; or, with `rounding`, rows of ROW_TYPES that are rounded
        here. routing: ids (int32; below zero: nowhere) and weights (f32), (T, K), dense. Raises ShapeError for rows
        that are no such thing, and for an id that is no expert.
        """
        (values_TX, scales_TX), (ids_TK, weights_TK), call = x, routing, self._send
        (tokens, columns), (stride, step) = values_TX.shape, values_TX.stride()
        form_of_x = (values_TX.dtype, columns, step, rounding, scales_TX is None)
        if scales_TX is not None or form_of_x != self._checked:
            self._check(values_TX, scales_TX, form_of_x)
        call.x, call.x_stride, call.num_tokens = values_TX.data_ptr(), stride * self._element, tokens
        call.scales = None if scales_TX is None else scales_TX.data_ptr()
        call.ids, call.weights = ids_TK.data_ptr(), weights_TK.data_ptr()
        call.token_of, call.epoch = self._exchange.token_of(tokens), epoch % EPOCHS
        call.threads = _threads(tokens * self._form.value_bytes)
        self._call("exchange_dispatch", self._send_at)
        return self._exchange.counts[:] if call.sent else None

    def receive(self, total: int, values_to: int) -> Apart:
        """Take the tails of all rows that have arrived apart, in rank order.

        values_to: where values belong, one behind the other; those that lie elsewhere are copied there. Raises
        CommError for a row whose slot is none of this rank.
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

    def collect(self, own: int, epoch: int, microseconds: int, wait: Callable[[], Mapping[int, int]]) -> torch.Tensor:
        """Add the sums of all ranks to the tokens of the last dispatch: (T, H); zero where no rank has any.

        own: the address of the first sum of this rank for itself. Peers that are not ready within so many microseconds
        are waited for by `wait`, which returns for each of them the number of the first sum for this rank, checked.
        Raises CommError for a number beyond the sums of a peer.
        """
        tokens, call, exchange = self._send.num_tokens, self._add_up, self._exchange
        y_TH = torch.empty((tokens, self._hidden), dtype=self._dtype, device="cpu")
        call.token_of, call.own, call.out, call.num_tokens = self._send.token_of, own, y_TH.data_ptr(), tokens
        call.epoch, call.microseconds, call.threads = epoch % EPOCHS, microseconds, _threads(tokens * self._row_bytes)
        exchange.epoch = epoch
        if not self._call("exchange_collect", self._add_up_at):
            for peer, first in wait().items():  # loaded once there, and not again by the kernel
                self._firsts[peer] = first
            self._call("exchange_add_up", self._add_up_at)
        return y_TH

    def _check(self, values_TX: torch.Tensor, scales_TX: torch.Tensor | None, form_of_x: FormOfRows) -> None:
        """Refuse rows of another form; those that pass are remembered and need no second look."""
        dtype, columns, step, rounding, _ = form_of_x
        wrong = _wrong_layout(step, scales_TX)
        wrong += (
            _wrong_rounded(self._form, dtype, columns) if rounding else _wrong_plain(self._form, values_TX, scales_TX)
        )
        if wrong:
            raise ShapeError("exchange of rows: " + "; ".join(wrong))
        self._send.quantize = self._form.rounding if rounding else Rounding.NONE
        self._send.columns, self._send.row_type = columns, ROW_TYPES.get(dtype, 0)
        self._element, self._checked = dtype.itemsize, form_of_x


def _wrong_layout(step: int, scales_TX: torch.Tensor | None) -> list[str]:
    if step == 1 and (scales_TX is None or scales_TX.is_contiguous()):
        return []
    return ["values must lie close within a row, scales close everywhere"]


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


def _threads(num_bytes: int) -> int:
    return 1 if num_bytes < BYTES_FOR_THREADS else torch.get_num_threads()


def add_rows(
    native: Native, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], out_RH: torch.Tensor, *, isa: Isa | None = None
) -> torch.Tensor:
    """Write the sums of all parts to `out_RH`, dense, in a dtype of ROW_TYPES; zeros where no part has a row.

    parts: rows (X, H) of the same dtype, and for each the number of the row of `out_RH` that it adds to (int64;
    ascending, each once). Reads them once and writes once, without a copy in f32.
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
        threads=1 if small else torch.get_num_threads(), isa=int(native.isa_or_best(isa)),
    )  # fmt: skip
    native.call("exchange_add_up", byref(windows), byref(call))
    return out_RH
