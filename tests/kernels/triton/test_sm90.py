"""Every kernel compiles for sm_90, and the assembler made of it what its file promises. Needs triton, no GPU."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from moe_mk.kernels.triton.tile import SHARED_MEMORY, Tile
from tests.kernels.triton.sm90_gemms import w2, w13, w13_of
from tests.support.tiers import quick_where

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled

pytestmark = [pytest.mark.sm90, pytest.mark.slow]

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
}


def axes(name: str) -> tuple[Hashable, ...]:
    rows = re.search(r"\d+ rows", name)
    return name[:3], "as they lie" in name, rows and rows[0]


@pytest.mark.parametrize("name", quick_where(lambda name: False, FP8_KERNELS, axes))
def test_an_fp8_gemm_is_what_its_file_states(name: str) -> None:
    expect_fp8_gemm(name, FP8_KERNELS[name]())


def expect_fp8_gemm(name: str, built: Compiled) -> None:
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
        w13(rows, swap=swap, warps=warps, stages=stages, gather=True, format="plain"),
        w2(rows, swap=swap, warps=warps, stages=stages, format="plain"),
    ):
        assert built.instructions["HGMMA"] >= 4 and not built.instructions["QGMMA"]
        assert built.instructions["UTMALDG"] and not built.spills and built.shared < SHARED_MEMORY


@pytest.mark.parametrize("tile", [Tile(16, True, 4, 5), Tile(128, False, 8, 3)], ids=["decode", "prefill"])
def test_clamps_cost_an_fp8_gemm_no_spill(tile: Tile) -> None:
    """DeepSeek-V4's activation before FP8 rounding."""
    check_clamped(w13_of("fp8", tile, act="swiglu_limit"))


BARE: Mapping[str, Any] = {
    "16 rows": lambda reduced: w2(16, swap=True, warps=4, stages=5, reduced=reduced),
    "128 rows": lambda reduced: w2(128, swap=False, warps=8, stages=3, reduced=reduced),
}


@pytest.mark.parametrize("name", BARE)
def test_an_output_of_one_assignment_a_row_costs_the_second_product_no_step(name: str) -> None:
    """Rows of dropped assignments are zeroed outside of its loop, 16 bytes a thread."""
    expect_no_step(BARE[name](True), BARE[name](False))


def expect_no_step(built: Compiled, bare: Compiled) -> None:
    """UMOV is not counted: the number of copies between uniform registers differs by version of Triton."""
    assert built.spills == built.stack == built.scratch == 0 and built.shared < SHARED_MEMORY
    step, allowed = (each.step - each.in_step["UMOV"] for each in (built, bare))
    assert step <= allowed + 2 and built.products == bare.products
    assert built.stores[16] > bare.stores[16] and set(built.stores) == {16}


def check_clamped(built: Compiled) -> None:
    assert built.instructions["QGMMA"] >= 4 and not built.instructions["HMMA"]
    assert built.spills == built.stack == built.scratch == 0 and built.shared < SHARED_MEMORY


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
CHOICES: dict[str, Any] = {"TOP_K": 8, "SHARED": True}
SMALL_KERNELS: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    (
        "quantize_rows", "_quantize",
        {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
        {"GROUP": 128, "GROUPS": 8, "POWER_OF_TWO": False},
    ),
    (
        "quantize_rows", "_quantize_tokens",
        {"x_ptr": "*bf16", "values_ptr": "*i8", "scales_ptr": "*fp32", "fixed": "fp32"},
        {"COLUMNS": 8192, "INT8": True, "FIXED": False},
    ),
    (
        "quantize_rows", "_quantize_tokens",
        {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "fixed": "fp32"},
        {"COLUMNS": 8192, "INT8": False, "FIXED": False},
    ),
    ("align", "_align_small", WEIGHTS, {"STEP": 64, "TILE": 16, "SLOTS": 512, **CHOICES}),
    (
        "experts", "_prologue", WEIGHTS | {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
        {"STEP": 64, "TILE": 16, "SLOTS": 512, "GROUP": 128, "GROUPS": 8, "POWER_OF_TWO": False}
        | CHOICES,
    ),
    ("align", "_count", {}, {"CHUNK": 128, "SLOTS": 512, **CHOICES}),
    ("align", "_prefix_over_chunks", {}, {"SLOTS": 512, "COLUMNS": 8, "STEP": 128}),
    ("align", "_prefix_over_slots", {}, {"TILE": 128, "SLOTS": 512}),
    ("align", "_place", WEIGHTS, {"CHUNK": 128, "SLOTS": 512, **CHOICES}),
    ("tile_map", "_tile_map", {"counts_ptr": "*i64"}, {"TILE": 64, "SLOTS": 256, "BLOCKED": True}),
    (
        "permute", "_first_kept",
        {"out_ids_ptr": "*i32", "weights_ptr": "*fp32", "out_weights_ptr": "*fp32"},
        {"TOP_K": 8, "KS": 8, "MOST": 2, "ROWS": 32},
    ),
    (
        "permute", "_group_rows",
        dict.fromkeys(("weights_ptr", "out_weights_ptr"), "*fp32") | dict.fromkeys(("counts_ptr", "row_ptr"), "*i64")
        | dict.fromkeys(("x_ptr", "scales_ptr", "out_ptr", "out_scales_ptr"), "*u8"),
        {"TOP_K": 8, "BYTES": 4096, "NARROW": 256, "SCALED": True},
    ),
    (
        "permute", "_sum_rows",
        {"y_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16"},
        {"TOP_K": 8, "KS": 8, "WEIGHTED": True, "COLUMNS": 1024},
    ),
    (
        "experts", "_combine",
        {"y_ptr": "*bf16", "ids_ptr": "*i32", "weights_ptr": "*fp32", "out_ptr": "*bf16"},
        {"TOP_K": 8, "WEIGHTED": False, "COLUMNS": 1024},
    ),
    (
        "quantize_rows", "_activation_quantize",
        {"gate_up_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
        {"GROUP": 128, "GROUPS": 8, "ACTIVATION": "swiglu_oai", "POWER_OF_TWO": True, "ALPHA": 1.702, "LIMIT": 7.0},
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
    built = compile_for_hopper(kernel, types, constants, num_warps=4)
    assert built.spills == 0 and built.scratch == 0 and built.shared < SHARED_MEMORY // 4
