"""mini-sglang: `--moe-backend moe_mk`, after `register()`.

mini-sglang passes router logits; softmax, top-k and experts run here, the tensor-parallel sum in mini-sglang.
A process that serves must call `register()` before it parses its arguments. Its contract is tested against a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights, HeldExperts
from moe_mk.router import topk as choose

NAME = "moe_mk"


def register(name: str = NAME, **settings: Any) -> bool:
    """Register a backend in mini-sglang's table; False if the name exists. settings: of MoEConfig.kernel."""
    from minisgl.moe import SUPPORTED_MOE_BACKENDS

    if name in SUPPORTED_MOE_BACKENDS.supported_names():
        return False
    enter: Callable[[Callable[[], MoeMkBackend]], object] = SUPPORTED_MOE_BACKENDS.register(name)
    enter(lambda: MoeMkBackend(settings))
    return True


class MoeMkBackend:
    """The object that mini-sglang calls for every MoE layer of a model."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings, self._held = dict(settings), HeldExperts()

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
    ) -> Tensor:
        """(T, H) to (T, H). w1: (E, 2I, H), gate then up. gating_output: logits (T, E)."""
        if apply_router_weight_on_input:
            raise UnsupportedError("moe_mk in mini-sglang", ["routing weights are applied to the experts' input"])
        weights = EngineWeights(w1, w2, activation)
        experts = self._held.of(
            (w1, w2), lambda: EngineExperts("mini-sglang", weights, top_k=topk, settings=self.settings)
        )
        topk_weights, topk_ids = choose(gating_output, topk, scoring_func="softmax", renormalize=renormalize)
        return experts(hidden_states, topk_weights, topk_ids)
