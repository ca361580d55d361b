"""Quantise activations: to FP8 e4m3, one scale for every group of columns of a row; to FP8 or INT8, one scale a row.

Reads x (m, k) once, writes values (m, k) fp8 and one f32 scale a group. Moves
3 m k + 4 m k / group bytes of bf16 input; with an activation before it, whose input is (m, 2 k), 5 m k + 4 m k / group.
Equal to the reference bit for bit: the divisions are IEEE divisions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.grouped_w13 import CLAMPED
from moe_mk.kernels.triton.launch import after_the_one_before, chained
from moe_mk.kernels.triton.numerics import hidden_of, scale_of, to_e4m3

GROUPS_A_PROGRAM = 8


def quantize_rows_into(x: Tensor, values: Tensor, scales: Tensor, group: int, *, power_of_two: bool = False) -> None:
    """Quantise each 1 x group piece of a row by its own largest magnitude. group: a power of two."""
    m, k = x.shape
    if m == 0:
        return
    grid = (m, triton.cdiv(triton.cdiv(k, group), GROUPS_A_PROGRAM))
    _quantize[grid](
        x, values, scales, k, x.stride(0), values.stride(0), scales.stride(0), scales.stride(1),
        GROUP=group, GROUPS=GROUPS_A_PROGRAM, POWER_OF_TWO=power_of_two, num_warps=4, **chained(),
    )  # fmt: skip


@triton.jit
def quantize_part(
    row, part, x_ptr, values_ptr, scales_ptr, k, x_stride, values_stride, scale_stride_m, scale_stride_k,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of one row."""
    group = part * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < k
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), axis=1), POWER_OF_TWO)
    value = to_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], [GROUPS, GROUP])))
    tl.store(values_ptr + row * values_stride + column, value, mask=inside)
    tl.store(scales_ptr + row * scale_stride_m + group * scale_stride_k, scale, mask=group * GROUP < k)


@triton.jit(do_not_specialize=["scale_stride_m", "scale_stride_k"])
def _quantize(
    x_ptr, values_ptr, scales_ptr, k, x_stride, values_stride, scale_stride_m, scale_stride_k,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    quantize_part(
        tl.program_id(0).to(tl.int64), tl.program_id(1), x_ptr, values_ptr, scales_ptr, k, x_stride, values_stride,
        scale_stride_m, scale_stride_k, GROUP, GROUPS, POWER_OF_TWO,
    )  # fmt: skip


def quantize_tokens(x: Tensor, values: Tensor, scales_M1: Tensor, *, fixed: float | None = None) -> None:
    """Each row of x (m, k) to e4m3 or INT8, by its own largest magnitude over 448 or 127, or e4m3 by a static scale.

    Rows of zeros get a scale of 1 in INT8.
    """
    m, k = x.shape
    if m:
        _quantize_tokens[(m,)](
            x, values, scales_M1, fixed or 0.0, k, x.stride(0), values.stride(0), INT8=values.dtype is torch.int8,
            FIXED=fixed is not None, COLUMNS=triton.next_power_of_2(k), num_warps=8, **chained(),
        )  # fmt: skip


@triton.jit
def _quantize_tokens(
    x_ptr, values_ptr, scales_ptr, fixed, k, x_stride, values_stride,
    INT8: tl.constexpr, FIXED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < k, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), axis=0)
    if INT8:
        scale = tl.where(amax > 0.0, tl.maximum(tl.div_rn(amax, 127.0), 1.1754943508222875e-38), 1.0)
    elif FIXED:
        scale = tl.sum(tl.zeros([COLUMNS], tl.float32), axis=0) + fixed
    else:
        scale = scale_of(amax, False)
    value = tl.div_rn(x, tl.broadcast_to(scale, [COLUMNS]))
    if INT8:
        # Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
        value = tl.minimum(tl.maximum((value + 12582912.0) - 12582912.0, -127.0), 127.0)
    tl.store(values_ptr + row * values_stride + column, value.to(tl.int8) if INT8 else to_e4m3(value), mask=column < k)
    tl.store(scales_ptr + row, scale)


def activation_quantize(
    gate_up: Tensor,
    name: str,
    group: int,
    *,
    power_of_two: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """act(gate) * up of (m, 2 i) in f32, each 1 x group piece quantised: for experts whose first GEMM is a library's.

    gate_up: gate columns, then up columns. alpha, limit: of the clamped activations; others ignore them.
    """
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    groups = triton.cdiv(width, group)
    values = torch.empty((m, width), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty((m, groups), dtype=torch.float32, device=gate_up.device)
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
