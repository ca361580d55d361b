"""Communication of transformers' expert parallelism with the transports of this library.

`DistributedConfig(ep_implementation="moe_mk")` builds one of these for each experts module. The rank's experts are
computed by the same plan as without expert parallelism. Interface as of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation

from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S
from moe_mk.comm.groups import ParallelGroups
from moe_mk.integrations.hf.plan import Ranks, plan_of
from moe_mk.layer.grid import Grid


class MoeMkEP(EPImplementation):
    """Dispatch tokens to the ranks of their experts, compute, and combine."""

    settings: Mapping[str, Any] = {}

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        grid = Grid(ParallelGroups(ep=ep_mesh.get_group()), DEFAULT_TIMEOUT_S, type(experts).__name__)
        self.ranks = Ranks(grid, replicated=bool(self.shares_batch))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The rank's tokens (T, H) with ids of all experts: (T, H), weighted and summed. Every rank must call it."""
        plan = plan_of(self.experts, hidden_states.dtype, self.settings, self.ranks)
        return plan.of_rank.run(hidden_states, top_k_weights, top_k_index)


def ep_class(settings: Mapping[str, Any]) -> type[MoeMkEP]:
    """The implementation with its settings, as required by the registry: a class with three arguments."""
    return type("MoeMkEP", (MoeMkEP,), {"settings": dict(settings), "__doc__": MoeMkEP.__doc__})
