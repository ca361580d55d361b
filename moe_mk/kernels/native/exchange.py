"""Rows straight into windows of peers, rows out of a window, and sums of rows in rank order, on raw memory.

Windows are addresses: whoever calls answers for their being mapped and long enough. Equal inputs give equal bits,
whatever the threads and the instruction set, and those of the reference: FP8 as `reference/quantize_rows`, sums from
zero in rank order in f32, rounded once.

    dispatch  sort tokens by the ranks they visit, write values (as they are, or rounded to FP8 on the way) and tails
              [scales | slots | weights] there, raise a flag a peer
    arrived   look at flags until they have come to an epoch, for no longer than so many microseconds
    receive   tails taken apart, rows that lie elsewhere put in order
    show      tell peers where their sums are
    add_up    the rows of each rank to their tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.native.exchange_abi import CAddUp, CReceive, CSend, CWindows
from moe_mk.kernels.native.layout import SCALE_BLOCK
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.selfcheck import is_compiled, loaded

ROW_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The dtypes of rows that are rounded or added up."""
BYTES_FOR_THREADS = 1 << 20
"""A call that moves less is done before a second thread has woken."""
EPOCHS = 1 << 32


class Rounding(IntEnum):
    """`Quantize` of csrc/exchange.h: what becomes of rows on their way."""

    NONE = 0
    FP8 = 1
    """e4m3 with an f32 scale for every 128 of a row."""
    FP8_UE8M0 = 2
    """The same with powers of two, a byte each."""


@dataclass(frozen=True)
class RowFormat:
    """How a row lies at its destination: its values in one place, its tail [scales | K ids | K weights] in another."""

    value_bytes: int
    scale_bytes: int
    top_k: int
    rounding: Rounding = Rounding.NONE


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


def ready() -> Native | None:
    """The kernels, if they came with the wheel or somebody has compiled them: an exchange waits for no compiler."""
    return loaded() if is_compiled() else None


