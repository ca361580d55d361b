"""What sorting few assignments costs on sm_90: the instructions that one warp issues, each loop times its steps."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.sm90, pytest.mark.thorough]

SLOTS = 256


def test_one_program_sorts_few_assignments_in_microseconds() -> None:
    """Comparing every pair took 4,528, 14,912 and 60,992 instructions for 256, 512 and 1,024 assignments."""
    from moe_mk.kernels.triton.align import SMALL, STEP, _align_small, sizes
    from tests.kernels.triton.sm90 import compile_for_hopper

    types = {f"{name}_ptr": "*i32" for name in ("ids", "all_ids", "order", "tiles", "count")}
    types |= dict.fromkeys(("weights_ptr", "all_weights_ptr"), "*fp32")
    types |= dict.fromkeys(("num", "num_slots", "stride"), "i32")
    constants = sizes(SLOTS) | {"TILE": 16, "TOP_K": 8, "SHARED": False}
    built = compile_for_hopper(_align_small, types, constants, num_warps=8)
    assert len(built.loops) == 3 and built.spills == 0, "count, write tiles, rank"
    straight = sum(built.instructions.values()) - sum(built.loops)
    issued = {num: straight + sum(built.loops) * -(-num // STEP) for num in (8, 256, 512, SMALL)}
    assert issued[8] <= 1_100 and issued[256] <= 2_800 and issued[512] <= 5_200 and issued[SMALL] <= 10_000, issued
