"""Every type of weights is decoded or multiplied by sm_90 as `form.py` says, with biases and clamps. No GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from moe_mk.experts.triton.tuning import BUILT_IN, DECODED
from moe_mk.kernels.triton.tile import SHARED_MEMORY
from tests.kernels.triton.sm90_gemms import w2_of, w13_of

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled

pytestmark = pytest.mark.sm90

DECODED_FORMS = ("w_fp8", "w_int8_block", "w_fp8_row", "w_int8", "w_mxfp8", "w_mxfp4", "w_nvfp4")
FORM_TILES = dict.fromkeys(("int8", "int8_block", "fp8_row"), BUILT_IN) | dict.fromkeys(DECODED_FORMS, DECODED)
LIKE_OTHERS = ("w_int8_block", "w_fp8_row", "w_int8")
"""Forms whose codes and whose scales are those of other forms."""
UNITS = {"int8": "IGMMA", "int8_block": "IGMMA", "fp8_row": "QGMMA"}
"""Of the matrix unit where both sides are codes; decoded weights are multiplied in 16 bits."""


def check_form(form: str, built: Compiled, *, swap: bool) -> None:
    assert built.instructions[UNITS.get(form, "HGMMA")] >= 4
    assert not built.instructions["HMMA"] and not built.instructions["IMMA"]
    assert built.instructions["UTMALDG"], "weights travel at the size they are stored in"
    assert built.spills == built.stack == built.scratch == 0 and built.shared < SHARED_MEMORY
    if swap and form not in UNITS:
        assert built.instructions["STS"] <= 8, "decoded weights stay in registers"


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] * (form in LIKE_OTHERS)) for form in FORM_TILES]
)
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


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int8_block", "w_int8", "w_fp8"])
@pytest.mark.parametrize("act", ["silu", "swiglu_oai"])
def test_nor_do_they_beside_scales_of_whole_rows(form: str, act: str) -> None:
    tile = FORM_TILES[form][-1][1]
    check_form(form, w13_of(form, tile, act=act, biased=True), swap=False)


@pytest.mark.slow
def test_of_biased_nvfp4_only_what_is_needed_once_a_tile_leaves_the_registers() -> None:
    built = w13_of("w_nvfp4", FORM_TILES["w_nvfp4"][-1][1], act="swiglu_oai", biased=True)
    assert built.instructions["HGMMA"] >= 4 and built.spills_in_loop == 0 and built.stack <= 16
