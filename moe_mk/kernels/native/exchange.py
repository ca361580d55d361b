"""Rows straight into windows of peers, rows out of a window, and sums of rows in rank order, on raw memory.

Windows are addresses: whoever calls answers for their being mapped and long enough. Equal inputs give equal bits,
whatever the threads and the instruction set, and those of the reference: FP8 as `reference/quantize_rows`, sums from
zero in rank order in f32, rounded once.

    sort_rows   which tokens go to each rank, ascending, each once
    send_rows   values (as they are, or rounded to FP8 on the way) and tails [scales | slots | weights] to every rank
    receive     tails taken apart, rows that lie elsewhere put in order
    add_up      the rows of each rank to their tokens
    wait        until words have come to an epoch, for no longer than so many microseconds
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.native.exchange_abi import CAddUp, CReceive, CSend
from moe_mk.kernels.native.layout import SCALE_BLOCK
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.selfcheck import is_compiled, loaded

ROW_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The dtypes of rows that are rounded or added up."""
BYTES_FOR_THREADS = 1 << 20
"""A call that moves less is done before a second thread has woken."""


class Rounding(IntEnum):
    """`Quantize` of csrc/exchange.h: what becomes of rows on their way."""

    NONE = 0
    FP8 = 1
    """e4m3 with an f32 scale for every 128 of a row."""
    FP8_UE8M0 = 2
    """The same with powers of two, a byte each."""


@dataclass(frozen=True)
class RowFormat:
    """How a row lies at its destination: value_bytes in one place, in another its tail [scales | K ids | K weights]."""

    value_bytes: int
    scale_bytes: int
    top_k: int
    rounding: Rounding = Rounding.NONE


@dataclass(frozen=True)
class SortedRows:
    """The tokens of each rank, ascending, each once."""

    token_of_WT: Tensor
    """int32. token_of_WT[w, i] is the i-th token for rank w, for i below counts[w]; the rest is undefined."""
    counts_W: Tensor
    """int64."""
    counts: list[int]
    """The same numbers."""


def ready() -> Native | None:
    """The kernels, if they came with the wheel or somebody has compiled them: an exchange waits for no compiler."""
    return loaded() if is_compiled() else None


def sort_rows(native: Native, ids_TK: Tensor, rank_of_P: Tensor, ranks: int) -> SortedRows:
    """Find the ranks that each token visits. ids_TK, rank_of_P: int32, dense; ids below zero go nowhere.

    Raises ShapeError for an id that is no expert.
    """
    tokens, top_k = ids_TK.shape
    token_of_WT = torch.empty((ranks, tokens), dtype=torch.int32, device="cpu")
    counts_W = torch.empty(ranks, dtype=torch.int64, device="cpu")
    native.call(
        "exchange_sort", ids_TK.data_ptr(), tokens, top_k, rank_of_P.data_ptr(), len(rank_of_P), ranks,
        token_of_WT.data_ptr(), counts_W.data_ptr(),
    )  # fmt: skip
    return SortedRows(token_of_WT, counts_W, counts_W.tolist())


def send_rows(
    native: Native,
    form: RowFormat,
    rows: SortedRows,
    x: tuple[Tensor, Tensor | None],
    routing: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    values_to: Sequence[int],
    tails_to: Sequence[int],
    *,
    isa: Isa | None = None,
) -> None:
    """Write every row to every rank it visits.

    x: values (T, X) with their scales, rows of any stride; or rows of ROW_TYPES that are rounded here. routing: ids
    (int32) and weights (f32), (T, K). tables: rank_of_P and slot_of_P (int32). values_to, tails_to: addresses by rank;
    0 leaves a rank out. Raises ShapeError for rows that are no such thing.
    """
    (values_TX, scales_TX), (ids_TK, weights_TK) = x, routing
    tokens, columns = values_TX.shape
    _check_rows(form, values_TX, scales_TX)
    values, tails = _addresses(values_to), _addresses(tails_to)
    call = CSend(
        x=values_TX.data_ptr(), x_stride=values_TX.stride(0) * values_TX.element_size(),
        scales=None if scales_TX is None else scales_TX.data_ptr(),
        ids=ids_TK.data_ptr(), weights=weights_TK.data_ptr(),
        rank_of=tables[0].data_ptr(), slot_of=tables[1].data_ptr(),
        token_of=rows.token_of_WT.data_ptr(), counts=rows.counts_W.data_ptr(),
        values_to=addressof(values), tails_to=addressof(tails),
        num_tokens=tokens, value_bytes=form.value_bytes, scale_bytes=form.scale_bytes,
        top_k=form.top_k, num_ranks=len(values_to), columns=columns,
        row_type=ROW_TYPES.get(values_TX.dtype, 0), quantize=int(form.rounding),
        threads=_threads(sum(rows.counts) * form.value_bytes), isa=int(native.isa_or_best(isa)),
    )  # fmt: skip
    native.call("exchange_send", byref(call))


