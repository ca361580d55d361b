"""The rows of one layer through an exchange: what no call changes is filled in once, what a call changes at its turn.

A call of a small batch is mostly Python that has fallen out of the caches since the last one, so that little of it is
left here: addresses and sizes into structures that are there, one kernel, tensors for what is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import addressof, byref, c_int64

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.native.exchange import BYTES_FOR_THREADS, EPOCHS, ROW_TYPES, Exchange, Rounding, RowFormat
from moe_mk.kernels.native.exchange_abi import CAddUp, CReceive, CSend
from moe_mk.kernels.native.layout import SCALE_BLOCK

CPU = torch.device("cpu")
FormOfRows = tuple[torch.dtype, int, int, bool, bool]
"""dtype, columns, elements from one column to the next, whether they are rounded on the way, whether without scales."""
Apart = tuple[Tensor | None, Tensor, Tensor]
"""Scales (R, X) or None where rows have none, ids (R, K) int32, weights (R, K) f32."""


class ExchangeCalls:
    """The calls of one layer over one exchange.

    tables: rank_of_P and slot_of_P (int32). slots: those of this rank. dtype: that of sums.
    """

    def __init__(
        self,
        exchange: Exchange,
        form: RowFormat,
        tables: tuple[Tensor, Tensor],
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
        self, x: tuple[Tensor, Tensor | None], routing: tuple[Tensor, Tensor], epoch: int, *, rounding: bool = False
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
        ids_RK = torch.empty((total, form.top_k), dtype=torch.int32, device=CPU)
        weights_RK = torch.empty((total, form.top_k), dtype=torch.float32, device=CPU)
        if self._scale_columns:
            scales_RX = torch.empty((total, self._scale_columns), dtype=form.scale_dtype, device=CPU)
            call.scales = scales_RX.data_ptr()
        call.values, call.ids, call.weights = values_to, ids_RK.data_ptr(), weights_RK.data_ptr()
        self._call("exchange_receive", self._receive_at)
        return scales_RX, ids_RK, weights_RK

    def collect(self, own: int, epoch: int, microseconds: int, wait: Callable[[], Mapping[int, int]]) -> Tensor:
        """Add the sums of all ranks to the tokens of the last dispatch: (T, H); zero where no rank has any.

        own: the address of the first sum of this rank for itself. Peers that are not ready within so many microseconds
        are waited for by `wait`, which returns for each of them the number of the first sum for this rank, checked.
        Raises CommError for a number beyond the sums of a peer.
        """
        tokens, call, exchange = self._send.num_tokens, self._add_up, self._exchange
        y_TH = torch.empty((tokens, self._hidden), dtype=self._dtype, device=CPU)
        call.token_of, call.own, call.out, call.num_tokens = self._send.token_of, own, y_TH.data_ptr(), tokens
        call.epoch, call.microseconds, call.threads = epoch % EPOCHS, microseconds, _threads(tokens * self._row_bytes)
        exchange.epoch = epoch
        if not self._call("exchange_collect", self._add_up_at):
            for peer, first in wait().items():  # loaded once there, and not again by the kernel
                self._firsts[peer] = first
            self._call("exchange_add_up", self._add_up_at)
        return y_TH

    def _check(self, values_TX: Tensor, scales_TX: Tensor | None, form_of_x: FormOfRows) -> None:
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


def _wrong_layout(step: int, scales_TX: Tensor | None) -> list[str]:
    if step == 1 and (scales_TX is None or scales_TX.is_contiguous()):
        return []
    return ["values must lie close within a row, scales close everywhere"]


def _wrong_plain(form: RowFormat, values_TX: Tensor, scales_TX: Tensor | None) -> list[str]:
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
