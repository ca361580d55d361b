"""The grouped GEMMs compiled for sm_90 as their launches ask for them, each once in a process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS
from moe_mk.kernels.triton.tile import Tile

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled

TILES = dict.fromkeys(("order_ptr", "tiles_ptr", "count_ptr"), "*i32") | {"tiles_stride": "i32"}
STRIDES = dict.fromkeys(("x_stride", "x_scales_m", "x_scales_k", "h_scales_m", "h_scales_k"), "i32")
ALIGNED = ("k", "inner", "width", "x_stride", "rows_an_expert", "second")


def box(dtype: str, rows: int, columns: int) -> str:
    return f"tensordesc<{dtype}[{rows},{columns}]>"


DTYPES = {"plain": ("bf16", "bf16"), "fp8": ("fp8e4nv", "fp8e4nv"), "int8": ("i8", "i8"), "w_int8": ("bf16", "i8")}
DTYPES |= {"int8_block": ("i8", "i8"), "w_int8_block": ("bf16", "i8")}
DTYPES |= {
    "fp8_row": ("fp8e4nv", "fp8e4nv"),
    "w_fp8": ("bf16", "fp8e4nv"),
    "w_fp8_row": ("bf16", "fp8e4nv"),
    "w_mxfp8": ("bf16", "fp8e4nv"),
    "w_mxfp4": ("bf16", "u8"),
    "w_nvfp4": ("bf16", "u8"),
}
"""Of rows and of weights, by format."""


@cache
def w13(
    rows: int, *, swap: bool, warps: int, stages: int, gather: bool, format: str = "fp8", act: str = "silu",
    biased: bool = False, arch: int = 90,
) -> Compiled:  # fmt: skip
    from moe_mk.kernels.triton.grouped_w13 import _w13
    from tests.kernels.triton.sm90 import compile_for_hopper

    types, constants = _common(format, swap, biased=biased)
    dtype, width = DTYPES[format][0], box_of(format)
    types |= STRIDES | {"x_scales_ptr": "*fp32", "h_scales_ptr": "*fp32", "k": "i32", "inner": "i32"}
    types |= {"x": f"*{dtype}" if gather else box(dtype, rows, width)}
    types |= {"h_ptr": "*fp8e4nv" if format == "fp8" else "*bf16"}
    constants |= {"ROWS": rows, "TOP_K": 8}
    constants |= {"GATHER": gather, "EVEN": True, "ACTIVATION": act, "GATED": True, "POWER_OF_TWO": False}
    constants |= {"ALPHA": 1.702, "LIMIT": 0.0 if act == "silu" else 7.0}
    return compile_for_hopper(_w13, types, constants, aligned=ALIGNED, arch=arch, num_warps=warps, num_stages=stages)


@cache
def w2(rows: int, *, swap: bool, warps: int, stages: int, format: str = "fp8", biased: bool = False) -> Compiled:
    from moe_mk.kernels.triton.grouped_w2 import _w2
    from tests.kernels.triton.sm90 import compile_for_hopper

    types, constants = _common(format, swap, biased=biased)
    types |= {"h": box(DTYPES[format][0], rows, box_of(format)), "y_ptr": "*bf16"}
    types |= dict.fromkeys(("h_scales_ptr", "weights_ptr"), "*fp32")
    types |= dict.fromkeys(("k", "width", "h_scales_m", "h_scales_k"), "i32")
    constants |= {"ROWS": rows, "SCATTER": True, "WEIGHTED": True}
    return compile_for_hopper(_w2, types, constants, aligned=ALIGNED, num_warps=warps, num_stages=stages)


def box_of(format: str) -> int:
    return KERNEL_FORMATS[format].box


def _common(format: str, swap: bool, *, biased: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """What both GEMMs have of a format."""
    given = KERNEL_FORMATS[format]
    types = TILES | {"w": box(DTYPES[format][1], 128, given.box), "w_rows_ptr": "*fp32", "bias_ptr": "*fp32"}
    types |= {"w_scales_ptr": "*u8" if given.groups else "*fp32"}
    constants = {"STEP": given.step, "GROUPS": given.groups, "FORMAT": format, "SWAP": swap, "BIASED": biased}
    return types, constants | {"PROGRAMS": 132}


@cache
def by_hand(rows: int, *, second: bool, gather: bool, stages: int, act: str = "silu", arch: int = 90) -> Compiled:
    """The Gluon kernel: 128 rows of a tile are prefill, fewer decode."""
    from moe_mk.kernels.triton.gluon_gemms import CODES, _by_hand
    from tests.kernels.triton.sm90 import compile_for_hopper

    boxes, tokens = (f"tensordesc<fp8e4nv[{side},128],{CODES!r}>" for side in (128, rows))
    types = TILES | dict.fromkeys(("x_scales_ptr", "w_scales_ptr", "out_scales_ptr", "weights_ptr"), "*fp32")
    types |= {"x": "*fp8e4nv" if gather else tokens, "w": boxes, "out_ptr": "*bf16" if second else "*fp8e4nv"}
    names = "across steps rows_an_expert second width x_stride x_scales_m x_scales_k out_scales_m out_scales_k"
    types |= dict.fromkeys(names.split(), "i32")
    constants: dict[str, Any] = {"ROWS": rows, "STAGES": stages, "MODE": int(second), "GATHER": gather}
    constants |= {"TOP_K": 8, "PROGRAMS": 132, "SCATTER": second, "WEIGHTED": second, "POWER_OF_TWO": False}
    constants |= {"ACTIVATION": act, "ALPHA": 1.702, "LIMIT": 0.0 if act == "silu" else 7.0}
    return compile_for_hopper(_by_hand, types, constants, aligned=ALIGNED, gluon=True, arch=arch, num_warps=4)


def w13_of(format: str, tile: Tile, *, act: str = "silu", biased: bool = False) -> Compiled:
    shape = {"swap": tile.swap, "warps": tile.warps, "stages": tile.stages}
    return w13(tile.rows, **shape, gather=True, format=format, act=act, biased=biased)


def w2_of(format: str, tile: Tile, *, biased: bool = False) -> Compiled:
    return w2(tile.rows, swap=tile.swap, warps=tile.warps, stages=tile.stages, format=format, biased=biased)
