"""Gate activations against their formulas."""

import math
from collections.abc import Callable

import pytest
import torch

from moe_mk.kernels.reference.activation import ACTIVATIONS, CLAMPED, activation

FORMULAS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_its_formula(name: str) -> None:
    gate = torch.linspace(-6, 6, 49, dtype=torch.float64).view(7, 7)
    up = torch.linspace(2, -1, 49, dtype=torch.float64).view(7, 7)
    before = gate.clone(), up.clone()
    expected = torch.tensor([FORMULAS[name](x) for x in gate.flatten().tolist()], dtype=torch.float64).view(7, 7)
    torch.testing.assert_close(activation(name, gate, up), expected * up, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(activation(name, None, gate), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


@pytest.mark.parametrize("name", CLAMPED)
@pytest.mark.parametrize("limit", [None, 2.0])
def test_clamped_swiglu_is_its_formula(name: str, limit: float | None) -> None:
    gate = torch.linspace(-6, 6, 49, dtype=torch.float64).view(7, 7)
    up = torch.linspace(4, -5, 49, dtype=torch.float64).view(7, 7)
    expected = []
    for g, u in zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True):
        if name == "situ":
            u = u if limit is None else limit * math.tanh(u / limit)
            expected.append(1.702 * math.tanh(g / 1.702) / (1 + math.exp(-g)) * u)
            continue
        if limit is not None:
            g, u = g if name == "silu_limit" else min(g, limit), max(-limit, min(u, limit))
        sigmoid = 1 / (1 + math.exp(-(1.702 if name == "swiglu_oai" else 1.0) * g))
        hidden = g * sigmoid if limit is None or name != "silu_limit" else min(g * sigmoid, limit)
        expected.append(hidden * (u + 1 if name == "swiglu_oai" else u))
    got = activation(name, gate, up, alpha=1.702, limit=limit)
    torch.testing.assert_close(got.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_stays_and_no_rows_are_fine(dtype: torch.dtype) -> None:
    none = torch.empty(0, 8, dtype=dtype)
    result = activation("silu", none, none)
    assert result.shape == (0, 8) and result.dtype == dtype
