"""The FlashInfer TRT-LLM adapter on the emulated library: every type, both ways of its order, and every limit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.experts import ExpertsContext, FusedExperts
from moe_mk.experts.flashinfer.cutlass import FlashInferCutlassExperts
from moe_mk.experts.flashinfer.trtllm import ORDERS, FlashInferTrtllmExperts, in_order, out_of_order
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.lab.testing.conformance import check_experts
from moe_mk.lab.testing.experts import random_experts
from moe_mk.oracle.expected_error import experts_error
from moe_mk.quant import BF16, FP32, FP8_1x128, FP8_1x128_UE8M0, FP8_128x128, FP8_128x128_UE8M0, QuantScheme
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import NVFP4, nvfp4_tokens
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, SlotBiases, SlotWeights, digest
from moe_mk.weights.layer_weights import as_mapped

CPU = torch.device("cpu")
TYPES = [
    pytest.param(BF16, BF16, id="bf16"),
    pytest.param(FP8_128x128, FP8_1x128, id="fp8_block"),
    pytest.param(FP8_128x128_UE8M0, FP8_1x128_UE8M0, id="fp8_block_ue8m0"),
    pytest.param(MXFP8, MXFP8, id="mxfp8"),
    pytest.param(NVFP4, nvfp4_tokens(0.5), id="nvfp4"),
    pytest.param(MXFP4, MXFP8, id="mxfp4"),
    pytest.param(MXFP4, BF16, id="mxfp4_bf16_rows"),
]


@pytest.mark.slow
@pytest.mark.parametrize("weights,compute", TYPES)
def test_the_conformance_kit(weights: QuantScheme, compute: QuantScheme) -> None:
    ran = check_experts("flashinfer_trtllm", weights, dtype=BF16, compute=compute, hidden_size=256, num_slots=3)
    assert ran == 13 * 2 * (1 if compute == BF16 else 2)


@pytest.mark.parametrize("compute", [MXFP8, BF16], ids=["mxfp8", "bf16"])
def test_mxfp4_of_sizes_that_no_tile_fits_is_filled_up(compute: QuantScheme) -> None:
    ran = check_experts(
        "flashinfer_trtllm", MXFP4, dtype=BF16, compute=compute, num_slots=3, hidden_size=160, intermediate_size=96
    )
    assert ran == 13 * 2 * (1 if compute == BF16 else 2)


def test_the_order_of_rows_by_hand() -> None:
    # 16 rows of up (0 to 15) and 16 of gate (16 to 31) take turns: 0 16 1 17 2 18 ... Of these 32 the library reads
    # every fourth, from the first, the second, the third, the last: (0 2 4 ... 14) (16 18 ...) (1 3 ...) (17 19 ...).
    rows = torch.arange(32, dtype=torch.int64)[:, None]
    got = out_of_order(rows, ORDERS["mxfp4"], halves=True)[:, 0].tolist()
    assert got == [*range(0, 16, 2), *range(16, 32, 2), *range(1, 16, 2), *range(17, 32, 2)]
    # Blocks of FP8 leave up before gate, and shuffle every 16 rows: even ones, then odd ones.
    got = out_of_order(rows, ORDERS["fp8_block"], halves=True)[:, 0].tolist()
    assert got == [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32, 2), *range(17, 32, 2)]
    for order in ORDERS.values():
        for halves in (True, False):
            assert torch.equal(in_order(out_of_order(rows, order, halves=halves), order, halves=halves), rows)


def context(compute: QuantScheme = BF16, activation: str = "silu", **other: Any) -> ExpertsContext:
    return ExpertsContext(BF16, compute, activation, 2, 256, 128, CPU, **other)


def same(one: QuantTensor | None, other: QuantTensor | None) -> bool:
    assert one is not None and other is not None
    parts = [(one.values, other.values), (one.scales, other.scales), (one.global_scale, other.global_scale)]
    there = [(a, b) for a, b in parts if b is not None]
    return all(a is not None and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in there)


@pytest.mark.row(110)
@pytest.mark.parametrize(
    "weights,compute,shape", [*((*each.values, (256, 128)) for each in TYPES), (MXFP4, BF16, (160, 96))]
)
def test_every_matrix_can_be_had_back_bit_for_bit(
    weights: QuantScheme, compute: QuantScheme, shape: tuple[int, int]
) -> None:
    stack = random_experts(weights, 2, *shape, CPU)
    backend = FlashInferTrtllmExperts(context(compute))
    shuffled = backend.relayout(stack)
    assert backend.relayout(shuffled) is shuffled and shuffled.layout == "flashinfer_trtllm"
    assert not torch.equal(shuffled.w2.values.flatten(), stack.w2.values.flatten())
    for index in range(2):
        back, given = shuffled.slot(index), stack.slot(index)
        pairs = [(back.up_IH, given.up_IH), (back.gate_IH, given.gate_IH), (back.down_HI, given.down_HI)]
        assert all(same(*pair) for pair in pairs)
    assert shuffled.num_bytes >= stack.num_bytes and digest(shuffled) == digest(stack)


def tokens(compute: QuantScheme = BF16) -> RowTokens:
    x_RH = torch.randn((4, 256), generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25], [1.0, 9.0], [9.0, 9.0], [0.125, 2.0]])
    return RowTokens(compute.quantize(x_RH), ids, weights, 2)


def with_biases(stack: ExpertWeights) -> MappedExpertWeights:
    draw, inner = torch.Generator().manual_seed(5), stack.w2.shape[2]

    def slot(w: SlotWeights) -> SlotWeights:
        gate, up, down = (torch.randn((n,), generator=draw) for n in (inner, inner, 256))
        return replace(w, biases=SlotBiases(gate, up, down))

    mapped = as_mapped(stack)
    return replace(mapped, slots=tuple(slot(mapped.slot(index)) for index in range(2)))


CLAMPED = [
    pytest.param(MXFP4, MXFP8, "swiglu_oai", True, id="gpt_oss"),
    pytest.param(MXFP4, BF16, "swiglu_oai", True, id="gpt_oss_bf16_rows"),
    pytest.param(FP8_128x128, FP8_1x128, "swiglu_limit", False, id="fp8_block"),
    pytest.param(BF16, BF16, "swiglu_oai", False, id="bf16"),
]


@pytest.mark.parametrize("weights,compute,activation,biases", CLAMPED)
def test_clamps_and_biases_are_the_references(
    weights: QuantScheme, compute: QuantScheme, activation: str, biases: bool
) -> None:
    stack = random_experts(weights, 2, 256, 96 if biases else 128, CPU)
    given = with_biases(stack) if biases else stack
    asked = context(compute, activation, swiglu_limit=0.7, swiglu_alpha=1.702)
    exact = replace(asked, dtype=FP32, compute=FP32 if compute == BF16 else compute)
    backend = FlashInferTrtllmExperts(asked)
    own = backend.relayout(given)
    got, expected = backend.run(tokens(), own).y.float(), ReferenceExperts(exact).run(tokens(), given).y
    expected = expected.float()
    assert float((got - expected).norm() / expected.norm()) < 2 * experts_error(BF16, compute, weights, 256)
    if biases:
        found, there = own.slot(1).biases, given.slot(1).biases
        assert found is not None and there is not None
        assert all(torch.equal(a, b) for a, b in zip(found.tensors, there.tensors, strict=True))


def test_a_pick_that_goes_nowhere_adds_nothing_and_weights_count() -> None:
    backend, stack = FlashInferTrtllmExperts(context()), random_experts(BF16, 2, 256, 128, CPU)
    got, given = backend.run(tokens(), backend.relayout(stack)).y.float(), tokens()
    assert not got[2].any(), "a row of picks that go nowhere"
    # Row 1 goes to expert 1 alone, with weight 1; with weight 3 it is three times that.
    tripled = replace(given, weights_RK=given.weights_RK * 3)
    assert torch.allclose(backend.run(tripled, backend.relayout(stack)).y[1].float(), 3 * got[1], rtol=2**-7)


@pytest.mark.parametrize("cls", [FlashInferTrtllmExperts, FlashInferCutlassExperts])
def test_an_output_that_is_given_is_filled_and_no_rows_are_no_call(cls: type[FusedExperts]) -> None:
    backend, stack = cls(context()), random_experts(BF16, 2, 256, 128, CPU)
    weights, given = backend.relayout(stack), tokens()
    expected = backend.run(given, weights).y
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.full((4, 256), torch.nan, dtype=dtype)
        assert backend.run(replace(given, out_RH=out), weights).y is out and torch.equal(out, expected.to(dtype))
    none = RowTokens(BF16.quantize(given.x_RH.values[:0]), given.ids_RK[:0], given.weights_RK[:0], 2)
    assert backend.run(none, weights).y.shape == (0, 256)


def test_experts_without_a_gate_are_refused() -> None:
    stack = random_experts(BF16, 2, 256, 128, CPU)
    ungated = ExpertWeights(replace(stack.w13, values=stack.w13.values[:, :128].contiguous()), stack.w2, gated=False)
    with pytest.raises(UnsupportedError, match=r"(?s)experts without a gate.*flashinfer_cutlass"):
        FlashInferTrtllmExperts(context()).relayout(ungated)
