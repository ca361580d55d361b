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
    fp8_static,
    when_to_round,
)

DEEP_EP = frozenset({"plain", "fp8"})
EXCHANGE = DEEP_EP | {"int8", "mxfp8", "nvfp4"}


@pytest.mark.row(100)
@pytest.mark.parametrize(
    "scheme,families,alone,gathered",
    [
        (FP8_1x128, DEEP_EP, Timing.BEFORE, Timing.EITHER),
        (FP8_1x128_UE8M0, DEEP_EP, Timing.BEFORE, Timing.EITHER),
        (FP8_TOKEN, DEEP_EP, Timing.BEFORE, Timing.EITHER),
        (FP8_DYNAMIC_TENSOR, DEEP_EP, Timing.AFTER, Timing.EITHER),
        (fp8_static(0.1), DEEP_EP, Timing.BEFORE, Timing.EITHER),
        (INT8_TOKEN, DEEP_EP, Timing.AFTER, Timing.AFTER),
        (INT8_TOKEN, EXCHANGE, Timing.BEFORE, Timing.EITHER),
        (MXFP8, EXCHANGE, Timing.BEFORE, Timing.EITHER),
        (NVFP4_TOKENS, EXCHANGE, Timing.BEFORE, Timing.EITHER),
        (NVFP4_TOKENS, DEEP_EP, Timing.AFTER, Timing.AFTER),
        (BF16, EXCHANGE, Timing.NEVER, Timing.NEVER),
        (None, EXCHANGE, Timing.NEVER, Timing.NEVER),
    ],
)
def test_the_tree_by_its_leaves(
    scheme: QuantScheme | None, families: frozenset[str], alone: Timing, gathered: Timing
) -> None:
    assert when_to_round(scheme, families, gathers=False, experts_read=True) is alone
    assert when_to_round(scheme, families, gathers=True, experts_read=True) is gathered
    unread = Timing.NEVER if alone is Timing.NEVER else Timing.AFTER
    assert when_to_round(scheme, families, gathers=True, experts_read=False) is unread


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
