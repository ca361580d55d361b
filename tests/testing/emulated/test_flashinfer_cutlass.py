"""The emulated `cutlass_fused_moe`: its signature, the order of gate and up, and what it refuses."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.flashinfer.fused_moe.core import ActivationType, cutlass_fused_moe

SNAPSHOT = json.loads((Path(__file__).parent / "flashinfer_moe_signatures.json").read_text(encoding="utf-8"))
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def test_its_signature_is_that_of_the_library() -> None:
    found = [
        [p.name] if p.default is p.empty else [p.name, str(p.default)]
        for p in inspect.signature(cutlass_fused_moe).parameters.values()
    ]
    asked = SNAPSHOT["flashinfer.fused_moe.core"]["cutlass_fused_moe"]["pos"]
    named = {"ActivationType.Swiglu": str(ActivationType.Swiglu)}
    assert found == [[entry[0], *(named.get(value, value) for value in entry[1:])] for entry in asked]


def call(**other: Any) -> Tensor:
    """One token of width 2, one expert of width 1 by default; up is 3 x0, gate is 2 x1, and down copies."""
    given: dict[str, Any] = {
        "input": torch.tensor([[1.0, 1.0]], dtype=BF16),
        "token_selected_experts": torch.tensor([[0, 1]], dtype=torch.int32),
        "token_final_scales": torch.tensor([[0.5, 9.0]]),
        "fc1_expert_weights": torch.tensor([[[3.0, 0.0], [0.0, 2.0]]], dtype=BF16),
        "fc2_expert_weights": torch.tensor([[[1.0], [2.0]]], dtype=BF16),
        "output_dtype": BF16,
        "quant_scales": [],
    }
    return cutlass_fused_moe(**(given | other))[0]


def test_up_rows_come_before_gate_rows() -> None:
    # up = 3, gate = 2: silu(2) * 3 = 5.285, times the weight 0.5. The other way round silu(3) * 2 = 5.715.
    # Expert 1 is past the last one: unassigned.
    assert call()[0].tolist() == pytest.approx([2.64, 5.28], abs=0.02)
    turned = torch.tensor([[[0.0, 2.0], [3.0, 0.0]]], dtype=BF16)
    assert call(fc1_expert_weights=turned)[0].tolist() == pytest.approx([2.86, 5.72], abs=0.02)


def test_experts_of_another_rank_add_nothing() -> None:
    assert call(ep_size=2, ep_rank=1)[0].tolist() == pytest.approx([47.5, 95.0], rel=0.01)
    assert call(ep_size=3, ep_rank=2).tolist() == [[0.0, 0.0]]


def test_without_a_gate_the_positive_part_is_squared() -> None:
    ungated = {"fc1_expert_weights": torch.tensor([[[3.0, -1.0]]], dtype=BF16), "activation_type": ActivationType.Relu2}
    assert call(**ungated).tolist() == [[2.0, 4.0]]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": torch.ones((2, 2), dtype=BF16).T[:1]}),
    ("past the last one", {"token_selected_experts": torch.tensor([[0, -1]], dtype=torch.int32)}),
    ("token_selected_experts", {"token_selected_experts": torch.tensor([[0, 1]])}),
    ("token_final_scales", {"token_final_scales": torch.ones((1, 2), dtype=BF16)}),
    ("do not meet", {"fc2_expert_weights": torch.ones((1, 2, 2), dtype=BF16)}),
    ("have no scales", {"quant_scales": [torch.ones(1)]}),
    ("output", {"output": torch.empty((1, 2), dtype=F32)}),
]


@pytest.mark.parametrize("stated,wrong", REFUSED, ids=[stated for stated, _ in REFUSED])
def test_what_the_library_refuses_is_refused(stated: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=stated):
        call(**wrong)


def fp8(**other: Any) -> Tensor:
    ones = torch.ones((1, 256, 128), dtype=F32).to(E4M3)
    given: dict[str, Any] = {
        "input": torch.ones((1, 128), dtype=BF16), "fc1_expert_weights": ones, "fc2_expert_weights": ones[:, :128],
        "quant_scales": [torch.ones((1, 2, 1)), torch.ones((1, 1, 1))], "use_deepseek_fp8_block_scale": True,
    }  # fmt: skip
    return call(**(given | other))


def test_scales_of_blocks_are_taken_by_their_place() -> None:
    # 128 ones: up = gate = 128, so 16,384; 128 of those, times 0.5.
    assert float(fp8()[0, 0]) == pytest.approx(128 * 128 * 128 / 2, rel=0.05)
    with pytest.raises(AssertionError, match="block scales"):
        fp8(quant_scales=[torch.ones((1, 1, 1)), torch.ones((1, 2, 1))])
    with pytest.raises(AssertionError, match="rows come in bf16"):
        fp8(input=torch.ones((1, 128)).to(E4M3))


def test_scales_of_whole_matrices_are_taken_by_their_place() -> None:
    each, one = torch.ones(1), torch.tensor(1.0)
    given = {"input": torch.ones((1, 128)).to(E4M3), "use_deepseek_fp8_block_scale": False}
    # Hidden rows saturate at 448 under a scale of one.
    assert float(fp8(quant_scales=[each, one, each, one], **given)[0, 0]) == 448 * 128 / 2
    with pytest.raises(AssertionError, match="one scale an expert"):
        fp8(quant_scales=[one, each, each, one], **given)


def test_scales_of_four_bit_weights_must_lie_in_tiles() -> None:
    w13, w2 = torch.zeros((1, 256, 8), dtype=torch.int64), torch.zeros((1, 128, 8), dtype=torch.int64)
    each, one = torch.ones(1), torch.tensor(1.0)
    tiles13, tiles2 = (torch.zeros((1, rows, 2), dtype=torch.int32) for rows in (256, 128))
    given = {"input": torch.ones((1, 128), dtype=BF16), "fc1_expert_weights": w13, "fc2_expert_weights": w2}
    assert not call(**given, quant_scales=[one, tiles13, each, one, tiles2, each]).any()
    with pytest.raises(AssertionError, match="tiles of scales"):
        call(**given, quant_scales=[one, tiles13.view(torch.uint8), each, one, tiles2, each])
    with pytest.raises(AssertionError, match="MXFP8 rows bring their scales"):
        call(**given, quant_scales=[tiles13, each, tiles2, each], use_mxfp8_act_scaling=True)
