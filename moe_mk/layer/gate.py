"""The gate of one layer: its weight in the precision of the router, and the tier that multiplies by it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.oracle.verdict import Decision
from moe_mk.router.gate import choose_gate_tier, gate_logits


class Gate:
    """Hidden states to router logits. Empty until loaded."""

    def __init__(self, decision: Decision, dtype: torch.dtype, device: torch.device) -> None:
        self.decision, self.dtype, self.device = decision, dtype, device
        self.router_dtype = decision.problem.config.router.router_dtype
        self.weight_EH: Tensor | None = None
        self.bias_E: Tensor | None = None
        """f32; takes part in the choice of experts only."""

    def load(self, weight_EH: Tensor, bias_E: Tensor | None) -> None:
        """Take the weight, converted once, and the correction bias in f32."""
        dtype = torch.float32 if keeps_gate_in_f32(self.decision) else self.dtype
        self.weight_EH = weight_EH.to(device=self.device, dtype=dtype)
        self.bias_E = None if bias_E is None else bias_E.to(device=self.device, dtype=torch.float32)

    def __call__(self, x_TH: Tensor) -> Tensor:
        """(T, H) to (T, E): f32, or the layer's dtype where the router works in it."""
        assert self.weight_EH is not None
        tier = "plain" if keeps_gate_in_f32(self.decision) else self._tier(x_TH.shape[0])
        return gate_logits(x_TH, self.weight_EH, self.router_dtype, tier)

    def _tier(self, num_tokens: int) -> str:
        problem = self.decision.problem
        model, arch = problem.config.model, problem.device.arch if problem.device.kind == "cuda" else None
        return choose_gate_tier(
            arch, num_tokens, model.hidden_size, model.num_experts, self.dtype, self.router_dtype, frozenset()
        ).tier


def keeps_gate_in_f32(decision: Decision) -> bool:
    """Whether the gate's weight is kept in f32, because no tier of the decision reads it narrower."""
    return decision.problem.config.router.router_dtype == "float32" and decision.gate.tier == "plain"
