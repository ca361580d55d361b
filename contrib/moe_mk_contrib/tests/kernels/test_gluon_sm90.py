"""The Gluon kernels compile for sm_90, and the assembler made of them what their files promise. No GPU needed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from contrib.moe_mk_contrib.tests.kernels.gluon_gemms_sm90 import by_hand, integers_by_hand
from moe_mk.kernels.triton.tile import Tile, engines_for
from tests.kernels.triton.no_driver import empty_experts, rows_through
from tests.kernels.triton.test_launched_integers import Launched, launched
from tests.kernels.triton.test_sm90 import check_clamped, expect_fp8_gemm, expect_no_step
from tests.kernels.triton.test_specializations import keys, layer

__all__ = ["keys", "launched"]
pytestmark = [pytest.mark.sm90, pytest.mark.slow]

KERNELS: Mapping[str, Any] = {
    "w13 by hand, 8 rows": lambda: by_hand(8, second=False, gather=True, stages=6),
    "w13 by hand, 32 rows": lambda: by_hand(32, second=False, gather=True, stages=6),
    "w13 by hand, 64 rows": lambda: by_hand(64, second=False, gather=True, stages=5),
    "w13 by hand, 64 rows as they lie": lambda: by_hand(64, second=False, gather=False, stages=5),
    "w13 by hand, 128 rows": lambda: by_hand(128, second=False, gather=True, stages=4),
    "w13 by hand, rows as they lie": lambda: by_hand(128, second=False, gather=False, stages=4),
    "w2 by hand, 8 rows": lambda: by_hand(8, second=True, gather=False, stages=6),
    "w2 by hand, 64 rows": lambda: by_hand(64, second=True, gather=False, stages=5),
    "w2 by hand, 128 rows": lambda: by_hand(128, second=True, gather=False, stages=4),
}


@pytest.mark.parametrize("name", KERNELS)
def test_an_fp8_gemm_is_what_its_file_states(name: str) -> None:
    expect_fp8_gemm(name, KERNELS[name]())


@pytest.mark.parametrize("rows,stages", [(8, 6), (64, 5), (128, 4)])
def test_an_output_of_one_assignment_a_row_costs_the_second_product_no_step(rows: int, stages: int) -> None:
    built, bare = (by_hand(rows, second=True, gather=False, stages=stages, reduced=each) for each in (True, False))
    expect_no_step(built, bare)


@pytest.mark.parametrize("act", ["swiglu_limit", pytest.param("swiglu_oai", marks=pytest.mark.stress)])
@pytest.mark.parametrize(
    "rows,gather,stages", [(8, True, 6), (64, True, 5), (128, True, 4)], ids=["decode", "middle", "prefill"]
)
def test_clamps_cost_a_gemm_by_hand_none_either(rows: int, gather: bool, stages: int, act: str) -> None:
    built = by_hand(rows, second=False, gather=gather, stages=stages, act=act)
    bare = by_hand(rows, second=False, gather=gather, stages=stages)
    check_clamped(built)
    more = sum((built.instructions - bare.instructions).values())
    assert 0 < more, "the clamps are there"
    assert more < 0.2 * sum(bare.instructions.values()), "and in the epilogue alone"


@pytest.mark.parametrize("tile,boxes", [(Tile(8, True, 4, 6, "gluon"), 2), (Tile(64, False, 4, 5, "gluon"), 4)])
def test_the_second_product_fills_its_ring_while_the_first_one_drains(tile: Tile, boxes: int) -> None:
    first, second = (
        by_hand(tile.rows, second=again, gather=not again, stages=tile.stages).ptx for again in (False, True)
    )
    wait, copy = "griddepcontrol.wait", "cp.async.bulk.tensor"
    assert first.count(wait) == 1 and first.index(wait) < first.index(copy), "its tiles are the work of the one before"
    ahead = second.index(copy)
    # Triton 3.8 waits again where a program has no work, behind all of it.
    assert second.count(copy, ahead, second.index(wait, ahead)) == boxes, "both blocks of weights, before the own wait"
    multiplier = second.index(wait)
    assert multiplier < second.index("griddepcontrol.launch_dependents") < second.index("wgmma.mma_async")


@pytest.mark.parametrize("length", [8, 16])
@pytest.mark.parametrize("left,right,axis", [(128, 8, 0), (128, 16, 0), (128, 32, 0), (64, 64, 1), (64, 128, 1)])
def test_every_thread_stores_adjacent_columns_that_its_warp_multiplied(
    left: int, right: int, axis: int, length: int
) -> None:
    from moe_mk_contrib.gluon.gluon_parts import row_pieces

    layout = row_pieces(left, right, axis, length)
    length = min(length, left * right // 128)
    piece = [[0, 1 << bit] if axis else [1 << bit, 0] for bit in range(length.bit_length() - 1)]
    assert layout.reg_bases[: len(piece)] == piece and layout.warp_bases == [[16, 0], [32, 0]]
    bases = [tuple(base) for base in (*layout.reg_bases, *layout.lane_bases, *layout.warp_bases)]
    assert sorted(bases) == sorted(
        [(1 << bit, 0) for bit in range(left.bit_length() - 1)]
        + [(0, 1 << bit) for bit in range(right.bit_length() - 1)]
    ), "every position once"


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(
    "tile", [Tile(8, True, 4, 6, "gluon"), Tile(32, True, 4, 6, "gluon"), Tile(64, False, 4, 5, "gluon")]
)
def test_rows_are_turned_for_storing_behind_the_ring_by_the_warps_that_multiply(tile: Tile, second: bool) -> None:
    """No barrier of the epilogue waits for the warps that copy, and no copy writes what the epilogue uses."""
    built = by_hand(tile.rows, second=second, gather=not second, stages=tile.stages)
    barriers = set(re.findall(r"\bbar\.sync\s+(\d+)(?:, (\d+))?;", built.ptx))
    assert barriers == {("0", "128"), *([("2", "128")] if tile.rows == 64 else [])}
    places = re.findall(r"\b(?:ld|st)\.shared\S*\s+(?:\{?[^\[;]*\}?, )?\[\S+?\+(\d+)\]", built.ptx)
    scratch = {int(place) for place in places if int(place)}
    assert scratch and min(scratch) >= tile.shared_bytes
    assert max(built.stores) == (8 if tile.rows == 8 and not second else 16), "bytes of a row that a thread stores"


def test_tiles_and_their_number_are_read_past_the_l1_cache_in_the_second_product_of_decode() -> None:
    """It reads them before it waits, and each replay of a graph writes others to the same place."""
    second = by_hand(8, second=True, gather=False, stages=6).ptx
    before_waiting = second[: second.index("griddepcontrol.wait", second.index("cp.async.bulk.tensor"))]
    loads = re.findall(r"\bld\.global(\S*)", before_waiting)
    assert len([suffix for suffix in loads if ".cg" in suffix]) >= 4, "their number, expert, first row and end"


@pytest.mark.parametrize("tile", [Tile(8, True, 4, 6, "gluon"), Tile(64, False, 4, 5, "gluon")])
def test_gluon_gemms_are_compiled_as_they_are_launched(tile: Tile, launched: Launched) -> None:
    rows_through(empty_experts(), tile)
    assert launched == [("_by_hand", integers_by_hand(second=second)) for second in (False, True)]


def test_a_gluon_tile_is_two_kernels_for_any_number_of_tokens(keys: set[tuple[str, str]]) -> None:
    forward = layer(rows=8, swap=True, warps=4, stages=6, engine="gluon")
    for num_tokens in (1, 2, 3, 8, 16, 17, 31, 32, 100, 128, 500, 512):
        forward(num_tokens)
    assert [name for name, _ in keys].count("_by_hand") == 2


def test_gluon_kernels_compile_only_where_the_table_lists_them() -> None:
    assert "gluon" in engines_for(9) and "gluon" not in engines_for(10)
    with pytest.raises(RuntimeError, match="parsing"):
        by_hand(8, second=False, gather=True, stages=6, arch=100)
