"""Experts that do what a foreign module does between its GEMMs: its own gate, its biases, its norm.

Choose it for modules that no registered backend can read; it is never registered, because it belongs to one module.
"""

from __future__ import annotations

from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_mk.experts.base import ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.integrations.hf.modules import ModuleFacts
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, Tokens
from moe_mk.weights.expert_weights import ExpertWeights, Weights

NAME = "module_loop"


class ModuleExperts(FusedExperts):
    """One expert after the other, over rows sorted by expert."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="a loop over experts around the gate, the biases and the norm of a transformers module",
        emits={GroupedTokens: OutputStage.RAW},
        weights=frozenset({"plain", "fp8_block"}),
        computes=("plain",),
        graph_safe=False,
        per_expert=True,
    )

    def __init__(self, context: ExpertsContext, module: nn.Module, facts: ModuleFacts) -> None:
        super().__init__(context)
        self._module, self.facts = ref(module), facts

    def relayout(self, weights: Weights) -> Weights:
        """They are read where the module holds them."""
        return weights

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Multiply each expert's rows; experts without rows are not touched."""
        assert isinstance(tokens, GroupedTokens)
        dtype = self.context.dtype.dtype
        x_NH = tokens.x_NH.dequantize(dtype)
        y_NH = torch.empty((x_NH.shape[0], self.context.hidden_size), dtype=dtype, device=x_NH.device)
        start = 0
        for slot, count in enumerate(tokens.counts_L.tolist()):
            if count:
                rows = slice(start, start + count)
                y_NH[rows] = self._ffn(x_NH[rows], slot, weights)
            start += count
        return ExpertOutput(y_NH, OutputStage.RAW)

    def _ffn(self, x: Tensor, slot: int, weights: Weights) -> Tensor:
        module, facts = self._module(), self.facts
        assert module is not None
        w13, w2 = _matrices(weights, slot, x.dtype)
        h = functional.linear(x, w13, self._bias(module, "gate_up_proj" if facts.gated else "up_proj", slot))
        h = module._apply_gate(h) if facts.gated else module.act_fn(h)  # type: ignore[operator]
        y: Tensor = functional.linear(h.to(x.dtype), w2, self._bias(module, "down_proj", slot))
        return module.post_expert_norm(y) if facts.post_norm else y  # type: ignore[operator]

    def _bias(self, module: nn.Module, name: str, slot: int) -> Tensor | None:
        if not self.facts.biased:
            return None
        held = getattr(module, f"{name}_bias")
        assert isinstance(held, Tensor)
        return held[slot].to(self.context.dtype.dtype)


def _matrices(weights: Weights, slot: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both matrices of an expert, gate and up in the order the module holds them."""
    if isinstance(weights, ExpertWeights):
        return weights.w13[slot].dequantize(dtype), weights.w2[slot].dequantize(dtype)
    expert = weights.slot(slot)
    parts = [q.dequantize(dtype) for q in (expert.gate_IH, expert.up_IH) if q is not None]
    return torch.cat(parts), expert.down_HI.dequantize(dtype)
