"""What the gate of a foreign experts module computes, found by trying it: a name or a flag could say something else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_mk.kernels.reference.activation import ACTIVATIONS, activation

WIDTH = 96
"""Columns of a probe: of the gate, and of the up projection."""
SPREADS = (1.0, 8.0, 100.0, 3000.0)
"""Standard deviations of its rows, so that a clamp shows."""
CLOSE = 1e-5
"""Relative; two ways to write one activation differ by an ulp or two of f32."""


def activation_of(compute: Callable[[Tensor], Tensor], *, gated: bool, device: torch.device) -> str | None:
    """The name of the activation that `compute` is, or None if it is none of ours.

    compute: (N, 2I) gate columns, then up columns, to (N, I); ungated (N, I) to (N, I).
    """
    probe = _probe(2 * WIDTH if gated else WIDTH, device)
    try:
        got = compute(probe.clone())
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it wants other shapes or dtypes: not one of ours
        return None
    gate, up = probe.chunk(2, dim=-1) if gated else (None, probe)
    for name in ACTIVATIONS:
        expected = activation(name, gate, up)
        if got.shape == expected.shape and torch.allclose(got.float(), expected, rtol=CLOSE, atol=CLOSE):
            return name
    return None


def _probe(columns: int, device: torch.device) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(7)
    rows = [torch.randn((2, columns), generator=draw, dtype=torch.float32, device="cpu") * spread for spread in SPREADS]
    return torch.cat(rows).to(device)
