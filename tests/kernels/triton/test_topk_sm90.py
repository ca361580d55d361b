"""The routers of DeepSeek-V3 and Qwen3 compiled for sm_90."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.tiers import quick_where

pytestmark = pytest.mark.sm90

DEEPSEEK = {"NUM_GROUPS": 8, "PER_GROUP": 32, "KEPT_GROUPS": 4, "GROUPS": 8, "WIDTH": 32, "BIASED": True}
QWEN = {"NUM_GROUPS": 1, "PER_GROUP": 128, "KEPT_GROUPS": 1, "GROUPS": 1, "WIDTH": 128, "BIASED": False}
KIMI = {"NUM_GROUPS": 1, "PER_GROUP": 384, "KEPT_GROUPS": 1, "GROUPS": 1, "WIDTH": 512, "BIASED": True}


@pytest.mark.thorough
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
    assert built.spills == built.stack == built.scratch == 0
    assert len(re.findall(r"griddepcontrol\.wait", built.ptx)) == 1
    assert re.search(r"(atom|red)\.global\.gpu\.relaxed\.add\.u64|atom\.relaxed\.gpu\.global\.add\.u64", built.ptx)
    body = built.ptx[built.ptx.index("{") :]
    assert body.index("griddepcontrol.wait") < body.index("ld.global"), "the gate's products are read after the wait"