class Exchange:
    """The calls of one rank over one set of windows, one at a time: what was sent is known until it is added up.

    Structures for the kernels are made once and filled in place, so that a call costs what its bytes cost.
    """

    def __init__(self, native: Native, places: WindowPlaces, *, isa: Isa | None = None) -> None:
        self._native, ranks, numbers = native, len(places.values_to), c_int64 * len(places.values_to)
        self.room, self.counts, self._arrived, self._firsts = numbers(), numbers(), numbers(), numbers()
        """room: rows that there are pages for at each rank, set by the owner. counts: rows of the last dispatch."""
        self._held: list[Array[c_void_p] | Array[c_int64]] = [
            _addresses(places.values_to), numbers(*places.back_to), _addresses(places.tails_to), self.room,
            _addresses(places.flags_to), _addresses(places.values_from), numbers(*places.back_from),
            _addresses(places.tails_from), _addresses(places.flags_from), _addresses(places.sums),
        ]  # fmt: skip
        self._windows = CWindows(*(addressof(each) for each in self._held), places.rank, ranks)
        best, counts = int(native.isa_or_best(isa)), addressof(self.counts)
        self._send, self._receive = CSend(counts=counts, isa=best), CReceive(counts=addressof(self._arrived))
        self._add_up = CAddUp(counts=counts, firsts=addressof(self._firsts), isa=best)
        self._token_of = torch.empty(0, dtype=torch.int32, device="cpu")
        self._await, self._show = native.functions["exchange_await"], native.functions["exchange_show"]

    def dispatch(
        self,
        form: RowFormat,
        x: tuple[Tensor, Tensor | None],
        routing: tuple[Tensor, Tensor],
        tables: tuple[Tensor, Tensor],
        epoch: int,
    ) -> list[int] | None:
        """Write every row to every rank it visits, then raise a flag a peer. Returns rows by rank.

        None: some rank would get more rows than there is room for. Nothing is written then, and `counts` says how many.

        x: values (T, X) with their scales, rows of any stride; or rows of ROW_TYPES that are rounded here. routing: ids
        (int32; below zero: nowhere) and weights (f32), (T, K), dense. tables: rank_of_P and slot_of_P (int32). Raises
        ShapeError for rows that are no such thing, and for an id that is no expert.
        """
        (values_TX, scales_TX), (ids_TK, weights_TK), call = x, routing, self._send
        tokens, columns = values_TX.shape
        _check_rows(form, values_TX, scales_TX)
        if self._token_of.numel() < tokens * len(self.counts):
            self._token_of = torch.empty(tokens * len(self.counts), dtype=torch.int32, device="cpu")
        call.x, call.x_stride = values_TX.data_ptr(), values_TX.stride(0) * values_TX.element_size()
        call.scales = None if scales_TX is None else scales_TX.data_ptr()
        call.ids, call.weights = ids_TK.data_ptr(), weights_TK.data_ptr()
        call.rank_of, call.slot_of, call.num_experts = tables[0].data_ptr(), tables[1].data_ptr(), len(tables[0])
        call.token_of, call.num_tokens, call.top_k = self._token_of.data_ptr(), tokens, form.top_k
        call.value_bytes, call.scale_bytes, call.quantize = form.value_bytes, form.scale_bytes, form.rounding
        call.columns, call.row_type = columns, ROW_TYPES.get(values_TX.dtype, 0)
        call.threads, call.epoch = _threads(tokens * form.value_bytes), epoch % EPOCHS
        self._native.call("exchange_dispatch", byref(self._windows), byref(call))
        return list(self.counts) if call.sent else None

    def arrived(self, epoch: int, microseconds: int, *, sums: bool) -> list[int] | None:
        """What peers said beside their flags for rows or for sums, by rank; 0 for this one. None: not all have come."""
        words = self._arrived
        words[self._windows.rank] = 0
        behind = self._await(byref(self._windows), sums, epoch % EPOCHS, microseconds, addressof(words))
        return None if behind else list(words)

    def receive(self, form: RowFormat, counts: Sequence[int], values_to: int) -> tuple[Tensor, Tensor, Tensor]:
        """Take the tails of all ranks apart: scales (R, bytes) uint8, ids (R, K) int32, weights (R, K) f32, by rank.

        values_to: where values belong, one behind the other; those that lie elsewhere are copied there.
        """
        total, call = sum(counts), self._receive
        scales_RB = torch.empty((total, form.scale_bytes), dtype=torch.uint8, device="cpu")
        ids_RK = torch.empty((total, form.top_k), dtype=torch.int32, device="cpu")
        weights_RK = torch.empty((total, form.top_k), dtype=torch.float32, device="cpu")
        self._arrived[:] = [*counts]
        call.values, call.scales = values_to, scales_RB.data_ptr()
        call.ids, call.weights = ids_RK.data_ptr(), weights_RK.data_ptr()
        call.value_bytes, call.scale_bytes, call.top_k = form.value_bytes, form.scale_bytes, form.top_k
        self._native.call("exchange_receive", byref(self._windows), byref(call))
        return scales_RB, ids_RK, weights_RK

    def show(self, epoch: int, firsts: Sequence[int]) -> None:
        """Tell each rank the number of the first of its sums here."""
        self._show(byref(self._windows), epoch % EPOCHS, (c_int64 * len(firsts))(*firsts))

    def add_up(self, firsts: Sequence[int], own: int, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Add the sums of all ranks to the tokens of the last dispatch: (T, H); zero where no rank has any.

        firsts: the number of the first sum for this rank, by rank. own: the address of its own first one.
        """
        y_TH, call = torch.empty((tokens, hidden), dtype=dtype, device="cpu"), self._add_up
        assert tokens == self._send.num_tokens
        self._firsts[:] = [*firsts]
        call.token_of, call.own, call.out = self._token_of.data_ptr(), own, y_TH.data_ptr()
        call.num_tokens, call.columns, call.row_type = tokens, hidden, ROW_TYPES[dtype]
        call.threads = _threads(tokens * hidden * dtype.itemsize)
        self._native.call("exchange_add_up", byref(self._windows), byref(call))
        return y_TH


def _check_rows(form: RowFormat, values_TX: Tensor, scales_TX: Tensor | None) -> None:
    wrong = []
    columns, size = values_TX.shape[1], values_TX.element_size()
    if values_TX.stride(1) != 1 or (scales_TX is not None and not scales_TX.is_contiguous()):
        wrong.append("values must lie close within a row, scales close everywhere")
    if form.rounding is Rounding.NONE:
        scales = 0 if scales_TX is None else scales_TX.shape[1] * scales_TX.element_size()
        if columns * size != form.value_bytes or scales != form.scale_bytes:
            wrong.append(
                f"rows have {columns * size} + {scales} bytes, expected {form.value_bytes} + {form.scale_bytes}"
            )
    elif values_TX.dtype not in ROW_TYPES or columns != form.value_bytes:
        wrong.append(f"x is (T, {columns}) {values_TX.dtype}, expected (T, {form.value_bytes}) of bf16, f16, f32")
    else:
        blocks = -(-form.value_bytes // SCALE_BLOCK)
        if form.scale_bytes != blocks * (4 if form.rounding is Rounding.FP8 else 1):
            wrong.append(f"{form.scale_bytes} bytes of scales, {blocks} groups of {SCALE_BLOCK}")
    if wrong:
        raise ShapeError("exchange of rows: " + "; ".join(wrong))


def _threads(num_bytes: int) -> int:
    return 1 if num_bytes < BYTES_FOR_THREADS else torch.get_num_threads()


def _addresses(addresses: Sequence[int]) -> Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)
