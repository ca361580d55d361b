"""sm_90 code decodes or multiplies every weight format of `kernel_format.py`, with biases and clamps. No GPU needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from moe_mk.experts.triton.tuning import BUILT_IN, DECODED, INTEGERS
from moe_mk.kernels.triton.tile import SHARED_MEMORY
from tests.kernels.triton.sm90_gemms import w2_of, w13_of

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled

pytestmark = [pytest.mark.sm90, pytest.mark.thorough]

DECODED_FORMS = ("w_fp8", "w_int8_block", "w_fp8_row", "w_int8", "w_mxfp8", "w_mxfp4", "w_nvfp4")
INTEGER_FORMS = ("w_int4", "w_int4/128", "w_int4_zero", "w_int4_zero/128", "w_int8_group", "w_int8_zero")
FORMAT_TILES = dict.fromkeys(("int8", "int8_block", "fp8_row"), BUILT_IN) | dict.fromkeys(DECODED_FORMS, DECODED)
FORMAT_TILES |= dict.fromkeys(INTEGER_FORMS, INTEGERS)
LIKE_OTHERS = ("w_int8_block", "w_fp8_row", "w_int8", "w_int4/128", "w_int4_zero", "w_int8_group")
"""Forms whose codes and whose scales are those of other formats, or nearly."""
UNITS = {"int8": "IGMMA", "int8_block": "IGMMA", "fp8_row": "QGMMA"}
"""Of the matrix unit where both sides are codes; decoded weights are multiplied in 16 bits."""


def check_format(format: str, built: Compiled, *, swap: bool) -> None:
    assert built.instructions[UNITS.get(format, "HGMMA")] >= 4
    assert not built.instructions["HMMA"] and not built.instructions["IMMA"]
    assert built.instructions["UTMALDG"], "weights travel at the size they are stored in"
    assert built.spills == built.stack == built.scratch == 0 and built.shared < SHARED_MEMORY
    if swap and format not in UNITS:
        assert built.instructions["STS"] <= 16, "decoded weights stay in registers"


@pytest.mark.parametrize(
    "format", [pytest.param(format, marks=[pytest.mark.slow] * (format in LIKE_OTHERS)) for format in FORMAT_TILES]
)
def test_every_type_of_weights_is_decoded_on_the_way_to_the_matrix_unit(format: str) -> None:
    decode, prefill = FORMAT_TILES[format][0][1], FORMAT_TILES[format][-1][1]
    check_format(format, w13_of(format, decode), swap=True)
    check_format(format, w2_of(format, decode), swap=True)
    check_format(format, w13_of(format, prefill), swap=False)


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 2, 3], ids=["few rows", "mid", "prefill"])
@pytest.mark.parametrize("format", FORMAT_TILES)
def test_so_it_is_at_every_tile(format: str, place: int) -> None:
    tile = FORMAT_TILES[format][place][1]
    check_format(format, w13_of(format, tile), swap=tile.swap)
    check_format(format, w2_of(format, tile), swap=tile.swap)


@pytest.mark.parametrize("place", [1, -1], ids=["decode", "prefill"])
def test_biases_and_clamps_cost_no_spill(place: int) -> None:
    """gpt-oss: MXFP4, biases of both products, SwiGLU behind clamps."""
    tile = FORMAT_TILES["w_mxfp4"][place][1]
    check_format("w_mxfp4", w13_of("w_mxfp4", tile, act="swiglu_oai", biased=True), swap=tile.swap)
    check_format("w_mxfp4", w2_of("w_mxfp4", tile, biased=True), swap=tile.swap)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "int8_block", "w_int8", "w_fp8"])
@pytest.mark.parametrize("act", ["silu", "swiglu_oai"])
def test_nor_do_they_beside_scales_of_whole_rows(format: str, act: str) -> None:
    tile = FORMAT_TILES[format][-1][1]
    check_format(format, w13_of(format, tile, act=act, biased=True), swap=False)


@pytest.mark.slow
def test_of_biased_nvfp4_only_what_is_needed_once_a_tile_leaves_the_registers() -> None:
    built = w13_of("w_nvfp4", FORMAT_TILES["w_nvfp4"][-1][1], act="swiglu_oai", biased=True)
    assert built.instructions["HGMMA"] >= 4 and built.spills_in_loop == 0 and built.stack <= 16
