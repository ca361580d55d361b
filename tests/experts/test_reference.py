"""The definition of the experts, followed by hand, and where it rounds."""

import math

import pytest
import torch
from torch import Tensor

from moe_mk.experts import ExpertsContext
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.quant.fp8 import FP8_1x128, FP8_128x128
from moe_mk.quant.plain import BF16, FP32, Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import OutputStage, RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

CPU = torch.device("cpu")


def plain(values: object) -> QuantTensor:
    return QuantTensor(torch.tensor(values, dtype=torch.float32), None, FP32)


def experts(
    hidden: int, inner: int, slots: int, compute: QuantScheme = FP32, dtype: Plain = FP32, activation: str = "silu"
) -> ReferenceExperts:
    return ReferenceExperts(ExpertsContext(dtype, compute, activation, slots, hidden, inner, CPU))


def silu(x: float) -> float:
    return x / (1.0 + math.exp(-x))


@pytest.mark.row(84)
def test_two_experts_of_one_unit_by_hand() -> None:
    # Expert 0: gate x0, up x1, down doubles into y0.   Expert 1: gate x1, up x0 + x1, down adds to y1.
    w13 = plain([[[1, 0], [0, 1]], [[0, 1], [1, 1]]])
    w2 = plain([[[2], [0]], [[0], [1]]])
    ids = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32)
    tokens = RowTokens(plain([[1.0, 3.0], [2.0, -1.0]]), ids, torch.tensor([[0.5, 0.25], [2.0, 0.0]]), 2)
    output = experts(2, 1, 2).run(tokens, ExpertWeights(w13, w2))
    # Token 0: 0.5 * 2 silu(1) 3 into y0, 0.25 silu(3) 4 into y1.   Token 1: 2 silu(-1) 1 into y1.
    expected = [[3.0 * silu(1.0), silu(3.0)], [0.0, 2.0 * silu(-1.0)]]
    assert output.stage is OutputStage.REDUCED
    torch.testing.assert_close(output.y, torch.tensor(expected))


def one_row(x: Tensor, scheme: QuantScheme = FP32) -> RowTokens:
    return RowTokens(scheme.quantize(x), torch.zeros((len(x), 1), dtype=torch.int32), torch.ones(len(x), 1), 1)


def test_activations_are_rounded_to_fp8_before_both_gemms() -> None:
    # Identity-like weights lay the rounding open: 1 + 2^-5 is no e4m3 number beside an amax of 448, whose scale is 1.
    hidden = 128
    w13 = torch.cat((torch.eye(hidden), torch.eye(hidden)))[None]
    weights = ExpertWeights(QuantTensor(w13, None, FP32), QuantTensor(torch.eye(hidden)[None], None, FP32))
    x = torch.zeros(1, hidden)
    x[0, 0], x[0, 1] = 448.0, 1.0 + 2.0**-5
    exact = experts(hidden, hidden, 1, activation="relu2").run(one_row(x), weights).y
    rounded = experts(hidden, hidden, 1, FP8_1x128, activation="relu2").run(one_row(x), weights).y
    assert exact[0, 1].item() == pytest.approx((1.0 + 2.0**-5) ** 3)
    # x becomes 1, h becomes 1 over a scale of 448^3 / 448, which rounds it to 0 in FP8.
    assert rounded[0, 1].item() == 0.0 and rounded[0, 0].item() == pytest.approx(448.0**3)


def test_tokens_that_came_in_fp8_are_not_rounded_twice() -> None:
    draw = torch.randn(4, 256)
    w13, w2 = FP8_128x128.quantize(torch.randn(1, 256, 256)), FP8_128x128.quantize(torch.randn(1, 256, 128))
    backend = experts(256, 128, 1, FP8_1x128, BF16)
    weights = ExpertWeights(w13, w2)
    sent = backend.run(one_row(draw, FP8_1x128), weights).y
    arrived = backend.run(one_row(FP8_1x128.quantize(draw).dequantize(torch.float32)), weights).y
    assert torch.equal(sent, arrived), "quantising what is already quantised changes nothing"
    assert sent.dtype is torch.bfloat16
