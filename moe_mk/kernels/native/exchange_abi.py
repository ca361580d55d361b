"""The structures and signatures of csrc/exchange.h, field by field."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_int32, c_int64, c_uint32, c_void_p


class CFault(ctypes.Structure):
    """C structure `MoeMkFault` of csrc/exchange.h."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "peer")),
        *((name, c_int64) for name in ("value", "limit", "row")),
    )


class CWindows(ctypes.Structure):
    """C structure `MoeMkWindows` of csrc/exchange.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values_to", "back_to", "tails_to", "room_to", "flags_to")),
        *((name, c_void_p) for name in ("values_from", "back_from", "tails_from", "flags_from", "sums")),
        ("fault", c_void_p),
        ("most_rows", c_int64),
        *((name, c_int32) for name in ("rank", "num_ranks")),
        ("layer", c_uint32),
        ("failed_from", c_void_p),
    )


class CSend(ctypes.Structure):
    """C structure `MoeMkSend` of csrc/exchange.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "scales", "ids", "weights", "rank_of", "slot_of", "token_of", "counts")),
        *((name, c_int64) for name in ("num_tokens", "x_stride", "value_bytes", "scale_bytes")),
        *((name, c_int32) for name in ("top_k", "num_experts", "columns", "row_type", "quantize", "threads", "isa")),
        ("epoch", c_uint32),
        ("sent", c_int32),
    )


class CReceive(ctypes.Structure):
    """C structure `MoeMkReceive` of csrc/exchange.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("counts", "values", "scales", "ids", "weights")),
        *((name, c_int64) for name in ("value_bytes", "scale_bytes")),
        *((name, c_int32) for name in ("top_k", "num_slots")),
    )


class CAddUp(ctypes.Structure):
    """C structure `MoeMkAddUp` of csrc/exchange.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_of", "counts", "firsts", "own", "out")),
        *((name, c_int64) for name in ("num_tokens", "columns")),
        *((name, c_int32) for name in ("row_type", "threads", "isa")),
        ("epoch", c_uint32),
        ("microseconds", c_int64),
    )


class CCapture(ctypes.Structure):
    """C structure `MoeMkCapture` of csrc/exchange.h."""

    _fields_ = (
        ("ids", c_void_p),
        *((name, c_int64) for name in ("stride", "room", "num_tokens")),
        *((name, c_int32) for name in ("id_bytes", "top_k")),
    )


class CLayer(ctypes.Structure):
    """C structure `MoeMkLayer` of csrc/exchange.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("route", "experts", "shared", "physical_of", "rank_of", "slot_of", "ran")),
        *((name, c_int32) for name in ("num_experts", "num_physical", "rank")),
        *((name, c_void_p) for name in ("windows", "send", "receive", "add_up", "own_ids", "own_weights", "places")),
        *((name, c_void_p) for name in ("logits", "shared_out", "values", "sums", "received", "moved")),
        *((name, c_int64) for name in ("seam_row", "first_row", "end_row", "sums_room", "row_room", "microseconds")),
        ("total", c_int64),
        *((name, c_int32) for name in ("left", "stage")),
        *((name, c_void_p) for name in ("x", "ids", "weights", "shared_weights", "load", "captured", "out")),
        ("num_tokens", c_int64),
        *((name, c_int32) for name in ("top_k", "form", "threads")),
    )


SIGNATURES: Mapping[str, tuple[type | None, tuple[object, ...]]] = {
    "exchange_dispatch": (c_int32, (POINTER(CWindows), POINTER(CSend))),
    "exchange_receive": (c_int32, (POINTER(CWindows), POINTER(CReceive))),
    "exchange_show": (None, (POINTER(CWindows), c_uint32, c_void_p)),
    "exchange_add_up": (c_int32, (POINTER(CWindows), POINTER(CAddUp))),
    "exchange_collect": (c_int32, (POINTER(CWindows), POINTER(CAddUp))),
    "exchange_await": (c_int32, (POINTER(CWindows), c_int32, c_uint32, c_int64, c_void_p)),
    "layer": (
        c_int32,
        (
            *(POINTER(CLayer), c_int32, c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_int32, c_int32),
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_uint32),
        ),
    ),
}
