"""A MoE layer that is trained: its routers, its exchange with gradients, and the losses that balance its experts.

from moe_mk.lab.training import TrainingMoE
"""

from moe_mk.lab.training.layer import TrainingExchange, TrainingMoE, TrainingOutput
from moe_mk.lab.training.router import (
    CapacityRouting,
    balance_loss,
    expert_capacity,
    importance,
    noisy_topk,
    route_with_capacity,
    updated_bias,
)

__all__ = [
    "CapacityRouting", "TrainingExchange", "TrainingMoE", "TrainingOutput", "balance_loss", "expert_capacity",
    "importance", "noisy_topk", "route_with_capacity", "updated_bias",
]  # fmt: skip
