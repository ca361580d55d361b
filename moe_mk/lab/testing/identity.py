"""Experts that return their input, to check a transport separately: token times the sum of its weights.

With factors, each expert multiplies by its own, so that a row in a wrong slot is detected.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.config.traits import DEVICES
from moe_mk.experts.base import ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import Weights


def _is_padding(tokens: GroupedTokens | BatchedTokens, y: Tensor) -> Tensor:
    """Which rows belong to no assignment, [N, 1] or [L, S, 1]: experts may return anything there."""
    if isinstance(tokens, BatchedTokens):
        slot_S = torch.arange(y.shape[1], dtype=torch.int64, device=y.device)
        return (slot_S >= tokens.counts_L[:, None])[..., None]
    row_N = torch.arange(y.shape[0], dtype=torch.int64, device=y.device)
    return (row_N >= tokens.counts_L.sum())[:, None]


class IdentityExperts(FusedExperts):
    """Every expert is the identity, or a factor (L,); padding becomes NaN. Never registered."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="returns its input, to check transports",
        kinds=DEVICES,
        emits={GroupedTokens: OutputStage.RAW, BatchedTokens: OutputStage.RAW},
        weights=frozenset({"plain", "fp8_block"}),
        computes=("plain",),
        graph_safe=True,
        deterministic=True,
    )

    def __init__(self, context: ExpertsContext, factors_L: Tensor | None = None) -> None:
        super().__init__(context)
        self.factors_L = factors_L

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """The received rows, times the factor of their slot, in the layer's dtype."""
        assert not isinstance(tokens, RowTokens)
        x = tokens.x_NH if isinstance(tokens, GroupedTokens) else tokens.x_LSH
        y = x.dequantize(self.context.dtype.dtype)
        y = y if self.factors_L is None else y * self._factors_of(tokens, y)
        return ExpertOutput(torch.where(_is_padding(tokens, y), torch.nan, y), OutputStage.RAW)

    def _factors_of(self, tokens: GroupedTokens | BatchedTokens, y: Tensor) -> Tensor:
        assert self.factors_L is not None
        factors_L = self.factors_L.to(y.dtype)
        if isinstance(tokens, BatchedTokens):
            return factors_L[:, None, None]
        spare = y.shape[0] - int(tokens.counts_L.sum())  # rows after those of the last expert are unassigned
        factors_N = torch.repeat_interleave(factors_L, tokens.counts_L.long())
        return torch.cat((factors_N, factors_N.new_zeros(spare)))[:, None]
