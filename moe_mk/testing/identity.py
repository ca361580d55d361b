"""Experts that return what they get, so that a transport can be judged alone: token times the sum of its weights."""

from __future__ import annotations

from typing import ClassVar

from moe_mk.experts.base import ExpertsTraits, FusedExperts
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import Weights


class IdentityExperts(FusedExperts):
    """Every expert is the identity. Never registered."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="returns its input, to judge transports by",
        emits={GroupedTokens: OutputStage.RAW, BatchedTokens: OutputStage.RAW},
        weights=frozenset({"plain", "fp8_block"}),
        computes=("plain",),
    )

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """The rows as they came, in the layer's dtype."""
        assert not isinstance(tokens, RowTokens)
        x = tokens.x_NH if isinstance(tokens, GroupedTokens) else tokens.x_LSH
        return ExpertOutput(x.dequantize(self.context.dtype.dtype), OutputStage.RAW)
