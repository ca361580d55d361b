"""Fused experts on packed weights, on raw tensors: w13, bias, activation, w2, bias, routing weights, sum over k."""

from __future__ import annotations

import torch

from moe_mk.errors import ShapeError
from moe_mk.kernels.native.experts_mode import ExpertsMode, check_call, check_shared
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix
from moe_mk.kernels.native.prepared import ExpertsCall


def experts_rows(
    native: Native,
    x_RH: torch.Tensor,
    ids_RK: torch.Tensor,
    weights_RK: torch.Tensor | None,
    w13: PackedMatrix,
    w2: PackedMatrix,
    *,
    mode: ExpertsMode | None = None,
    shared: tuple[PackedMatrix, PackedMatrix] | None = None,
    x_scales_RX: torch.Tensor | None = None,
    out_RH: torch.Tensor | None = None,
    threads: int = 1,
    isa: Isa | None = None,
) -> torch.Tensor:
    """Run every row through its local experts and return the weighted sum over k, [R, H] in bf16.

    x_RH: bf16, or e4m3 with x_scales_RX (f32, one per 128 of H), or int8 with one per row if the mode quantises to
    INT8. Rows without a local expert are not read. ids_RK: int32 local slots, -1: dropped. weights_RK: f32; None: all
    ones. shared: w13 and w2 of one slot applied to every row with weight 1, in the same call; its I may differ. out_RH:
    the output, bf16 or f32; allocated if None. Bit-equal for any number of threads.
    """
    mode = mode or ExpertsMode()
    if shared is not None:
        check_shared(shared, w13, w2)
    check_call(mode, x_RH, x_scales_RX, ids_RK, weights_RK, (w13, w2, *(shared or ())))
    return ExpertsCall(native, w13, w2, shared, mode, isa)(x_RH, x_scales_RX, ids_RK, weights_RK, out_RH, threads)


def experts_grouped(
    native: Native,
    x_NH: torch.Tensor,
    counts_L: torch.Tensor,
    weights_N: torch.Tensor | None,
    w13: PackedMatrix,
    w2: PackedMatrix,
    *,
    mode: ExpertsMode | None = None,
    x_scales_NX: torch.Tensor | None = None,
    threads: int = 1,
    isa: Isa | None = None,
) -> torch.Tensor:
    """Run rows that are sorted by local expert, [N, H] -> [N, H] bf16, each row times its weight (None: raw).

    counts_L: rows of each expert; rows beyond their sum are dropped, their output is zero.
    """
    slots = torch.arange(counts_L.shape[0], dtype=torch.int32, device="cpu")
    ids_N = torch.full((x_NH.shape[0],), -1, dtype=torch.int32, device="cpu")
    local = torch.repeat_interleave(slots, counts_L.to(device="cpu", dtype=torch.int64))
    if local.shape[0] > x_NH.shape[0]:
        raise ShapeError(f"counts_L sums to {local.shape[0]}, but there are {x_NH.shape[0]} rows")
    ids_N[: local.shape[0]] = local
    weights_N1 = None if weights_N is None else weights_N.unsqueeze(1)
    return experts_rows(
        native, x_NH, ids_N.unsqueeze(1), weights_N1, w13, w2, mode=mode, x_scales_RX=x_scales_NX, threads=threads,
        isa=isa,
    )  # fmt: skip


def experts_batched(
    native: Native,
    x_LSH: torch.Tensor,
    counts_L: torch.Tensor,
    w13: PackedMatrix,
    w2: PackedMatrix,
    *,
    mode: ExpertsMode | None = None,
    x_scales_LSX: torch.Tensor | None = None,
    threads: int = 1,
    isa: Isa | None = None,
) -> torch.Tensor:
    """Run padded blocks, one a local expert: [L, S, H] -> [L, S, H] bf16, raw. Slots beyond counts_L are never read."""
    num_slots, rows, hidden = x_LSH.shape
    slots = torch.arange(num_slots, dtype=torch.int32, device="cpu").unsqueeze(1).expand(num_slots, rows)
    inside = torch.arange(rows, dtype=torch.int64, device="cpu") < counts_L.to(
        device="cpu", dtype=torch.int64
    ).unsqueeze(1)
    ids_RK = torch.where(inside, slots, torch.full_like(slots, -1)).reshape(-1, 1)
    scales = None if x_scales_LSX is None else x_scales_LSX.reshape(num_slots * rows, -1)
    flat = x_LSH.reshape(num_slots * rows, hidden)
    out = experts_rows(native, flat, ids_RK, None, w13, w2, mode=mode, x_scales_RX=scales, threads=threads, isa=isa)
    return out.view(num_slots, rows, -1)
