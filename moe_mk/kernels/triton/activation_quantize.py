"""Activation and quantisation in one pass, for experts whose first GEMM is a library's: act(gate) * up, then e4m3.

Reads (m, 2 i) gate columns then up columns, writes values (m, i) fp8 and scales (m, i / group) f32. Moves
m (4 i + i + 4 i / group) bytes of bf16 input.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.grouped_w13 import CLAMPED
from moe_mk.kernels.triton.numerics import hidden_of, scale_of, to_e4m3

GROUPS_A_PROGRAM = 8


def activation_quantize(
    gate_up: Tensor,
    name: str,
    group: int,
    *,
    power_of_two: bool = False,
    column_major: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """act(gate) * up in f32, each 1 x group piece quantised by its own largest magnitude.

    alpha, limit: of the clamped activations; others ignore them.
    """
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    groups = triton.cdiv(width, group)
    values = torch.empty((m, width), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty((groups, m) if column_major else (m, groups), dtype=torch.float32, device=gate_up.device)
    scales = scales.T if column_major else scales
    if values.numel():
        _activation_quantize[(m, triton.cdiv(groups, GROUPS_A_PROGRAM))](
            gate_up, values, scales, width, gate_up.stride(0), scales.stride(0), scales.stride(1),
            GROUP=group, GROUPS=GROUPS_A_PROGRAM, ACTIVATION=name, POWER_OF_TWO=power_of_two, ALPHA=alpha,
            LIMIT=(limit or 0.0) if name in CLAMPED else 0.0, num_warps=4,
        )  # fmt: skip
    return values, scales


@triton.jit(do_not_specialize=["scale_stride_m", "scale_stride_k"])
def _activation_quantize(
    gate_up_ptr, values_ptr, scales_ptr, width, stride, scale_stride_m, scale_stride_k,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ACTIVATION: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    gate = tl.load(gate_up_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    hidden = hidden_of(gate, up, ACTIVATION, ALPHA, LIMIT, True)
    scale = scale_of(tl.max(tl.abs(hidden), axis=1), POWER_OF_TWO)
    value = to_e4m3(tl.div_rn(hidden, tl.broadcast_to(scale[:, None], [GROUPS, GROUP])))
    tl.store(values_ptr + row * width + column, value, mask=inside)
    tl.store(scales_ptr + row * scale_stride_m + group * scale_stride_k, scale, mask=group * GROUP < width)
