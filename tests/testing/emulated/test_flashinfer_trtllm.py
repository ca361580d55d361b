"""The emulated TRT-LLM entry points: their signatures, the order of rows and columns, routing, and what they refuse."""

import ast
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.flashinfer.fused_moe import core

SNAPSHOT = json.loads((Path(__file__).parent / "flashinfer_moe_signatures.json").read_text(encoding="utf-8"))
ASKED = SNAPSHOT["flashinfer.fused_moe.core"]
BF16, F32, E4M3, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8
RENORMALIZE = int(core.RoutingMethodType.Renormalize)

PLACE_OF_32 = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
               4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31]  # fmt: skip
PLACE_OF_16 = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
"""Where a row of each stripe goes, as the library's tables have it."""


@pytest.mark.parametrize("name", [name for name in ASKED if name.startswith("trtllm")])
def test_signatures_are_those_of_the_library(name: str) -> None:
    parsed = ast.parse(inspect.getsource(getattr(core, name))).body[0]
    assert isinstance(parsed, ast.FunctionDef) and not parsed.args.kwonlyargs
    given = [None] * (len(parsed.args.args) - len(parsed.args.defaults)) + list(parsed.args.defaults)
    found = [
        [p.arg] if value is None else [p.arg, ast.unparse(value)]
        for p, value in zip(parsed.args.args, given, strict=True)
    ]
    assert found == ASKED[name]["pos"] and ASKED[name]["kwonly"] == []


def shuffled(x: Tensor, places: list[int]) -> Tensor:
    out = torch.empty_like(x)
    for row in range(len(x)):
        stripe = row - row % len(places)
        out[stripe + places[row % len(places)]] = x[row]
    return out


def taking_turns(up: Tensor, gate: Tensor) -> Tensor:
    return torch.stack([up, gate], dim=1).flatten(0, 1)


def panels(x: Tensor, width: int) -> Tensor:
    return x.reshape(len(x), -1, width).transpose(0, 1).contiguous()


