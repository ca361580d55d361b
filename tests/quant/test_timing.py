"""When activations are rounded: the tree by its leaves, and that both sides of a choice give the same numbers."""

import pytest
import torch

from moe_mk.quant import (
    BF16,
    FP8_DYNAMIC_TENSOR,
    FP8_TOKEN,
    INT8_TOKEN,
    MXFP8,
    NVFP4_TOKENS,
    FP8_1x128,
    FP8_1x128_UE8M0,
    QuantScheme,
    Timing,
    WireSupport,
    fp8_static,
    when_to_round,
)

DEEP_EP = WireSupport(frozenset({"plain", "fp8"}))
EXCHANGE = WireSupport(frozenset({"plain", "fp8", "int8", "mxfp8", "nvfp4"}))
GATHER = WireSupport(frozenset({"plain", "fp8"}), whole_scale=True)


@pytest.mark.row(100)
@pytest.mark.parametrize(
    "scheme,transport,expected",
    [
        (FP8_1x128, DEEP_EP, Timing.BEFORE),
        (FP8_1x128_UE8M0, DEEP_EP, Timing.BEFORE),
        (FP8_TOKEN, DEEP_EP, Timing.BEFORE),
        (FP8_DYNAMIC_TENSOR, DEEP_EP, Timing.AFTER),
        (FP8_DYNAMIC_TENSOR, GATHER, Timing.EITHER),
        (FP8_1x128, GATHER, Timing.EITHER),
        (fp8_static(0.1), DEEP_EP, Timing.BEFORE),
        (INT8_TOKEN, DEEP_EP, Timing.AFTER),
        (INT8_TOKEN, EXCHANGE, Timing.BEFORE),
        (MXFP8, EXCHANGE, Timing.BEFORE),
        (NVFP4_TOKENS, EXCHANGE, Timing.BEFORE),
        (NVFP4_TOKENS, DEEP_EP, Timing.AFTER),
        (BF16, EXCHANGE, Timing.NEVER),
        (None, EXCHANGE, Timing.NEVER),
    ],
)
def test_the_tree_by_its_leaves(scheme: QuantScheme | None, transport: WireSupport, expected: Timing) -> None:
    answer = when_to_round(scheme, transport, experts_read=True)
    assert answer.timing is expected and answer.because


def test_experts_that_do_not_read_the_scheme_round_for_themselves() -> None:
    answer = when_to_round(FP8_1x128, DEEP_EP, experts_read=False)
    assert answer.timing is Timing.AFTER and "do not read fp8_1x128" in answer.because


@pytest.mark.row(100)
@pytest.mark.parametrize("scheme", [FP8_1x128, FP8_TOKEN, INT8_TOKEN, MXFP8, NVFP4_TOKENS, fp8_static(0.02)],
                         ids=lambda s: s.name)  # fmt: skip
def test_before_and_after_are_the_same_numbers(scheme: QuantScheme) -> None:
    x = torch.randn((12, 256), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    sent_to = torch.tensor([3, 7, 7, 0, 11])
    before = scheme.quantize(x)[sent_to].dequantize(torch.float32)
    assert torch.equal(before, scheme.quantize(x[sent_to]).dequantize(torch.float32))


@pytest.mark.row(100)
def test_one_scale_for_all_rows_would_not_be() -> None:
    x = torch.tensor([[1.0, 0.3], [400.0, 1.0]])
    alone = FP8_DYNAMIC_TENSOR.quantize(x[:1]).dequantize(torch.float32)
    assert not torch.equal(FP8_DYNAMIC_TENSOR.quantize(x).dequantize(torch.float32)[:1], alone)
