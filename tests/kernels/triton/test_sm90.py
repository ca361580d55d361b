"""Every kernel compiles for sm_90, and the assembler made of it what its file promises. Needs triton, no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from moe_mk.experts.triton_tuning import BUILT_IN, DECODED
from moe_mk.kernels.triton.form import FORMS
from moe_mk.kernels.triton.tile import SHARED_MEMORY, Tile

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled

pytestmark = pytest.mark.sm90

TILES = dict.fromkeys(("order_ptr", "tiles_ptr", "count_ptr"), "*i32") | {"tiles_stride": "i32"}
STRIDES = dict.fromkeys(("x_stride", "x_scales_m", "x_scales_k", "h_scales_m", "h_scales_k"), "i32")
ALIGNED = ("k", "inner", "width", "x_stride", "rows_an_expert", "second")


def box(dtype: str, rows: int, columns: int) -> str:
    return f"tensordesc<{dtype}[{rows},{columns}]>"


DTYPES = {"plain": ("bf16", "bf16"), "fp8": ("fp8e4nv", "fp8e4nv"), "int8": ("i8", "i8"), "w_int8": ("bf16", "i8")}
DTYPES |= {
    "fp8_row": ("fp8e4nv", "fp8e4nv"),
    "w_fp8": ("bf16", "fp8e4nv"),
    "w_fp8_row": ("bf16", "fp8e4nv"),
    "w_mxfp8": ("bf16", "fp8e4nv"),
    "w_mxfp4": ("bf16", "u8"),
    "w_nvfp4": ("bf16", "u8"),
}
"""Of rows and of weights, by form."""


@cache
def w13(
    rows: int, *, swap: bool, warps: int, stages: int, gather: bool, form: str = "fp8", act: str = "silu",
    biased: bool = False,
) -> Compiled:  # fmt: skip
    from moe_mk.kernels.triton.grouped_w13 import _w13
    from tests.kernels.triton.sm90 import compile_for_hopper

    types, constants = _common(form, swap, biased=biased)
    dtype, width = DTYPES[form][0], box_of(form)
    types |= STRIDES | {"x_scales_ptr": "*fp32", "h_scales_ptr": "*fp32", "k": "i32", "inner": "i32"}
    types |= {"x": f"*{dtype}" if gather else box(dtype, rows, width)}
    types |= {"h_ptr": "*fp8e4nv" if form == "fp8" else "*bf16"}
    constants |= {"ROWS": rows, "TOP_K": 8}
    constants |= {"GATHER": gather, "EVEN": True, "ACTIVATION": act, "GATED": True, "POWER_OF_TWO": False}
    constants |= {"ALPHA": 1.702, "LIMIT": 0.0 if act == "silu" else 7.0}
    return compile_for_hopper(_w13, types, constants, aligned=ALIGNED, num_warps=warps, num_stages=stages)


@cache
def w2(rows: int, *, swap: bool, warps: int, stages: int, form: str = "fp8", biased: bool = False) -> Compiled:
    from moe_mk.kernels.triton.grouped_w2 import _w2
    from tests.kernels.triton.sm90 import compile_for_hopper

    types, constants = _common(form, swap, biased=biased)
    types |= {"h": box(DTYPES[form][0], rows, box_of(form)), "y_ptr": "*bf16"}
    types |= dict.fromkeys(("h_scales_ptr", "weights_ptr"), "*fp32")
    types |= dict.fromkeys(("k", "width", "h_scales_m", "h_scales_k"), "i32")
    constants |= {"ROWS": rows, "SCATTER": True, "WEIGHTED": True}
    return compile_for_hopper(_w2, types, constants, aligned=ALIGNED, num_warps=warps, num_stages=stages)


def box_of(form: str) -> int:
    return FORMS[form].box


def _common(form: str, swap: bool, *, biased: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """What both GEMMs have of a form."""
    given = FORMS[form]
    types = TILES | {"w": box(DTYPES[form][1], 128, given.box), "w_rows_ptr": "*fp32", "bias_ptr": "*fp32"}
    types |= {"w_scales_ptr": "*u8" if given.groups else "*fp32"}
    constants = {"STEP": given.step, "GROUPS": given.groups, "FORM": form, "SWAP": swap, "BIASED": biased}
    return types, constants | {"PROGRAMS": 132}


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
        w13(rows, swap=swap, warps=warps, stages=stages, gather=True, form="plain"),
        w2(rows, swap=swap, warps=warps, stages=stages, form="plain"),
    ):
        assert built.instructions["HGMMA"] >= 4 and not built.instructions["QGMMA"]
        assert built.instructions["UTMALDG"] and not built.spills and built.shared < SHARED_MEMORY


FORM_TILES = {"int8": BUILT_IN, "fp8_row": BUILT_IN}
FORM_TILES |= dict.fromkeys(("w_fp8", "w_fp8_row", "w_int8", "w_mxfp8", "w_mxfp4", "w_nvfp4"), DECODED)
UNITS = {"int8": "IGMMA", "fp8_row": "QGMMA"}
"""Of the matrix unit where both sides are codes; decoded weights are multiplied in 16 bits."""


def check_form(form: str, built: Compiled, *, swap: bool) -> None:
    assert built.instructions[UNITS.get(form, "HGMMA")] >= 4
    assert not built.instructions["HMMA"] and not built.instructions["IMMA"]
    assert built.instructions["UTMALDG"], "weights travel at the size they are stored in"
    assert built.spills == built.stack == built.scratch == 0 and built.shared < SHARED_MEMORY
    if swap and form not in UNITS:
        assert built.instructions["STS"] <= 8, "decoded weights stay in registers"


@pytest.mark.parametrize("form", FORM_TILES)
def test_every_type_of_weights_is_decoded_on_the_way_to_the_matrix_unit(form: str) -> None:
    decode, prefill = FORM_TILES[form][0][1], FORM_TILES[form][-1][1]
    check_form(form, w13_of(form, decode), swap=True)
    check_form(form, w2_of(form, decode), swap=True)
    check_form(form, w13_of(form, prefill), swap=False)


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 2, 3], ids=["few rows", "mid", "prefill"])
@pytest.mark.parametrize("form", FORM_TILES)
def test_so_it_is_at_every_tile(form: str, place: int) -> None:
    tile = FORM_TILES[form][place][1]
    check_form(form, w13_of(form, tile), swap=tile.swap)
    check_form(form, w2_of(form, tile), swap=tile.swap)


@pytest.mark.parametrize("place", [1, -1], ids=["decode", "prefill"])
def test_biases_and_clamps_cost_no_spill(place: int) -> None:
    """gpt-oss: MXFP4, biases of both products, SwiGLU behind clamps."""
    tile = FORM_TILES["w_mxfp4"][place][1]
    check_form("w_mxfp4", w13_of("w_mxfp4", tile, act="swiglu_oai", biased=True), swap=tile.swap)
    check_form("w_mxfp4", w2_of("w_mxfp4", tile, biased=True), swap=tile.swap)


@pytest.mark.parametrize("tile", [Tile(16, True, 4, 5), Tile(128, False, 8, 3)], ids=["decode", "prefill"])
def test_clamps_cost_an_fp8_gemm_no_spill(tile: Tile) -> None:
    """DeepSeek-V4's activation before FP8 rounding."""
    built = w13_of("fp8", tile, act="swiglu_limit")
    assert built.instructions["QGMMA"] >= 4 and not built.instructions["HMMA"]
    assert built.spills == built.stack == built.scratch == 0