def matrices(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up (128, 128) and down (256, 128) of H = 256... no two rows alike."""
    draw = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn((128, 256), generator=draw) / 16 for _ in range(2))
    return gate, up, torch.randn((256, 128), generator=draw) / 12


def bf16_call(**other: Any) -> Tensor:
    gate, up, down = (w.to(BF16) for w in matrices())
    w13 = panels(shuffled(taking_turns(up, gate), PLACE_OF_32), 64)[None].contiguous()
    given: dict[str, Any] = {
        "topk_ids": (torch.tensor([[0, 1], [1, 1]], dtype=torch.int32), torch.tensor([[0.5, 9.0], [9.0, 9.0]])),
        "hidden_states": rows().to(BF16), "gemm1_weights": w13,
        "gemm2_weights": panels(shuffled(down, PLACE_OF_32), 64)[None].contiguous(),
        "num_experts": 4, "top_k": 2, "n_group": None, "topk_group": None, "intermediate_size": 128,
        "local_expert_offset": 0, "local_num_experts": 1, "routing_method_type": RENORMALIZE,
    }  # fmt: skip
    made = core.trtllm_bf16_routed_moe(**(given | other))
    assert isinstance(made, Tensor)
    return made


def rows() -> Tensor:
    return torch.randn((2, 256), generator=torch.Generator().manual_seed(7))


def by_definition(act: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """The first row through the one local expert, times its weight 0.5."""
    gate, up, down = (w.to(BF16).float() for w in matrices())
    x = rows()[:1].to(BF16).float()
    wide = x @ gate.T, x @ up.T
    h = torch.nn.functional.silu(wide[0]) * wide[1] if act is None else act(*wide)
    return 0.5 * (h @ down.T)


def close(got: Tensor, expected: Tensor) -> bool:
    return float((got.float() - expected).norm() / expected.norm()) < 0.01


def test_rows_and_columns_are_undone_and_other_ranks_experts_add_nothing() -> None:
    got = bf16_call()
    assert close(got[:1], by_definition()) and not got[1].any()


def test_a_weight_in_the_lower_half_of_an_id() -> None:
    # 0.5 is 0x3F00 in bf16: expert 0 with 0.5 is 0x00003F00, expert 1 with 9 is 0x00014110.
    packed = torch.tensor([[0x3F00, 0x14110], [0x14110, 0x14110]], dtype=torch.int32)
    assert torch.equal(bf16_call(topk_ids=packed), bf16_call())


def test_the_clamped_activations() -> None:
    one = torch.ones(1)

    def oai(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=0.3), up.clamp(-0.3, 0.3)
        return gate * torch.sigmoid(1.7 * gate) * (up + 1.0)

    got = bf16_call(gemm1_alpha=one * 1.7, gemm1_beta=one, gemm1_clamp_limit=one * 0.3)
    assert close(got[:1], by_definition(oai))


def fp8_call(**other: Any) -> Tensor:
    """One token of ones through one expert of ones: 256 a product; blocks differ by their scales."""
    gate, up, down = (torch.ones(w.shape).to(E4M3) for w in matrices())
    w13 = panels(shuffled(torch.cat([up, gate]).view(U8), PLACE_OF_16), 128).view(E4M3)[None].contiguous()
    given: dict[str, Any] = {
        "topk_ids": (torch.zeros((1, 1), dtype=torch.int32), torch.ones((1, 1))), "routing_bias": None,
        "hidden_states": torch.ones((1, 256)).to(E4M3), "hidden_states_scale": torch.tensor([[1 / 256], [1 / 256]]),
        "gemm1_weights": w13, "gemm1_weights_scale": torch.tensor([[[3.0, 3.0], [1.0, 1.0]]]),
        "gemm2_weights": panels(down.view(U8), 128).view(E4M3)[None].contiguous(),
        "gemm2_weights_scale": torch.tensor([[[1 / 128], [2 / 128]]]),
        "num_experts": 4, "top_k": 1, "n_group": None, "topk_group": None, "intermediate_size": 128,
        "local_expert_offset": 0, "local_num_experts": 1, "routed_scaling_factor": None,
        "routing_method_type": RENORMALIZE, "use_shuffled_weight": True,
        "weight_layout": core.WeightLayout.BlockMajorK,
    }  # fmt: skip
    made = core.trtllm_fp8_block_scale_routed_moe(**(given | other))
    assert isinstance(made, Tensor)
    return made


def test_scales_of_blocks_lie_up_before_gate() -> None:
    # up = 3, gate = 1: silu(1) x 3 = 2.193; the second block of the output has twice the scale.
    # The other way round silu(3) x 1 = 2.858.
    got = fp8_call()[0]
    assert got[[0, 255]].tolist() == pytest.approx([2.193, 4.386], rel=0.01)
    turned = fp8_call(gemm1_weights_scale=torch.tensor([[[1.0, 1.0], [3.0, 3.0]]]))[0]
    assert turned[[0, 255]].tolist() == pytest.approx([2.858, 5.715], rel=0.01)


def nvfp4_call(**other: Any) -> Tensor:
    """One token of ones through four-bit ones (0x22) under scales of one: 128 a product."""
    ones = torch.full((1, 256, 64), 0x22, dtype=U8)
    given: dict[str, Any] = {
        "topk_ids": (torch.zeros((1, 1), dtype=torch.int32), torch.ones((1, 1))), "routing_bias": None,
        "hidden_states": torch.full((1, 64), 0x22, dtype=U8), "hidden_states_scale": torch.ones((1, 8)).to(E4M3),
        "gemm1_weights": ones, "gemm1_weights_scale": torch.ones((1, 256, 8)).to(E4M3), "gemm1_bias": None,
        "gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None, "gemm2_weights": ones[:, :128],
        "gemm2_weights_scale": torch.ones((1, 128, 8)).to(E4M3), "gemm2_bias": None,
        "output1_scale_scalar": torch.tensor([2 / 128]), "output1_scale_gate_scalar": torch.tensor([1 / 128]),
        "output2_scale_scalar": torch.tensor([1 / 128]),
        "num_experts": 4, "top_k": 1, "n_group": None, "topk_group": None, "intermediate_size": 128,
        "local_expert_offset": 0, "local_num_experts": 1, "routed_scaling_factor": None,
        "routing_method_type": RENORMALIZE, "hidden_states_scale_layout": core.SfLayout.layout_linear,
    }  # fmt: skip
    return core.trtllm_fp4_block_scale_routed_moe(**(given | other))[0]


def test_the_three_factors_are_of_up_of_gate_and_of_the_output() -> None:
    # up = 2, gate = 1: silu(1) x 2 = 1.462; e2m1 under amax / 6, rounded to e4m3, holds it within a sixteenth.
    assert float(nvfp4_call()[0, 0]) == pytest.approx(1.462, rel=0.07)
    doubled = {"output1_scale_scalar": torch.tensor([4 / 128])}
    assert float(nvfp4_call(**doubled)[0, 0]) == pytest.approx(2.924, rel=0.07)
    assert float(nvfp4_call(output1_scale_gate_scalar=torch.tensor([2 / 128]))[0, 0]) == pytest.approx(3.523, rel=0.07)


IDS = torch.tensor([[0, 1], [1, 1]], dtype=torch.int32)
REFUSED: list[tuple[Callable[..., Tensor], str, dict[str, Any]]] = [
    (bf16_call, "no expert's", {"topk_ids": (IDS - 1, torch.ones((2, 2)))}),
    (bf16_call, "no expert's", {"topk_ids": (IDS + 3, torch.ones((2, 2)))}),
    (bf16_call, "topk_ids", {"topk_ids": (IDS.long(), torch.ones((2, 2)))}),
    (bf16_call, "topk_weights", {"topk_ids": (IDS, torch.ones((2, 2), dtype=torch.float64))}),
    (bf16_call, "expert_weights", {"topk_ids": (IDS, torch.ones((2, 3)))}),
    (bf16_call, "packed topk_ids", {"topk_ids": IDS.long()}),
    (bf16_call, "offset and count", {"local_expert_offset": 4}),
    (bf16_call, "tier", {"num_experts": 4096}),
    (bf16_call, "shuffled panels", {"use_shuffled_weight": False}),
    (bf16_call, "shuffled panels", {"weight_layout": core.WeightLayout.MajorK}),
    (bf16_call, "BF16 MoE", {"hidden_states": torch.ones((2, 256))}),
    (bf16_call, "gemm1_weights must be", {"gemm1_weights": torch.ones((1, 256, 256), dtype=BF16)}),
    (bf16_call, "output", {"output": torch.empty((2, 256), dtype=F32)}),
    (bf16_call, "only Swiglu", {"activation_type": int(core.ActivationType.Geglu)}),
    (fp8_call, "divisible by 4", {"num_experts": 6}),
    (fp8_call, "greater than top_k", {"top_k": 4}),
    (fp8_call, "no groups", {"n_group": 2, "topk_group": 1}),
    (fp8_call, "hidden_states_scale", {"hidden_states_scale": torch.ones((1, 2))}),
    (fp8_call, "gemm1_weights_scale", {"gemm1_weights_scale": torch.ones((1, 1, 2))}),
    (fp8_call, "gemm2_weights_scale", {"gemm2_weights_scale": torch.ones((1, 2, 1), dtype=BF16)}),
    (fp8_call, "in panels", {"weight_layout": core.WeightLayout.MajorK}),
    (nvfp4_call, "hidden_states_scale is required", {"hidden_states_scale": None}),
    (nvfp4_call, "output scales are required", {"output1_scale_scalar": None}),
    (nvfp4_call, "linear layout", {"hidden_states_scale_layout": core.SfLayout.layout_128x4}),
    (nvfp4_call, "gemm1_weights_scale", {"gemm1_weights_scale": torch.ones((1, 256, 8), dtype=U8)}),
    (nvfp4_call, "gemm2_weights must be", {"gemm2_weights": torch.ones((1, 128, 32), dtype=U8)}),
]


@pytest.mark.parametrize(
    "call,stated,wrong", REFUSED, ids=[f"{n}-{stated}" for n, (_, stated, _) in enumerate(REFUSED)]
)
def test_what_the_library_refuses_is_refused(call: Callable[..., Tensor], stated: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=stated):
        call(**wrong)
