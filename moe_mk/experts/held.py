"""Experts whose backend does not support the checkpoint's format: the weights are requantised at load."""

from __future__ import annotations

from moe_mk.experts.base import FusedExperts
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import ExpertOutput, Tokens
from moe_mk.weights.expert_weights import Weights
from moe_mk.weights.requantise import held_as
from moe_mk.weights.scan import Progress


class HeldExperts(FusedExperts):
    """A backend whose weights are requantised to another scheme than the stored one.

    Not registered; used for a Decision whose weights are held in another format. down: that of down projections.
    """

    def __init__(self, inner: FusedExperts, scheme: QuantScheme, down: QuantScheme) -> None:
        super().__init__(inner.context)
        self.inner, self.scheme, self.down = inner, scheme, down
        self.traits = inner.traits  # type: ignore[misc]

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Run the backend."""
        return self.inner(tokens, weights)

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """Requantise, then convert to the layout of the backend. The stored weights are not changed.

        Plain shared experts of quantised routed ones stay as they are.
        """
        down = weights.slot(0).down_HI.scheme if weights.num_slots else weights.scheme
        both = (weights.scheme, down), (self.scheme, self.down)
        stored, wanted = (all(isinstance(scheme, Plain) for scheme in schemes) for schemes in both)
        if not stored or wanted or "plain" not in self.traits.weights:
            weights = held_as(weights, self.scheme, self.down)
        return self.inner.relayout(weights, on_progress=on_progress)
