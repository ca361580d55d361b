"""Experts of different widths in one layer: computed expert by expert, or refused by name."""

import shutil

import pytest
import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.experts import EXPERTS, ExpertsContext
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant.plain import FP32
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import OutputStage, RowTokens
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights

CPU, WIDTHS, HIDDEN = torch.device("cpu"), (16, 32, 48, 64), 24


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * shape[-1] ** -0.5


def plain(values: Tensor) -> QuantTensor:
    return QuantTensor(values, None, FP32)


MATRICES = [(normal(w, HIDDEN, seed=w), normal(w, HIDDEN, seed=w + 1), normal(HIDDEN, w, seed=w + 2)) for w in WIDTHS]
WEIGHTS = MappedExpertWeights(tuple(SlotWeights(plain(g), plain(u), plain(d)) for g, u, d in MATRICES), FP32)


@pytest.mark.row(8)
@pytest.mark.parametrize("name", ["reference", "torch_cpu"])
def test_widths_of_16_to_64_are_computed_as_they_are(name: str) -> None:
    x = normal(11, HIDDEN, seed=0)
    ids = torch.rand((11, 4), generator=torch.Generator().manual_seed(1)).argsort(1)[:, :2].to(torch.int32)
    ids[3, 1] = -1
    weights = torch.full((11, 2), 0.5).masked_fill(ids < 0, 0.0)
    experts = EXPERTS[name](ExpertsContext(FP32, FP32, "silu", 4, HIDDEN, max(WIDTHS), CPU))
    tokens = permute(RowTokens(plain(x), ids, weights, 4), experts.traits.consumes)
    output = experts.run(tokens, experts.relayout(WEIGHTS))
    got = weight_and_reduce(output, tokens, until=OutputStage.REDUCED).y
    expected = torch.zeros_like(x)
    for t, k in torch.nonzero(ids >= 0).tolist():
        gate, up, down = MATRICES[int(ids[t, k])]
        expected[t] += weights[t, k] * (down @ (torch.nn.functional.silu(gate @ x[t]) * (up @ x[t])))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.row(8)
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on this machine")
def test_native_experts_refuse_them_too() -> None:
    native = EXPERTS["cpu_native"](ExpertsContext(FP32, FP32, "silu", 4, HIDDEN, max(WIDTHS), CPU))
    with pytest.raises(UnsupportedError, match="cpu_native holds equal ones"):
        native.relayout(WEIGHTS)
