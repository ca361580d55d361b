"""A tiny layer of routed experts, and what it computes by plain loops in f64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EXPERTS, HIDDEN, INNER, TOP_K = 5, 32, 24, 2
CLOSE = 1e-5
"""Relative, in f32: sums of some thirty products in another order."""


@dataclass(frozen=True)
class Tiny:
    """Weights as engines hold them: gate rows, then up rows."""

    w13: Tensor
    w2: Tensor

    @classmethod
    def drawn(cls, *, gated: bool = True, seed: int = 0) -> Tiny:
        draw = torch.Generator().manual_seed(seed)
        rows = 2 * INNER if gated else INNER
        w13 = torch.randn((EXPERTS, rows, HIDDEN), generator=draw) * 0.3
        return cls(w13, torch.randn((EXPERTS, HIDDEN, INNER), generator=draw) * 0.3)

    def expert(self, e: int, x: Tensor) -> Tensor:
        h = x.double() @ self.w13[e].double().T
        if self.w13.shape[1] == self.w2.shape[2]:
            return torch.relu(h).square() @ self.w2[e].double().T
        gate, up = h.chunk(2, dim=-1)
        return (functional.silu(gate) * up) @ self.w2[e].double().T

    def loops(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Every assignment on its own; ids outside the experts add nothing."""
        y_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
        for t, k in torch.cartesian_prod(torch.arange(x_TH.shape[0]), torch.arange(ids_TK.shape[1])).tolist():
            e = int(ids_TK[t, k])
            if 0 <= e < len(self.w13):
                y_TH[t] += float(weights_TK[t, k]) * self.expert(e, x_TH[t])
        return y_TH


def call(num_tokens: int = 7, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights that do not add up to one, and ids without repeats."""
    draw = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand((num_tokens, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    x_TH = torch.randn((num_tokens, HIDDEN), generator=draw)
    return x_TH, torch.rand((num_tokens, TOP_K), generator=draw) + 0.1, ids_TK


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())
