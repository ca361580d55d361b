"""The FlashInfer CUTLASS adapter on the emulated library: every type, both orders, gates and their scales."""

import logging
from dataclasses import replace

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.experts import ExpertsContext
from moe_mk.experts.flashinfer.cutlass import FlashInferCutlassExperts
from moe_mk.lab.testing.conformance import check_experts
from moe_mk.lab.testing.experts import random_experts
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128, QuantScheme
from moe_mk.quant.fp8 import FP8_TENSOR, fp8_static
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import NVFP4, nvfp4_tokens
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, SlotWeights

CPU = torch.device("cpu")
TYPES = [
    pytest.param(BF16, BF16, id="bf16"),
    pytest.param(FP8_128x128, FP8_1x128, id="fp8_block"),
    pytest.param(FP8_TENSOR, fp8_static(0.02), id="fp8_tensor"),
    pytest.param(NVFP4, nvfp4_tokens(0.5), id="nvfp4"),
    pytest.param(MXFP4, MXFP8, id="mxfp4"),
]


@pytest.mark.slow
@pytest.mark.parametrize("weights,compute", TYPES)
def test_the_conformance_kit(weights: QuantScheme, compute: QuantScheme) -> None:
    ran = check_experts("flashinfer_cutlass", weights, dtype=BF16, compute=compute, hidden_size=256, num_slots=3)
    assert ran == 13 * 2 * (1 if weights == BF16 else 2)


def context(compute: QuantScheme = BF16, activation: str = "silu") -> ExpertsContext:
    return ExpertsContext(BF16, compute, activation, 2, 128, 128, CPU)


def run(
    weights: ExpertWeights | MappedExpertWeights, compute: QuantScheme = BF16, activation: str = "silu"
) -> torch.Tensor:
    backend = FlashInferCutlassExperts(context(compute, activation))
    x_RH = torch.randn((3, 128), generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1]], dtype=torch.int32)
    tokens = RowTokens(BF16.quantize(x_RH), ids, torch.full((3, 2), 0.5), 2)
    return backend.run(tokens, backend.relayout(weights)).y


def test_gate_and_up_are_turned_round_once_and_it_matters() -> None:
    stack = random_experts(BF16, 2, 128, 128, CPU)
    turned = FlashInferCutlassExperts(context()).relayout(stack)
    assert torch.equal(turned.w13, stack.w13.values.roll(128, dims=1)) and turned.layout == "flashinfer_cutlass"
    assert FlashInferCutlassExperts(context()).relayout(turned) is turned
    swapped = replace(stack, w13=replace(stack.w13, values=stack.w13.values.roll(128, dims=1)))
    assert not torch.allclose(run(stack), run(swapped), rtol=0.2, atol=0.05)
    fp8 = random_experts(FP8_128x128, 2, 128, 128, CPU)
    w13, _ = FlashInferCutlassExperts(context(FP8_1x128)).relayout(fp8).quant_scales
    assert fp8.w13.scales is not None and torch.equal(w13, fp8.w13.scales.flip(1)), "bit for bit"


def test_experts_without_a_gate() -> None:
    stack = random_experts(BF16, 2, 128, 128, CPU)
    ungated = ExpertWeights(replace(stack.w13, values=stack.w13.values[:, :128].contiguous()), stack.w2, gated=False)
    assert run(ungated, activation="relu2").isfinite().all()
    with pytest.raises(UnsupportedError, match=r"(?s)silu experts without a gate.*silu with a gate, relu2 without"):
        run(ungated)
    with pytest.raises(UnsupportedError, match="relu2 experts with a gate"):
        run(stack, activation="relu2")


@pytest.mark.parametrize(
    "scheme,compute", [(FP8_TENSOR, fp8_static(0.1)), (NVFP4, nvfp4_tokens())], ids=["fp8", "nvfp4"]
)
def test_gate_and_up_under_scales_of_their_own_get_a_common_one_and_it_is_stated(
    scheme: QuantScheme, compute: QuantScheme, caplog: pytest.LogCaptureFixture
) -> None:
    def slot(seed: int) -> SlotWeights:
        draw = torch.Generator().manual_seed(seed)
        gate, up, down = (torch.randn((128, 128), generator=draw) * 128**-0.5 for _ in range(3))
        return SlotWeights(*(scheme.quantize(w) for w in (gate * 3, up, down)))

    slots = (slot(0), slot(1))
    with caplog.at_level(logging.WARNING):
        got = run(MappedExpertWeights(slots, scheme), compute)
    assert [record.message for record in caplog.records] == [
        f"gate and up of expert {index} have different scales; requantised to one scale" for index in (0, 1)
    ]
    w13 = torch.stack(
        [torch.cat([q.dequantize(torch.bfloat16) for q in (s.gate_IH, s.up_IH) if q is not None]) for s in slots]
    )
    w2 = torch.stack([s.down_HI.dequantize(torch.float32) for s in slots]).bfloat16()
    expected = run(ExpertWeights(QuantTensor(w13, None, BF16), QuantTensor(w2, None, BF16)))
    assert float((got - expected).norm() / expected.norm()) < (0.1 if scheme is FP8_TENSOR else 0.3)
