"""The table of architectures is what the compiler makes of the kernels: nothing is listed that was not compiled."""

import math

import pytest

from moe_mk.config import device_profile, load_config
from moe_mk.config.problem import Problem
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.experts.triton.tuning import BUILT_IN
from moe_mk.kernels.triton.tile import NOT_COMPILING, SHARED_MEMORY, TARGETS, Tile, engines_for
from moe_mk.quant import BF16
from tests.kernels.triton.sm90_gemms import w2, w13

pytestmark = [pytest.mark.sm90, pytest.mark.slow]


@pytest.mark.parametrize("tile", [tile for _, tile in BUILT_IN], ids=lambda tile: f"{tile.rows} rows")
def test_built_in_fp8_tiles_compile_for_blackwell_and_spill_where_the_table_lists_it(tile: Tile) -> None:
    built = w13(tile.rows, swap=tile.swap, warps=tile.warps, stages=tile.stages, gather=True, arch=100)
    assert bool(built.spills) == (tile.rows in TARGETS[10].spilling), built.spills
    assert built.shared < SHARED_MEMORY


@pytest.mark.stress
@pytest.mark.parametrize("tile", [BUILT_IN[0][1], BUILT_IN[-1][1]], ids=lambda tile: f"{tile.rows} rows")
def test_a_target_that_is_listed_as_not_compiling_does_not(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget

    from tests.kernels.triton import sm90

    monkeypatch.setattr(sm90, "GPUTarget", lambda *_: GPUTarget("hip", *NOT_COMPILING, 64))
    with pytest.raises(RuntimeError, match="failed to link"):
        w2.__wrapped__(tile.rows, swap=tile.swap, warps=tile.warps, stages=tile.stages)


def test_a_target_without_kernels_is_refused_with_its_reason() -> None:
    asked = Problem(load_config("deepseek_v3"), device_profile("mi300x"), BF16, 16, frozenset({"triton"}))
    reasons = [reason.text for reason in TritonExperts.reasons_against(asked)]
    assert NOT_COMPILING["gfx942"] in reasons


def test_the_built_in_tiles_are_those_of_a_compiled_engine_on_every_target() -> None:
    assert BUILT_IN[-1][0] == math.inf
    for major in TARGETS:
        assert {tile.engine for _, tile in BUILT_IN} <= set(engines_for(major))
