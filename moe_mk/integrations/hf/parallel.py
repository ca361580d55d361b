"""Communication of transformers' expert parallelism with the transports of this library.

`DistributedConfig(ep_implementation="moe_mk")` builds one of these for each experts module. The rank's experts are
computed by the same plan as without expert parallelism. Interface as of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation

from moe_mk.comm.groups import communicator
from moe_mk.errors import UnsupportedError
from moe_mk.integrations.engine_experts import routing_of
from moe_mk.integrations.hf.plan import Ranks, plan_of


class MoeMkEP(EPImplementation):
    """Dispatch tokens to the ranks of their experts, compute, and combine."""

    settings: Mapping[str, Any] = {}

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        comm = communicator(ep_mesh.get_group(), layer=type(experts).__name__)
        self.ranks = Ranks(comm, replicated=bool(self.shares_batch))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The rank's tokens (T, H) with ids of all experts: (T, H), weighted and summed. Every rank must call it."""
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise UnsupportedError(
                "gradients through ep_implementation='moe_mk'", ["inference only; call it under torch.no_grad()"]
            )
        plan = plan_of(self.experts, hidden_states.dtype, self.settings, self.ranks)
        routing = routing_of(top_k_index, top_k_weights, plan.facts.num_experts * self.ranks.comm.size)
        return plan.run(hidden_states.contiguous(), routing)


def ep_class(settings: Mapping[str, Any]) -> type[MoeMkEP]:
    """The implementation with its settings, as required by the registry: a class with three arguments."""
    return type("MoeMkEP", (MoeMkEP,), {"settings": dict(settings), "__doc__": MoeMkEP.__doc__})
