"""The structures and signatures of csrc/exchange.h, field by field."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_int32, c_int64, c_uint32, c_void_p


class CSend(ctypes.Structure):
    """`MoeMkSend` of csrc/exchange.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "scales", "ids", "weights", "rank_of", "slot_of")),
        *((name, c_void_p) for name in ("token_of", "counts", "values_to", "tails_to")),
        *((name, c_int64) for name in ("num_tokens", "x_stride", "value_bytes", "scale_bytes")),
        *((name, c_int32) for name in ("top_k", "num_ranks", "columns", "row_type", "quantize", "threads", "isa")),
    )


class CReceive(ctypes.Structure):
    """`MoeMkReceive` of csrc/exchange.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values_from", "tails_from", "counts", "values", "scales", "ids", "weights")),
        *((name, c_int64) for name in ("value_bytes", "scale_bytes")),
        *((name, c_int32) for name in ("top_k", "num_ranks", "threads")),
    )


class CAddUp(ctypes.Structure):
    """`MoeMkAddUp` of csrc/exchange.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows_of", "token_of", "counts", "out")),
        *((name, c_int64) for name in ("num_tokens", "columns")),
        *((name, c_int32) for name in ("num_ranks", "row_type", "threads", "isa")),
    )


SIGNATURES: Mapping[str, tuple[type | None, tuple[object, ...]]] = {
    "exchange_sort": (c_int32, (c_void_p, c_int64, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_void_p)),
    "exchange_send": (c_int32, (POINTER(CSend),)),
    "exchange_receive": (c_int32, (POINTER(CReceive),)),
    "exchange_add_up": (c_int32, (POINTER(CAddUp),)),
    "exchange_wait": (c_int32, (c_void_p, c_int32, c_uint32, c_int64, POINTER(c_int32))),
}
