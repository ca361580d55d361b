"""Bring the rows of all assignments home: each received row is the sum of its own, in the order of its choices.

Reads ids (R, K) and the rows of y (R * K, H) whose id is not -1, writes (R, H). Rows of dropped assignments are never
read and may hold anything. Sums run in f32 in the order k = 0 ... K - 1 and are rounded once: equal inputs, equal bits.
Moves (K + 1) R H elements; no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.chain import after_the_one_before, chained
from moe_mk.kernels.triton.numerics import to_dtype

COLUMNS = 1024


def combine(y: Tensor, ids_RK: Tensor, weights_RK: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Sum the K rows of each received row, each times its weight if weights are given: (R, H) in the dtype of y.

    y: (R * K, H); row r * K + k belongs to choice k of received row r. out: where to put the sums instead, in any
    float dtype.
    """
    rows, top_k = ids_RK.shape
    out_RH = torch.empty((rows, y.shape[1]), dtype=y.dtype, device=y.device) if out is None else out
    if out_RH.numel():
        _combine[(rows, triton.cdiv(y.shape[1], COLUMNS))](
            y, ids_RK, weights_RK if weights_RK is not None else y, out_RH, y.shape[1], y.stride(0), out_RH.stride(0),
            TOP_K=top_k, WEIGHTED=weights_RK is not None, COLUMNS=COLUMNS, num_warps=4,
            **chained(),
        )  # fmt: skip
    return out_RH


@triton.jit
def _combine(
    y_ptr, ids_ptr, weights_ptr, out_ptr, width, y_stride, out_stride,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(TOP_K):
        kept = tl.load(ids_ptr + row * TOP_K + k) >= 0
        part = tl.load(y_ptr + (row * TOP_K + k) * y_stride + column, mask=inside & kept, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights_ptr + row * TOP_K + k)
        total += part
    tl.store(out_ptr + row * out_stride + column, to_dtype(total, out_ptr.dtype.element_ty), mask=inside)
