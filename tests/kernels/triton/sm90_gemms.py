"""The grouped GEMMs compiled for sm_90 as their launches ask for them, each once in a process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS, KernelFormat
from moe_mk.kernels.triton.tile import Tile

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled

TILES = dict.fromkeys(("order_ptr", "tiles_ptr", "count_ptr"), "*i32")
ANY, SIXTEENTH = "any", "a multiple of 16"
Integers = dict[str, int | str]
"""By argument: ANY, SIXTEENTH, or the value 1, which Triton compiles in."""


def is_after_3_6() -> bool:
    """Whether Triton is newer than 3.6, with which the recorded figures were taken."""
    return tuple(map(int, version("triton").split(".")[:2])) > (3, 6)


def integers(kernel: str, format: str) -> Integers:
    """How a launch at the sizes of DeepSeek-V3 specialises the integers of a GEMM; a test binds launches and compares.
    Scales of 128 columns are (rows, 56) before the first product and (rows, 16) before the second one, those of a token
    (rows, 1). Without scales the rows themselves stand in, and strides of absent results are 0."""
    given = format_of(format)
    found: Integers = {"tiles_stride": ANY, "k": SIXTEENTH}
    found |= {"num": ANY} if kernel == "_w2" else {}
    if kernel == "_w13":
        found |= {"inner": SIXTEENTH, "x_stride": SIXTEENTH, "x_scales_m": SIXTEENTH, "x_scales_k": 1}
        found |= {"h_scales_m": SIXTEENTH, "h_scales_k": 1 if given.by_group else SIXTEENTH}
        if given.by_group or given.by_token:
            found["x_scales_m"] = ANY if given.by_group else 1
        return found
    found |= {"width": SIXTEENTH, "h_scales_m": SIXTEENTH, "h_scales_k": SIXTEENTH}
    if given.by_token:
        return found | {"h_scales_m": 1, "h_scales_k": 1}
    return found | {"h_scales_k": 1} if given.by_group else found


def split(found: Integers) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Types of the arguments that remain, constants, and aligned arguments."""
    types = {name: "i32" for name, kind in found.items() if kind != 1}
    constants: dict[str, Any] = {name: 1 for name, kind in found.items() if kind == 1}
    return types, constants, [name for name, kind in found.items() if kind == SIXTEENTH]


def box(dtype: str, rows: int, columns: int) -> str:
    return f"tensordesc<{dtype}[{rows},{columns}]>"


DTYPES = {"plain": ("bf16", "bf16"), "fp8": ("fp8e4nv", "fp8e4nv"), "int8": ("i8", "i8"), "w_int8": ("bf16", "i8")}
DTYPES |= {"int8_block": ("i8", "i8"), "w_int8_block": ("bf16", "i8")}
DTYPES |= {
    "fp8_row": ("fp8e4nv", "fp8e4nv"),
    "w_fp8": ("bf16", "fp8e4nv"),
    "w_fp8_row": ("bf16", "fp8e4nv"),
    "w_mxfp8": ("bf16", "fp8e4nv"),
    "mxfp4": ("fp8e4nv", "u8"),
    "w_mxfp4": ("bf16", "u8"),
    "w_nvfp4": ("bf16", "u8"),
    **dict.fromkeys(("w_int4", "w_int4_zero", "w_int8_group", "w_int8_zero"), ("bf16", "u8")),
}
"""Of rows and of weights, by format."""
INTEGER_SCALES = {"w_int4": "*bf16", "w_int8_group": "*bf16", "w_int4_zero": "*i32", "w_int8_zero": "*i32"}


@cache
def w13(
    rows: int, *, swap: bool, warps: int, stages: int, gather: bool, format: str = "fp8", act: str = "silu",
    biased: bool = False, arch: int = 90,
) -> Compiled:  # fmt: skip
    from moe_mk.kernels.triton.grouped_w13 import _w13
    from tests.kernels.triton.sm90 import compile_for_hopper

    types, constants = _common(format, swap, biased=biased)
    given = format_of(format)
    dtype, width = DTYPES[given.name][0], given.row_box
    sizes, ones, aligned = split(integers("_w13", format))
    types |= sizes | {"x_scales_ptr": "*fp32", "h_scales_ptr": "*fp32"}
    types |= {"x": f"*{dtype}" if gather else box(dtype, rows, width)}
    types |= {"h_ptr": "*fp8e4nv" if format_of(format).by_group else "*bf16"}
    constants |= ones | {"ROWS": rows, "TOP_K": 8}
    constants |= {"GATHER": gather, "EVEN": True, "ACTIVATION": act, "GATED": True, "POWER_OF_TWO": False}
    constants |= {"ALPHA": 1.702, "LIMIT": 0.0 if act == "silu" else 7.0}
    return compile_for_hopper(_w13, types, constants, aligned=aligned, arch=arch, num_warps=warps, num_stages=stages)


@cache
def w2(
    rows: int, *, swap: bool, warps: int, stages: int, format: str = "fp8", biased: bool = False, reduced: bool = False
) -> Compiled:
    from moe_mk.kernels.triton.grouped_w2 import _w2
    from tests.kernels.triton.sm90 import compile_for_hopper

    types, constants = _common(format, swap, biased=biased)
    types |= {"h": box(DTYPES[format_of(format).name][0], rows, format_of(format).row_box), "y_ptr": "*bf16"}
    types |= dict.fromkeys(("h_scales_ptr", "weights_ptr"), "*fp32")
    sizes, ones, aligned = split(integers("_w2", format))
    types |= sizes
    constants |= ones | {"ROWS": rows, "SCATTER": True, "WEIGHTED": True, "REDUCED": reduced}
    return compile_for_hopper(_w2, types, constants, aligned=aligned, num_warps=warps, num_stages=stages)


def format_of(name: str) -> KernelFormat:
    """A format by its name; "w_int4/128" has groups of 128."""
    name, _, group = name.partition("/")
    return replace(KERNEL_FORMATS[name], group=int(group)) if group else KERNEL_FORMATS[name]


def _common(format: str, swap: bool, *, biased: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """What both GEMMs have of a format."""
    given = format_of(format)
    types = TILES | {"w": box(DTYPES[given.name][1], 128, given.box), "w_rows_ptr": "*fp32", "bias_ptr": "*fp32"}
    types |= {"w_scales_ptr": INTEGER_SCALES.get(given.name, "*u8" if given.groups else "*fp32")}
    constants = {"STEP": given.step, "GROUPS": given.groups, "FORMAT": given.name, "SWAP": swap, "BIASED": biased}
    return types, constants | {"PROGRAMS": 132}


def w13_of(format: str, tile: Tile, *, act: str = "silu", biased: bool = False) -> Compiled:
    shape = {"swap": tile.swap, "warps": tile.warps, "stages": tile.stages}
    return w13(tile.rows, **shape, gather=True, format=format, act=act, biased=biased)


def w2_of(format: str, tile: Tile, *, biased: bool = False) -> Compiled:
    return w2(tile.rows, swap=tile.swap, warps=tile.warps, stages=tile.stages, format=format, biased=biased)
