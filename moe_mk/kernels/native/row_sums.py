"""Sums of rows that lie in several places, in order, in f32: `exchange_add_up` on tensors instead of windows.

out[r] = 0 + the row of r in part 0 + the row of r in part 1 + ...        rounded once; parts without r are left out
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_int64, c_void_p

import torch
from torch import Tensor

from moe_mk.kernels.native.exchange import BYTES_FOR_THREADS, ROW_TYPES
from moe_mk.kernels.native.exchange_abi import CAddUp, CWindows
from moe_mk.kernels.native.library import Isa, Native

NOBODY = -1
"""The rank whose rows lie apart: none of these does."""


def add_rows(
    native: Native, parts: Sequence[tuple[Tensor, Tensor]], out_RH: Tensor, *, isa: Isa | None = None
) -> Tensor:
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
    windows = CWindows(sums=addressof(sums), rank=NOBODY, num_ranks=len(parts))
    small = out_RH.numel() * out_RH.element_size() < BYTES_FOR_THREADS
    call = CAddUp(
        token_of=place_PR.data_ptr(), counts=addressof(counts), firsts=addressof(firsts), out=out_RH.data_ptr(),
        num_tokens=len(out_RH), columns=out_RH.shape[1], row_type=ROW_TYPES[out_RH.dtype],
        threads=1 if small else torch.get_num_threads(), isa=int(native.isa_or_best(isa)),
    )  # fmt: skip
    native.call("exchange_add_up", byref(windows), byref(call))
    return out_RH
