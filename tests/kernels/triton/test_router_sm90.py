"""The router of few tokens compiled for sm_90: gates, top-k, and the sort of assignments by slot."""

import re
from typing import Any

import pytest

from moe_mk.kernels.triton.tile import SHARED_MEMORY
from tests.support.tiers import quick_where

pytestmark = pytest.mark.sm90

DEEPSEEK = {"NUM_GROUPS": 8, "PER_GROUP": 32, "KEPT_GROUPS": 4, "GROUPS": 8, "WIDTH": 32, "BIASED": True}
QWEN = {"NUM_GROUPS": 1, "PER_GROUP": 128, "KEPT_GROUPS": 1, "GROUPS": 1, "WIDTH": 128, "BIASED": False}
KIMI = {"NUM_GROUPS": 1, "PER_GROUP": 384, "KEPT_GROUPS": 1, "GROUPS": 1, "WIDTH": 512, "BIASED": True}


@pytest.mark.row(69)
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("weight", ["*bf16", "*fp32"])
def test_the_gate_keeps_its_sums_in_registers_as_a_link_of_the_chain(tokens: int, weight: str) -> None:
    from moe_mk.kernels.triton.gate_logits import COLUMNS, _gate_logits
    from tests.kernels.triton.sm90 import compile_for_hopper

    types = {"x_ptr": "*bf16", "weight_ptr": weight, "logits_ptr": "*fp32", "num_tokens": "i32", "hidden": "i32"}
    types |= {"x_stride": "i32", "weight_stride": "i32", "num_experts": "i32"}
    built = compile_for_hopper(
        _gate_logits, types, {"TOKENS": tokens, "COLUMNS": COLUMNS}, aligned=["hidden", "x_stride", "weight_stride"]
    )
    assert built.spills == built.stack == built.scratch == 0
    assert built.registers <= 168, "three blocks of 128 threads share a multiprocessor"
    assert built.ptx.count("griddepcontrol.wait") == 1
    body = built.ptx[built.ptx.index("{") :]
    assert body.index("griddepcontrol.wait") < body.index("ld.global"), "hidden states are read after the wait"
    assert "ld.global.v4.b32" in built.ptx or "ld.global.v2.b32" in built.ptx, "rows are read several values at a time"


@pytest.mark.slow
@pytest.mark.parametrize(
    "softmax,sizes", quick_where(lambda softmax, _: not softmax, [(False, DEEPSEEK), (True, QWEN), (False, KIMI)])
)
def test_routing_counts_and_places_without_spills_as_a_link_of_the_chain(softmax: bool, sizes: dict[str, Any]) -> None:
    from moe_mk.kernels.triton.topk import _grouped_topk
    from tests.kernels.triton.sm90 import compile_for_hopper

    types = dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr"), "*fp32")
    types |= dict.fromkeys(("ids_ptr", "physical_of_ptr", "physical_ptr"), "*i32")
    types |= {"load_ptr": "*i64", "logits_stride": "i32", "factor": "fp32"}
    constants = sizes | {"TOP_K": 8, "KS": 8, "SOFTMAX": softmax, "RENORMALIZE": True, "ROUND_SCORES": False}
    built = compile_for_hopper(
        _grouped_topk, types, constants | {"PLACED": True}, aligned=["logits_stride"], num_warps=1
    )
    assert built.spills == built.stack == built.scratch == 0 and built.shared < SHARED_MEMORY // 4
    assert len(re.findall(r"griddepcontrol\.wait", built.ptx)) == 1
    assert re.search(r"(atom|red)\.global\.gpu\.relaxed\.add\.u64|atom\.relaxed\.gpu\.global\.add\.u64", built.ptx)
    body = built.ptx[built.ptx.index("{") :]
    assert body.index("griddepcontrol.wait") < body.index("ld.global"), "the gate's products are read after the wait"


@pytest.mark.slow
def test_one_program_sorts_few_assignments_in_microseconds() -> None:
    """Comparing every pair took 4,528, 14,912 and 60,992 instructions for 256, 512 and 1,024 assignments."""
    from moe_mk.kernels.triton.align import SMALL, STEP, _align_small, sizes
    from tests.kernels.triton.sm90 import compile_for_hopper

    types = {f"{name}_ptr": "*i32" for name in ("ids", "all_ids", "order", "tiles", "count")}
    types |= dict.fromkeys(("weights_ptr", "all_weights_ptr"), "*fp32")
    types |= dict.fromkeys(("num", "num_slots", "stride"), "i32")
    constants = sizes(256) | {"TILE": 16, "TOP_K": 8, "SHARED": False}
    built = compile_for_hopper(_align_small, types, constants, num_warps=8)
    assert len(built.loops) == 3 and built.spills == 0, "count, write tiles, rank"
    straight = sum(built.instructions.values()) - sum(built.loops)
    issued = {num: straight + sum(built.loops) * -(-num // STEP) for num in (8, 256, 512, SMALL)}
    assert issued[8] <= 1_100 and issued[256] <= 2_800 and issued[512] <= 5_200 and issued[SMALL] <= 10_000, issued
