"""The FlashInfer CUTLASS adapter on the emulated library: every type, both orders, and every limit as it is stated."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_mk import MoEConfig, Problem, oracle
from moe_mk.config import device_profile
from moe_mk.errors import LibraryMissing, UnsupportedError
from moe_mk.experts import EXPERTS, ExpertsContext
from moe_mk.experts.flashinfer.cutlass import FlashInferCutlassExperts
from moe_mk.lab.testing.conformance import check_experts
from moe_mk.lab.testing.experts import random_experts
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128, QuantScheme
from moe_mk.quant.fp8_whole import FP8_TENSOR, fp8_static
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


@pytest.mark.thorough
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


def test_an_output_that_is_given_is_filled_and_no_rows_are_no_call() -> None:
    backend, stack = FlashInferCutlassExperts(context()), random_experts(BF16, 2, 128, 128, CPU)
    weights, x = backend.relayout(stack), BF16.quantize(torch.ones((1, 128), dtype=torch.bfloat16))
    tokens = RowTokens(x, torch.tensor([[0]], dtype=torch.int32), torch.ones((1, 1)), 2)
    expected = backend.run(tokens, weights).y
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.full((1, 128), torch.nan, dtype=dtype)
        assert backend.run(replace(tokens, out_RH=out), weights).y is out and torch.equal(out, expected.to(dtype))
    none = RowTokens(BF16.quantize(x.values[:0]), tokens.ids_RK[:0], tokens.weights_RK[:0], 2)
    assert backend.run(none, weights).y.shape == (0, 128)


def problem(device: str, *, emulated: bool = False, installed: bool = True, hidden: int = 256, **quant: Any) -> Problem:
    model = {"hidden_size": hidden, "moe_intermediate_size": 128, "num_experts": 8, "quant": quant}
    config = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test")
    config = config.with_(allow_emulated=emulated, max_num_tokens=64, fallback=False)
    there = frozenset({"flashinfer"})
    return Problem(config, device_profile(device), BF16, 64, there if installed else frozenset(), there)


LIMITS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("h200", {"weights": "bf16"}, []),
    ("b200", {"weights": "bf16"}, []),
    ("h200", {"weights": "fp8_block"}, []),
    ("b200", {"weights": "fp8_block"}, ["has fp8_128x128 kernels up to sm_90, this device is sm_100"]),
    ("h200", {"weights": "fp8_tensor", "input_scale": 0.1}, []),
    (
        "h200", {"weights": "fp8_tensor"},
        ["needs a calibrated scale of activations, the checkpoint finds one a token [model.quant.input_scale = ...]"],
    ),
    ("b200", {"weights": "nvfp4"}, []),
    ("h200", {"weights": "nvfp4"}, ["has nvfp4 kernels from sm_100 on, this device is sm_90"]),
    ("b200", {"weights": "mxfp4", "activations": "mxfp8"}, []),
    ("b200", {"weights": "mxfp4"}, ["multiplies mxfp4 weights with MXFP8 activations only"]),
    (
        "h200", {"weights": "int8"},
        ["reads fp8_block, fp8_tensor, mxfp4, nvfp4, plain weights, the experts are int8_channel"],
    ),
    ("mi300x", {"weights": "bf16"}, ["runs on cuda, this device is rocm"]),
]  # fmt: skip


@pytest.mark.parametrize("device,quant,stated", LIMITS, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_every_limit_is_stated(device: str, quant: dict[str, Any], stated: list[str]) -> None:
    found = [str(reason) for reason in EXPERTS["flashinfer_cutlass"].reasons_against(problem(device, **quant))]
    assert found == stated


def test_sizes_that_no_kernel_has_are_refused() -> None:
    found = EXPERTS["flashinfer_cutlass"].reasons_against(problem("b200", hidden=192, weights="nvfp4"))
    assert [str(r) for r in found] == [
        "needs sizes that are multiples of 128 for nvfp4 weights, the hidden size is 192"
    ]


@pytest.mark.parametrize("name", ["flashinfer_cutlass", "flashinfer_trtllm"])
@pytest.mark.parametrize("weights", ["fp16", "fp32"])
def test_plain_weights_of_another_dtype_than_the_layer_are_refused(name: str, weights: str) -> None:
    # Their bits would be read as bf16.
    found = EXPERTS[name].reasons_against(problem("b200", weights=weights))
    assert [str(r) for r in found] == [f"reads plain weights in the layer's bf16 alone, the experts are {weights}"]
    assert EXPERTS[name].reasons_against(problem("b200", weights="bf16")) == []


def test_the_emulation_serves_only_where_it_is_allowed() -> None:
    def of(asked: Problem) -> dict[str, Any]:
        return {v.experts: v for v in oracle.select(asked).verdicts if v.prepare_finalize == "no_ep"}

    allowed = of(problem("cpu", emulated=True, installed=False, weights="nvfp4"))["flashinfer_cutlass"]
    assert not allowed.reasons and allowed.emulated
    assert allowed.cost_source == "model; never run on a device"
    refused = of(problem("cpu", installed=False, weights="nvfp4"))["flashinfer_cutlass"]
    assert {reason.code for reason in refused.reasons} == {"device", "library"}
    with pytest.raises(LibraryMissing, match=r"flashinfer.*is not installed"):
        FlashInferCutlassExperts(replace(context(), device=torch.device("meta")))
