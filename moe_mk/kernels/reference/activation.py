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

    alpha, limit: of the clamped kinds, "swiglu_limit" and "swiglu_oai"; others ignore them.
    """
    if name in CLAMPED:
        assert gate is not None, f"{name} needs a gate"
        return CLAMPED[name](*_clamped(gate, up, limit), alpha)
    return ACTIVATIONS[name](up) if gate is None else ACTIVATIONS[name](gate) * up


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Clamp the gate from above and up from both sides."""
    if limit is None:
        return gate, up
    return gate.clamp(max=limit), up.clamp(-limit, limit)


CLAMPED: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "swiglu_limit": lambda gate, up, alpha: functional.silu(gate) * up,
    "swiglu_oai": lambda gate, up, alpha: gate * torch.sigmoid(alpha * gate) * (up + 1.0),
}
"""Clamped SwiGLU: DeepSeek-V4's, and gpt-oss's with a slope in the sigmoid and one added to up.

Source: DeepseekV4MLP and GptOssExperts of transformers 5.23.
"""
