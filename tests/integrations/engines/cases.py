"""A tiny layer of routed experts, and what it computes by plain loops in f64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EXPERTS, HIDDEN, INNER, TOP_K = 5, 32, 24, 2
CLOSE = 1e-5
"""Relative, in f32: sums of some thirty products in another order."""


def activated(name: str, rows: Tensor, limit: float | None = None, alpha: float = 1.702) -> Tensor:
    """What engines compute of the outputs of w13, by vLLM's names of activations; gate, then up, where not stated."""
    if name == "relu2":
        return rows.relu().square()
    gate, up = (rows[..., 0::2], rows[..., 1::2]) if name == "swigluoai" else rows.chunk(2, -1)
    limit = 7.0 if name.startswith("swigluoai") and limit is None else limit
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name.startswith("swigluoai"):
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if name == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


@dataclass(frozen=True)
class Tiny:
    """Weights as engines hold them: gate rows, then up rows."""

    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    activation: str = "silu"
    limit: float | None = None
    alpha: float = 1.702

    @classmethod
    def drawn(
        cls, *, gated: bool = True, seed: int = 0, inner: int = INNER, hidden: int = HIDDEN, biased: bool = False
    ) -> Tiny:
        draw = torch.Generator().manual_seed(seed)
        rows = 2 * inner if gated else inner
        shapes = [(EXPERTS, rows, hidden), (EXPERTS, hidden, inner), *[(EXPERTS, rows), (EXPERTS, hidden)] * biased]
        made = [torch.randn(shape, generator=draw) * 0.3 for shape in shapes]
        return cls(*made, activation="silu" if gated else "relu2")

    def expert(self, e: int, x: Tensor) -> Tensor:
        b13, b2 = (0.0 if bias is None else bias[e].double() for bias in (self.b13, self.b2))
        h = activated(self.activation, x.double() @ self.w13[e].double().T + b13, self.limit, self.alpha)
        return h @ self.w2[e].double().T + b2

    def loops(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Every assignment on its own; ids outside the experts add nothing."""
        y_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
        for t, k in torch.cartesian_prod(torch.arange(x_TH.shape[0]), torch.arange(ids_TK.shape[1])).tolist():
            e = int(ids_TK[t, k])
            if 0 <= e < len(self.w13):
                y_TH[t] += float(weights_TK[t, k]) * self.expert(e, x_TH[t])
        return y_TH


def call(num_tokens: int = 7, seed: int = 1, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights that do not add up to one, and ids without repeats."""
    draw = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand((num_tokens, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    x_TH = torch.randn((num_tokens, hidden), generator=draw)
    return x_TH, torch.rand((num_tokens, TOP_K), generator=draw) + 0.1, ids_TK


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())