def w13_of(form: str, tile: Tile, *, act: str = "silu", biased: bool = False) -> Compiled:
    return w13(
        tile.rows, swap=tile.swap, warps=tile.warps, stages=tile.stages, gather=True, form=form, act=act, biased=biased
    )


def w2_of(form: str, tile: Tile, *, biased: bool = False) -> Compiled:
    return w2(tile.rows, swap=tile.swap, warps=tile.warps, stages=tile.stages, form=form, biased=biased)


def test_kernels_of_a_chain_wait_for_the_one_before_and_let_the_next_start() -> None:
    """Programmatic dependent launch; in PTX the wait stands before the first load."""
    for built in (w13(16, swap=True, warps=4, stages=5, gather=True), w2(16, swap=True, warps=4, stages=5)):
        body = built.ptx[built.ptx.index("{") :]
        wait, trigger = (body.index(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents"))
        assert wait < trigger < body.index("ld.global")
        assert built.instructions["ACQBULK"] == built.instructions["PREEXIT"] == 1


def test_without_swapping_few_rows_leave_the_fp8_matrix_unit() -> None:
    """Why SWAP is there: 16 rows on the left are widened to 16 bits and multiplied by the older unit."""
    built = w13(16, swap=False, warps=4, stages=3, gather=True)
    assert built.instructions["HMMA"] and not built.instructions["QGMMA"]


WEIGHTS = {"weights_ptr": "*fp32", "all_weights_ptr": "*fp32"}
CHOICES: dict[str, Any] = {"TOP_K": 8, "BESIDE": True}
SMALL_KERNELS: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    (
        "quantize_rows", "_quantize",
        {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
        {"GROUP": 128, "GROUPS": 8, "POWER_OF_TWO": False},
    ),
    (
        "quantize_rows", "_quantize_int8",
        {"x_ptr": "*bf16", "values_ptr": "*i8", "scales_ptr": "*fp32"}, {"COLUMNS": 8192},
    ),
    (
        "quantize_rows", "_quantize_fp8",
        {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "fixed": "fp32"},
        {"COLUMNS": 8192, "FIXED": False},
    ),
    (
        "grouped_topk", "_grouped_topk",
        {"logits_ptr": "*fp32", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32", "factor": "fp32"},
        {
            "NUM_GROUPS": 8, "PER_GROUP": 32, "KEPT_GROUPS": 4, "TOP_K": 8, "GROUPS": 8, "WIDTH": 32, "KS": 8,
            "BIASED": True, "SOFTMAX": False, "RENORMALIZE": True, "ROUND_SCORES": False,
        },
    ),
    ("align", "_align_small", WEIGHTS, {"PAIRS": 256, "STEP": 16, "TILE": 16, "SLOTS": 128, **CHOICES}),
    (
        "prologue", "_prologue", WEIGHTS | {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
        {"PAIRS": 256, "STEP": 16, "TILE": 16, "SLOTS": 128, "GROUP": 128, "GROUPS": 8, "POWER_OF_TWO": False}
        | CHOICES,
    ),
    ("align", "_count", {}, {"CHUNK": 128, "SLOTS": 512, **CHOICES}),
    ("align", "_prefix_over_chunks", {}, {"SLOTS": 512, "COLUMNS": 8, "STEP": 128}),
    ("align", "_prefix_over_slots", {}, {"TILE": 128, "SLOTS": 512}),
    ("align", "_place", WEIGHTS, {"CHUNK": 128, "SLOTS": 512, **CHOICES}),
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
