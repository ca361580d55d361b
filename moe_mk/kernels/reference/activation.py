"""Gate activations by name, applied between the two GEMMs of an expert.

Reads gate (m, i) or None and up (m, i), writes (m, i) in the dtype of `up`. silu * mul is SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: torch.relu(x).square(),
}


def activation(name: str, gate: Tensor | None, up: Tensor, *, alpha: float = 1.0, limit: float | None = None) -> Tensor:
    """act(gate) * up, or act(up) for an expert without a gate.

    alpha, limit: of the kinds of `CLAMPED`; others ignore them. limit: None for no clamp.
    """
    if name in CLAMPED:
        assert gate is not None, f"{name} needs a gate"
        return CLAMPED[name](gate, up, alpha, limit)
    return ACTIVATIONS[name](up) if gate is None else ACTIVATIONS[name](gate) * up


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    if limit is None:
        return gate, up
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def _swiglu_limit(gate: Tensor, up: Tensor, alpha: float, limit: float | None) -> Tensor:
    gate, up = _clamped(gate, up, limit)
    return functional.silu(gate) * up


def _swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float | None) -> Tensor:
    gate, up = _clamped(gate, up, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1.0)


def _silu_limit(gate: Tensor, up: Tensor, alpha: float, limit: float | None) -> Tensor:
    gate, up = _clamped(functional.silu(gate), up, limit)
    return gate * up


def _situ(gate: Tensor, up: Tensor, alpha: float, limit: float | None) -> Tensor:
    gate = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate)
    return gate * (up if limit is None else limit * torch.tanh(up / limit))


CLAMPED: Mapping[str, Callable[[Tensor, Tensor, float, float | None], Tensor]] = {
    "swiglu_limit": _swiglu_limit,
    "swiglu_oai": _swiglu_oai,
    "silu_limit": _silu_limit,
    "situ": _situ,
}
"""SwiGLU with limits: clamped before SiLU (DeepSeek-V4), with a slope in the sigmoid and one added to up (gpt-oss),
clamped after SiLU (Step-3.7), and with soft limits by tanh, alpha of the gate and limit of up (Kimi-K3).

Source: DeepseekV4MLP, GptOssExperts and Step3p7Experts of transformers 5.24, SituAndMul of vLLM.
"""
