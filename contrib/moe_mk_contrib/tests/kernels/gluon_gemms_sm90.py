"""The Gluon GEMM compiled for sm_90 as its launches ask for it, each once in a process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from tests.kernels.triton.sm90_gemms import ANY, SIXTEENTH, TILES, Integers, split

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled


@cache
def by_hand(
    rows: int, *, second: bool, gather: bool, stages: int, act: str = "silu", reduced: bool = False, arch: int = 90
) -> Compiled:
    """The Gluon kernel: 128 rows of a tile are prefill, 64 the middle, fewer decode."""
    from moe_mk_contrib.gluon.gluon_gemms import CODES, _by_hand, weight_box

    from tests.kernels.triton.sm90 import compile_for_hopper

    boxes, tokens = (f"tensordesc<fp8e4nv[{side},128],{CODES!r}>" for side in (weight_box(rows), rows))
    types = TILES | dict.fromkeys(("x_scales_ptr", "w_scales_ptr", "out_scales_ptr", "weights_ptr"), "*fp32")
    types |= {"x": "*fp8e4nv" if gather else tokens, "w": boxes, "out_ptr": "*bf16" if second else "*fp8e4nv"}
    sizes, ones, aligned = split(integers_by_hand(second=second))
    types |= sizes
    constants: dict[str, Any] = ones | {"ROWS": rows, "STAGES": stages, "MODE": int(second), "GATHER": gather}
    constants |= {"TOP_K": 8, "PROGRAMS": 132, "SCATTER": second, "WEIGHTED": second, "POWER_OF_TWO": False}
    constants["REDUCED"] = reduced
    constants |= {"ACTIVATION": act, "ALPHA": 1.702, "LIMIT": 0.0 if act == "silu" else 7.0}
    return compile_for_hopper(_by_hand, types, constants, aligned=aligned, gluon=True, arch=arch, num_warps=4)


def integers_by_hand(*, second: bool) -> Integers:
    """The same of the Gluon kernel: 16 and 28 units across, 56 and 16 steps."""
    names = ("rows_an_expert", "second", "width", "x_stride", "out_scales_m")
    found: Integers = {"tiles_stride": ANY, "num": ANY, **dict.fromkeys(names, SIXTEENTH), "x_scales_k": 1}
    across, steps, out = (ANY, SIXTEENTH, SIXTEENTH) if second else (SIXTEENTH, ANY, 1)
    return found | {"across": across, "steps": steps, "x_scales_m": steps, "out_scales_k": out}
