"""Every kernel compiles for sm_90, and the assembler made of it what its file promises. Needs triton, no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from moe_mk.kernels.triton.tile import SHARED_MEMORY

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled

pytestmark = pytest.mark.sm90

TILES = dict.fromkeys(("order_ptr", "tiles_ptr", "count_ptr"), "*i32") | {"tiles_stride": "i32"}
STRIDES = dict.fromkeys(("x_stride", "x_scales_m", "x_scales_k", "h_scales_m", "h_scales_k"), "i32")
ALIGNED = ("k", "inner", "width", "x_stride", "rows_an_expert", "second")


def box(dtype: str, rows: int, columns: int) -> str:
    return f"tensordesc<{dtype}[{rows},{columns}]>"


@cache
def w13(rows: int, *, swap: bool, warps: int, stages: int, gather: bool, fp8: bool = True) -> Compiled:
    from moe_mk.kernels.triton.grouped_w13 import _w13
    from tests.kernels.triton.sm90 import compile_for_hopper

    dtype, step = ("fp8e4nv", 128) if fp8 else ("bf16", 64)
    types = TILES | STRIDES | dict.fromkeys(("x_scales_ptr", "w_scales_ptr", "h_scales_ptr"), "*fp32")
    types |= {"x": f"*{dtype}" if gather else box(dtype, rows, step), "w": box(dtype, 128, step), "h_ptr": f"*{dtype}"}
    types |= {"k": "i32", "inner": "i32"}
    constants = {"ROWS": rows, "STEP": step, "TOP_K": 8, "PROGRAMS": 132, "SWAP": swap, "SCALED": fp8}
    constants |= {"GATHER": gather, "EVEN": True, "ACTIVATION": "silu", "GATED": True, "POWER_OF_TWO": False}
    return compile_for_hopper(_w13, types, constants, aligned=ALIGNED, num_warps=warps, num_stages=stages)


@cache
def w2(rows: int, *, swap: bool, warps: int, stages: int, fp8: bool = True) -> Compiled:
    from moe_mk.kernels.triton.grouped_w2 import _w2
    from tests.kernels.triton.sm90 import compile_for_hopper

    dtype, step = ("fp8e4nv", 128) if fp8 else ("bf16", 64)
    types = TILES | dict.fromkeys(("h_scales_ptr", "w_scales_ptr", "weights_ptr"), "*fp32")
    types |= {"h": box(dtype, rows, step), "w": box(dtype, 128, step), "y_ptr": "*bf16"}
    types |= dict.fromkeys(("k", "width", "h_scales_m", "h_scales_k"), "i32")
    constants = {"ROWS": rows, "STEP": step, "PROGRAMS": 132, "SWAP": swap, "SCALED": fp8}
    constants |= {"SCATTER": True, "WEIGHTED": True}
    return compile_for_hopper(_w2, types, constants, aligned=ALIGNED, num_warps=warps, num_stages=stages)


@cache
def by_hand(rows: int, *, second: bool, gather: bool, stages: int) -> Compiled:
    """A Gluon kernel: 128 rows of a tile are the prefill one, fewer the decode one."""
    from moe_mk.kernels.triton import gluon_decode, gluon_prefill
    from moe_mk.kernels.triton.gluon_parts import CODES
    from tests.kernels.triton.sm90 import compile_for_hopper

    kernel = gluon_prefill._dual if rows == 128 else gluon_decode._swapped
    boxes, tokens = (f"tensordesc<fp8e4nv[{side},128],{CODES!r}>" for side in (128, rows))
    types = TILES | dict.fromkeys(("x_scales_ptr", "w_scales_ptr", "out_scales_ptr", "weights_ptr"), "*fp32")
    types |= {"x": "*fp8e4nv" if gather else tokens, "w": boxes, "out_ptr": "*bf16" if second else "*fp8e4nv"}
    names = "across steps rows_an_expert second width x_stride x_scales_m x_scales_k out_scales_m out_scales_k"
    types |= dict.fromkeys(names.split(), "i32")
    constants: dict[str, Any] = {"ROWS": rows} if rows < 128 else {}
    constants |= {"TOP_K": 8, "PROGRAMS": 132, "STAGES": stages, "MODE": int(second), "GATHER": gather}
    constants |= {"SCATTER": second, "WEIGHTED": second, "POWER_OF_TWO": False}
    return compile_for_hopper(kernel, types, constants, aligned=ALIGNED, gluon=True, num_warps=4)


FP8_KERNELS: Mapping[str, Any] = {
    "w13 decode, 16 rows": lambda: w13(16, swap=True, warps=4, stages=5, gather=True),
    "w13 decode, 32 rows": lambda: w13(32, swap=True, warps=4, stages=4, gather=True),
    "w13 mid, 64 rows": lambda: w13(64, swap=False, warps=8, stages=4, gather=True),
    "w13 prefill, 128 rows": lambda: w13(128, swap=False, warps=8, stages=3, gather=True),
    "w13 prefill, rows as they lie": lambda: w13(128, swap=False, warps=8, stages=3, gather=False),
    "w2 decode, 16 rows": lambda: w2(16, swap=True, warps=4, stages=5),
    "w2 decode, 32 rows": lambda: w2(32, swap=True, warps=4, stages=4),
    "w2 mid, 64 rows": lambda: w2(64, swap=False, warps=8, stages=4),
    "w2 prefill, 128 rows": lambda: w2(128, swap=False, warps=8, stages=3),
    "w13 by hand, 8 rows": lambda: by_hand(8, second=False, gather=True, stages=6),
    "w13 by hand, 32 rows": lambda: by_hand(32, second=False, gather=True, stages=6),
    "w13 by hand, 128 rows": lambda: by_hand(128, second=False, gather=True, stages=4),
    "w13 by hand, rows as they lie": lambda: by_hand(128, second=False, gather=False, stages=4),
    "w2 by hand, 8 rows": lambda: by_hand(8, second=True, gather=False, stages=6),
    "w2 by hand, 128 rows": lambda: by_hand(128, second=True, gather=False, stages=4),
}


@pytest.mark.parametrize("name", FP8_KERNELS)
def test_an_fp8_gemm_is_what_its_file_says(name: str) -> None:
    built = FP8_KERNELS[name]()
    assert built.instructions["QGMMA"] >= 4, "the FP8 matrix unit of Hopper multiplies"
    assert not built.instructions["HMMA"] and not built.instructions["HGMMA"], "and nothing was widened to 16 bits"
    assert built.instructions["UTMALDG"] >= 2, "weights come through the tensor memory accelerator"
    gathers = name.startswith("w13") and "as they lie" not in name
    assert bool(built.instructions["LDGSTS"]) == gathers, "gathered rows are copied asynchronously, others are boxes"
    assert built.spills == built.stack == 0
    assert built.shared < SHARED_MEMORY
    assert built.scratch == 0, "a launch inside a captured graph allocates nothing"


@pytest.mark.parametrize("swap,rows,warps,stages", [(True, 16, 4, 5), (False, 128, 8, 3)])
def test_a_bf16_gemm_uses_the_same_frame(swap: bool, rows: int, warps: int, stages: int) -> None:
    for built in (
        w13(rows, swap=swap, warps=warps, stages=stages, gather=True, fp8=False),
        w2(rows, swap=swap, warps=warps, stages=stages, fp8=False),
    ):
        assert built.instructions["HGMMA"] >= 4 and not built.instructions["QGMMA"]
        assert built.instructions["UTMALDG"] and not built.spills and built.shared < SHARED_MEMORY


def test_without_swapping_few_rows_leave_the_fp8_matrix_unit() -> None:
    """Why SWAP is there: 16 rows on the left are widened to 16 bits and multiplied by the older unit."""
    built = w13(16, swap=False, warps=4, stages=3, gather=True)
    assert built.instructions["HMMA"] and not built.instructions["QGMMA"]


SMALL_KERNELS: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    (
        "quantize_rows", "_quantize",
        {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
        {"GROUP": 128, "GROUPS": 8, "POWER_OF_TWO": False},
    ),
    (
        "grouped_topk", "_grouped_topk",
        {"logits_ptr": "*fp32", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32", "factor": "fp32"},
        {
            "NUM_GROUPS": 8, "PER_GROUP": 32, "KEPT_GROUPS": 4, "TOP_K": 8, "GROUPS": 8, "WIDTH": 32, "KS": 8,
            "BIASED": True, "SOFTMAX": False, "RENORMALIZE": True, "ROUND_SCORES": False,
        },
    ),
    ("align", "_align_small", {}, {"PAIRS": 256, "STEP": 16, "TILE": 16, "SLOTS": 128}),
    ("align", "_count", {}, {"CHUNK": 128, "SLOTS": 512}),
    ("align", "_prefix_over_chunks", {}, {"SLOTS": 512, "COLUMNS": 8, "STEP": 128}),
    ("align", "_prefix_over_slots", {}, {"TILE": 128, "SLOTS": 512}),
    ("align", "_place", {}, {"CHUNK": 128, "SLOTS": 512}),
    ("tile_map", "_tile_map", {"counts_ptr": "*i64"}, {"TILE": 64, "SLOTS": 256, "BLOCKED": True}),
    (
        "combine", "_combine",
        {"y_ptr": "*bf16", "ids_ptr": "*i32", "weights_ptr": "*fp32", "out_ptr": "*bf16"},
        {"TOP_K": 8, "WEIGHTED": False, "COLUMNS": 1024},
    ),
    (
        "activation_quantize", "_activation_quantize",
        {"gate_up_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
        {"GROUP": 128, "GROUPS": 8, "ACTIVATION": "silu", "POWER_OF_TWO": True},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", SMALL_KERNELS, ids=lambda case: case[1])
def test_a_small_kernel_keeps_to_registers(case: tuple[str, str, dict[str, str], dict[str, Any]]) -> None:
    import importlib

    from tests.kernels.triton.sm90 import compile_for_hopper

    file, name, given, constants = case
    kernel = getattr(importlib.import_module(f"moe_mk.kernels.triton.{file}"), name)
    rest = [argument for argument in kernel.arg_names if argument not in constants]
    types = {argument: "*i32" if argument.endswith("_ptr") else "i32" for argument in rest} | given
    built = compile_for_hopper(kernel, types, constants, num_warps=1 if file == "grouped_topk" else 4)
    assert built.spills == 0 and built.scratch == 0 and built.shared < SHARED_MEMORY // 4
