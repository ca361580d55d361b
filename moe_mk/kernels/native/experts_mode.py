"""The modes of the native experts, and checks of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum

import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.packed import PackedMatrix


class Activation(IntEnum):
    """`Activation` of csrc/abi.h; gated kinds multiply by `up`, SWIGLU_OAI by `up + 1`.

    SILU_LIMIT clamps the gate after SiLU, others before it; the limits of SITU are those of tanh.
    """

    SILU = 0
    GELU_ERF = 1
    GELU_TANH = 2
    RELU2 = 3
    SWIGLU_OAI = 4
    SILU_LIMIT = 5
    SITU = 6


class Rounding(IntEnum):
    """`Rounding` of csrc/abi.h: the quantisation of x and h before their products."""

    NONE = 0
    FP8 = 1
    """e4m3 with one scale per 128 values, as FP8 GPU kernels: for parity tests; slower and less exact."""
    INT8 = 2
    """INT8 with one scale per row, multiplied with INT8 weights in exact integer arithmetic."""
    FP8_UE8M0 = 3
    """FP8 with scales rounded up to powers of two."""
    INT8_PARTS = 4
    """INT8 with one scale per group of the weights, of at most 128 values, multiplied with INT4, INT8 groups, Q4_0,
    Q4_1, Q8_0 and Q4_K as integers. h is not rounded for a w2 of another format."""


INT8_PART_FORMATS = frozenset({Format.INT4, Format.INT8_GROUPS, Format.Q4_K})
"""Formats whose codes are multiplied with rows that are rounded to INT8 in groups (`csrc/int8_parts.h`)."""

LIMITS: Mapping[str, tuple[int, int]] = {
    "panel_rows": (1, 5),
    "task_pairs": (1, 16),
    "prefetch_bytes": (64, 16384),
    "gather_kib": (128, 4096),
    "streamed_rows": (16, 256),
    "tile_rows": (1, 256),
}
"""The limits of the parameters of a Tuning, which csrc/experts.cpp checks too."""


@dataclass(frozen=True)
class Tuning:
    """Tuning parameters for a machine and a number of rows; 0: built-in value. Results do not depend on them.

    panel_rows: rows of an expert from which its weights are decoded into a panel first instead of being multiplied
    straight from memory; used where both give the same bits (AVX-512, weights without group scales).
    task_pairs: the most pairs of 16 columns in a task. prefetch_bytes: prefetch distance of a stream of weights.
    gather_kib: memory for rows gathered at a time, part of a core's L2. streamed_rows: rows of an expert up to which
    AMX keeps panels of weights in L1; above, in L2, decoded once for all rows. tile_rows: rows of an expert from which
    INT8 rows are multiplied by AMX tiles.
    Raises ConfigError with every parameter out of range.
    """

    panel_rows: int = 0
    task_pairs: int = 0
    prefetch_bytes: int = 0
    gather_kib: int = 0
    streamed_rows: int = 0
    tile_rows: int = 0

    def __post_init__(self) -> None:
        wrong = []
        for each in fields(self):
            value, (least, most) = getattr(self, each.name), LIMITS[each.name]
            if type(value) is not int or not (value == 0 or least <= value <= most):
                wrong.append(f"{each.name} {value!r} is neither 0 (built in) nor from {least} to {most}")
        if wrong:
            raise ConfigError("cpu experts: " + "; ".join(wrong))


@dataclass(frozen=True)
class ExpertsMode:
    """The computation of the experts.

    alpha: the sigmoid's factor of SWIGLU_OAI. limit: gate is clamped from above, up from both sides; 0: no clamp.
    quantize: the quantisation of x and h; INT8 requires INT8 weights, INT8_PARTS integers in groups or Q4_K.
    batch_invariant: the result of a row does not depend on other rows of the batch. For weights without group scales it
    never does. Slower for floats with such scales on AVX-512 (up to four rows per expert), and for INT4, INT8 groups
    and ggml blocks on AMX (up to 32).
    tuning: parameters that affect only the time.
    """

    activation: Activation = Activation.SILU
    alpha: float = 1.702
    limit: float = 0.0
    quantize: Rounding = Rounding.NONE
    batch_invariant: bool = False
    tuning: Tuning = Tuning()


def check_call(
    mode: ExpertsMode,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    matrices: tuple[PackedMatrix, ...],
) -> None:
    """Raise ShapeError with everything wrong with the tensors of one call; matrices: w13, w2, and the shared ones."""
    (rows, hidden), (w13, w2) = x.shape, matrices[:2]
    wrong = _wrong_with_rounding(mode, x, x_scales, matrices)
    if hidden != w13.layout.num_inputs:
        wrong.append(f"x has H={hidden}, the weights have H={w13.layout.num_inputs}")
    if ids.dtype != torch.int32 or ids.dim() != 2 or ids.shape[0] != rows:
        wrong.append(f"ids is {tuple(ids.shape)} {ids.dtype}, expected ({rows}, K) int32")
    if weights is not None and (weights.dtype != torch.float32 or weights.shape != ids.shape):
        wrong.append(f"weights is {tuple(weights.shape)} {weights.dtype}, expected {tuple(ids.shape)} float32")
    if w13.num_slots != w2.num_slots or w2.layout.num_inputs != w13.layout.num_outputs:
        wrong.append(
            f"w13 has {w13.num_slots} slots and I={w13.layout.num_outputs}, "
            f"w2 has {w2.num_slots} and I={w2.layout.num_inputs}"
        )
    if wrong:
        raise ShapeError("cpu experts: " + "; ".join(wrong))


def _wrong_with_rounding(
    mode: ExpertsMode, x: torch.Tensor, x_scales: torch.Tensor | None, matrices: tuple[PackedMatrix, ...]
) -> list[str]:
    integers, (rows, hidden) = mode.quantize in (Rounding.INT8, Rounding.INT8_PARTS), x.shape
    coded, each = (torch.int8, 1) if integers else (torch.float8_e4m3fn, -(-hidden // 128))
    if mode.quantize == Rounding.INT8_PARTS:
        each = -(-hidden // (matrices[0].layout.part or 128))
    wrong = []
    if x.dtype != (torch.bfloat16 if x_scales is None else coded):
        which = "without" if x_scales is None else "with"
        wrong.append(f"x is {x.dtype} {which} scales; bf16 goes without, {'int8' if integers else 'e4m3'} with")
    if x_scales is not None and (x_scales.dtype != torch.float32 or tuple(x_scales.shape) != (rows, each)):
        wrong.append(f"x_scales is {tuple(x_scales.shape)} {x_scales.dtype}, expected {(rows, each)} float32")
    return wrong + wrong_formats(mode, matrices)


def wrong_formats(mode: ExpertsMode, matrices: tuple[PackedMatrix, ...]) -> list[str]:
    """Why the weights cannot be multiplied with rows that are rounded to INT8; empty if they can.

    matrices: w13, w2, and those of the shared experts.
    """
    wrong, formats = [], {matrix.layout.format for matrix in matrices}
    if mode.quantize == Rounding.INT8 and formats != {Format.INT8}:
        wrong.append("rows are rounded to INT8, which only INT8 weights multiply")
    if mode.quantize == Rounding.INT8_PARTS:
        read_x = {matrix.layout.format for matrix in (matrices[0], *matrices[2:3])}
        names = ", ".join(sorted(found.name for found in read_x - INT8_PART_FORMATS))
        if names:
            wrong.append(f"rows are rounded to INT8 in groups, which {names} weights do not multiply")
        elif len({matrix.layout.row_order for matrix in (matrices[0], *matrices[2:3])}) > 1:
            wrong.append("rows are rounded to INT8 in groups, which differ between routed and shared experts")
    return wrong


def check_shared(shared: tuple[PackedMatrix, PackedMatrix], w13: PackedMatrix, w2: PackedMatrix) -> None:
    """Raise ShapeError with all mismatches between shared and routed experts."""
    first, second = shared
    wrong = []
    if (first.num_slots, second.num_slots) != (1, 1):
        wrong.append(f"they have {first.num_slots} and {second.num_slots} slots, expected one")
    if first.layout.num_inputs != w13.layout.num_inputs or second.layout.num_outputs != w2.layout.num_outputs:
        sizes = f"H={first.layout.num_inputs} in and {second.layout.num_outputs} out"
        wrong.append(f"they have {sizes}, the routed ones {w13.layout.num_inputs} and {w2.layout.num_outputs}")
    if second.layout.num_inputs != first.layout.num_outputs:
        wrong.append(f"their w13 has I={first.layout.num_outputs}, their w2 I={second.layout.num_inputs}")
    if first.layout.gated != w13.layout.gated:
        wrong.append(f"gated={first.layout.gated}, the routed ones gated={w13.layout.gated}")
    if wrong:
        raise ShapeError("cpu experts, shared: " + "; ".join(wrong))
