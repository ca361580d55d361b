"""Experts whose backend does not read the checkpoint's format: the same backend, behind weights requantised at load."""

from __future__ import annotations

from moe_mk.experts.base import FusedExperts
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import ExpertOutput, Tokens
from moe_mk.weights.expert_weights import Weights
from moe_mk.weights.requantise import held_as
from moe_mk.weights.scan import Progress


class HeldExperts(FusedExperts):
    """A backend that gets its weights in another scheme than the one they are stored in.

    Never chosen by name: a Decision whose weights are held in another form is built with it.
    """

    def __init__(self, inner: FusedExperts, scheme: QuantScheme) -> None:
        super().__init__(inner.context)
        self.inner, self.scheme = inner, scheme
        self.traits = inner.traits  # type: ignore[misc]

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """What the backend does."""
        return self.inner.run(tokens, weights)

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """Requantise, then bring into the layout of the backend. The stored weights stay as they are."""
        return self.inner.relayout(held_as(weights, self.scheme), on_progress=on_progress)
