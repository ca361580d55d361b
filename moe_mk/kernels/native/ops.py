"""The native kernels as torch.library custom ops, so that compiled graphs can hold them: `torch.ops.moe_mk.cpu_*`.

Importing this module registers them. The library is loaded on the first call of a process, from `cache_dir`
("": the user's default); `isa` -1 means the best one here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moe_mk.kernels.native.experts import experts_rows
from moe_mk.kernels.native.experts_mode import Activation, ExpertsMode, Rounding
from moe_mk.kernels.native.layout import Format, MatrixLayout
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix
from moe_mk.kernels.native.prepared import route
from moe_mk.kernels.native.quantize import quantize_1x128
from moe_mk.kernels.native.route_mode import RouteMode, Scoring
from moe_mk.kernels.native.selfcheck import loaded


def _native(cache_dir: str) -> Native:
    return loaded(Path(cache_dir)) if cache_dir else loaded()


def _isa(isa: int) -> Isa | None:
    return None if isa < 0 else Isa(isa)


@torch.library.custom_op("moe_mk::cpu_experts_rows", mutates_args=(), device_types="cpu")
def cpu_experts_rows(
    x_RH: Tensor,
    x_scales_RX: Tensor | None,
    ids_RK: Tensor,
    weights_RK: Tensor | None,
    w13_LB: Tensor,
    w13_scales_LX: Tensor | None,
    w13_bias_LX: Tensor | None,
    w2_LB: Tensor,
    w2_scales_LX: Tensor | None,
    w2_bias_LX: Tensor | None,
    intermediate: int,
    gated: bool,
    block13: int,
    block2: int,
    activation: int,
    alpha: float,
    limit: float,
    quantize: int,
    batch_invariant: bool,
    threads: int,
    isa: int = -1,
    cache_dir: str = "",
    storage: int = -1,
    w13_output_scales_LX: Tensor | None = None,
    w2_output_scales_LX: Tensor | None = None,
) -> Tensor:
    """Fused experts on packed weights, see experts.experts_rows; H is x's.

    storage: the `Format` of both projections; -1: weights with scales are FP8, else bf16.
    """
    hidden = x_RH.shape[1]
    found = Format(storage) if storage >= 0 else Format.BF16 if w13_scales_LX is None else Format.FP8
    by_output = w13_output_scales_LX is not None and found is not Format.NVFP4
    layout13 = MatrixLayout(intermediate, hidden, gated, found, block13, by_output)
    layout2 = MatrixLayout(hidden, intermediate, False, found, block2, by_output)
    mode = ExpertsMode(Activation(activation), alpha, limit, Rounding(quantize), batch_invariant)
    return experts_rows(
        _native(cache_dir),
        x_RH,
        ids_RK,
        weights_RK,
        PackedMatrix(layout13, w13_LB, w13_scales_LX, w13_bias_LX, w13_output_scales_LX),
        PackedMatrix(layout2, w2_LB, w2_scales_LX, w2_bias_LX, w2_output_scales_LX),
        mode=mode,
        x_scales_RX=x_scales_RX,
        threads=threads,
        isa=_isa(isa),
    )


@cpu_experts_rows.register_fake
def _(x_RH: Tensor, *_others: object, **_named: object) -> Tensor:
    return x_RH.new_empty((x_RH.shape[0], x_RH.shape[1]), dtype=torch.bfloat16)


@torch.library.custom_op("moe_mk::cpu_route", mutates_args=(), device_types="cpu")
def cpu_route(
    x_TH: Tensor,
    gate_EH: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    scoring: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
    threads: int,
    isa: int = -1,
    cache_dir: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and grouped top-k, see route.route: ids, weights, logits."""
    mode = RouteMode(top_k, Scoring(scoring), num_groups, top_groups, renormalize, scale)
    return route(_native(cache_dir), x_TH, gate_EH, bias_E, mode, threads=threads, isa=_isa(isa))


@cpu_route.register_fake
def _(
    x_TH: Tensor, gate_EH: Tensor, bias_E: Tensor | None, top_k: int, *_others: object, **_named: object
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = x_TH.shape[0]
    ids_TK = x_TH.new_empty((tokens, top_k), dtype=torch.int32)
    return (
        ids_TK,
        x_TH.new_empty((tokens, top_k), dtype=torch.float32),
        x_TH.new_empty((tokens, gate_EH.shape[0]), dtype=torch.float32),
    )


@torch.library.custom_op("moe_mk::cpu_quantize_1x128", mutates_args=(), device_types="cpu")
def cpu_quantize_1x128(x_TH: Tensor, threads: int, isa: int = -1, cache_dir: str = "") -> tuple[Tensor, Tensor]:
    """Per-token 1x128 quantisation to e4m3, see quantize.quantize_1x128: values, scales."""
    return quantize_1x128(_native(cache_dir), x_TH, threads=threads, isa=_isa(isa))


@cpu_quantize_1x128.register_fake
def _(x_TH: Tensor, threads: int, isa: int = -1, cache_dir: str = "") -> tuple[Tensor, Tensor]:
    tokens, hidden = x_TH.shape
    values_TH = x_TH.new_empty((tokens, hidden), dtype=torch.float8_e4m3fn)
    return values_TH, x_TH.new_empty((tokens, (hidden + 127) // 128), dtype=torch.float32)
