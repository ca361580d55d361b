"""Gate activations by name: what stands between the two GEMMs of an expert.

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


def activation(name: str, gate: Tensor | None, up: Tensor) -> Tensor:
    """act(gate) * up, or act(up) for an expert without a gate."""
    return ACTIVATIONS[name](up) if gate is None else ACTIVATIONS[name](gate) * up
