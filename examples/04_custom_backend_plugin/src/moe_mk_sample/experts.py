"""Experts as a loop of matrix products over rows that are sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moe_mk.config.problem import Problem, Reason
from moe_mk.experts.base import ExpertsTraits, FusedExperts
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, Tokens
from moe_mk.weights.expert_weights import Weights


class MatmulLoop(FusedExperts):
    """One expert after the other in the layer's dtype."""

    traits = ExpertsTraits(
        summary="a loop of matmuls, to show how experts are written",
        kinds=frozenset({"cpu"}),  # where it has been tested
        emits={GroupedTokens: OutputStage.RAW},
        weights=frozenset({"plain", "fp8_block"}),
        computes=("plain",),
        activations=frozenset({"silu"}),
        graph_safe=False,
        deterministic=True,
        bandwidth=0.05,
        compute=0.3,
        per_expert=True,
    )

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """What the traits say, and what only this backend knows."""
        reasons = super().reasons_against(problem)
        if problem.intermediate % 64:
            reasons.append(Reason("shape", f"needs I in multiples of 64, this shard has {problem.intermediate}"))
        return reasons

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Rows of an expert, its three matrices, its rows again; weighing and summing is left to others."""
        assert isinstance(tokens, GroupedTokens)
        dtype = self.context.dtype.dtype
        parts: list[Tensor] = []
        for slot, x in enumerate(tokens.x_NH.dequantize(dtype).split(tokens.counts_L.tolist())):
            expert = weights.slot(slot)
            assert expert.gate_IH is not None
            gate = functional.silu(x @ expert.gate_IH.dequantize(dtype).T)
            h = gate * (x @ expert.up_IH.dequantize(dtype).T)
            parts.append(h @ expert.down_HI.dequantize(dtype).T)
        return ExpertOutput(torch.cat(parts), OutputStage.RAW)