def receive(
    native: Native,
    form: RowFormat,
    counts: Sequence[int],
    values_from: Sequence[int],
    tails_from: Sequence[int],
    values_to: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the tails of all ranks apart: scales (R, bytes) uint8, ids (R, K) int32, weights (R, K) f32, in rank order.

    values_from: addresses of values that must be copied to their place behind `values_to`; 0: they lie there.
    """
    total, values, tails = sum(counts), _addresses(values_from), _addresses(tails_from)
    numbers = (c_int64 * len(counts))(*counts)
    scales_RB = torch.empty((total, form.scale_bytes), dtype=torch.uint8, device="cpu")
    ids_RK = torch.empty((total, form.top_k), dtype=torch.int32, device="cpu")
    weights_RK = torch.empty((total, form.top_k), dtype=torch.float32, device="cpu")
    call = CReceive(
        values_from=addressof(values), tails_from=addressof(tails), counts=addressof(numbers),
        values=values_to, scales=scales_RB.data_ptr(), ids=ids_RK.data_ptr(), weights=weights_RK.data_ptr(),
        value_bytes=form.value_bytes, scale_bytes=form.scale_bytes, top_k=form.top_k, num_ranks=len(counts),
    )  # fmt: skip
    native.call("exchange_receive", byref(call))
    return scales_RB, ids_RK, weights_RK


def add_up(
    native: Native, rows: SortedRows, rows_of: Sequence[int], hidden: int, dtype: torch.dtype, *, isa: Isa | None = None
) -> Tensor:
    """Add the rows of each rank to their tokens: (T, H); zero where no rank has any.

    rows_of: the address of each rank's rows, one behind the other in the order of `rows`.
    """
    tokens = rows.token_of_WT.shape[1]
    y_TH, addresses = torch.empty((tokens, hidden), dtype=dtype, device="cpu"), _addresses(rows_of)
    call = CAddUp(
        rows_of=addressof(addresses), token_of=rows.token_of_WT.data_ptr(), counts=rows.counts_W.data_ptr(),
        out=y_TH.data_ptr(), num_tokens=tokens, columns=hidden, num_ranks=len(rows_of), row_type=ROW_TYPES[dtype],
        threads=_threads(sum(rows.counts) * hidden * dtype.itemsize), isa=int(native.isa_or_best(isa)),
    )  # fmt: skip
    native.call("exchange_add_up", byref(call))
    return y_TH


def wait(native: Native, words: Sequence[int], epoch: int, microseconds: int) -> bool:
    """Whether all words have come to an epoch (their high halves, modulo 2^32); looks no longer than told."""
    behind = c_int32(0)
    native.call("exchange_wait", _addresses(words), len(words), epoch & 0xFFFFFFFF, microseconds, byref(behind))
    return behind.value == 0


def _check_rows(form: RowFormat, values_TX: Tensor, scales_TX: Tensor | None) -> None:
    wrong = []
    width = values_TX.shape[1] * values_TX.element_size()
    if values_TX.stride(1) != 1 or (scales_TX is not None and not scales_TX.is_contiguous()):
        wrong.append("values must lie close within a row, scales close everywhere")
    if form.rounding is Rounding.NONE:
        scales = 0 if scales_TX is None else scales_TX.shape[1] * scales_TX.element_size()
        if (width, scales) != (form.value_bytes, form.scale_bytes):
            wrong.append(f"rows have {width} + {scales} bytes, expected {form.value_bytes} + {form.scale_bytes}")
    elif values_TX.dtype not in ROW_TYPES or values_TX.shape[1] != form.value_bytes:
        wrong.append(
            f"x is (T, {values_TX.shape[1]}) {values_TX.dtype}, expected (T, {form.value_bytes}) of bf16, f16, f32"
        )
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
