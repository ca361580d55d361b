"""The gates of DeepSeek-V3 and Kimi-K2 for few tokens, compiled for sm_90."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.sm90, pytest.mark.row(69)]


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
