"""The kernel of `kernel.invariant`: the bits of a token depend on the token and the weights alone.

Elsewhere a rank adds the outputs of its own experts before it returns them, so the order of a token's sum, and where it
is rounded, follow from which experts share a rank. Here every assignment is a row of its own, with one expert and
weight 1, through the same transport and the same experts:

    x (T, H), ids (T, K)  ->  rows (T K, H), ids (T K, 1)  ->  dispatch, experts, combine  ->  y (T K, H)
    output (T, H) = round(sum over k of weight[t, k] * y[t, k])      in the order of k, in f32, rounded once

A returned row has been added to nothing but zeros on its way, which changes no bits; sums that are zero are +0 whatever
the signs of their terms. The experts must be batch-invariant. Price: up to K times the rows in both directions, where
otherwise a token is sent to each rank once, and one rounding to the layer's dtype for each assignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.flight import Flight
from moe_mk.kernel import FusedMoEKernel
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import Weights


@dataclass(frozen=True)
class InvariantKernel(FusedMoEKernel):
    """A transport and experts, one row for each assignment, summed by the rank that has the token."""

    can_be_prepared: ClassVar[bool] = False

    def steps(self, x_TH: Tensor, routing: Routing, weights: Weights) -> Flight[Tensor]:
        (tokens, top_k), hidden = routing.ids_TK.shape, x_TH.shape[1]
        ids_N1 = routing.ids_TK.reshape(tokens * top_k, 1)
        x_NH = x_TH.unsqueeze(1).expand(tokens, top_k, hidden).reshape(tokens * top_k, hidden)
        y_NH = yield from super().steps(x_NH, Routing(ids_N1, (ids_N1 >= 0).to(torch.float32)), weights)
        with self.spans.span("reduce"):
            return add_choices(y_NH.view(tokens, top_k, hidden), routing.weights_TK)


def add_choices(y_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """Weigh and add the outputs of each token's choices in their order, in f32; (T, H) in the dtype of `y_TKH`.

    Products and sums are separate operations: a fused one would round otherwise where vectors end.
    """
    total_TH = torch.zeros((y_TKH.shape[0], y_TKH.shape[2]), dtype=torch.float32, device=y_TKH.device)
    for k in range(y_TKH.shape[1]):
        total_TH += y_TKH[:, k].float() * weights_TK[:, k, None]
    return total_TH.to(y_TKH.dtype)
