"""Expert load balancing (EPLB): which experts to replicate, where to place each replica, and its share of the tokens.

Use `plan` and `resplit`. `rebalance_experts` and its three steps return exactly what DeepSeek's EPLB returns.
Pure functions on the CPU, without communication.
"""

from __future__ import annotations

from moe_mk.placement.balance.compat import (
    balanced_packing,
    inverse,
    rebalance_experts,
    rebalance_experts_hierarchical,
    replicate_experts,
)
from moe_mk.placement.balance.moves import Moves
from moe_mk.placement.balance.plan import PlacementPlan, plan, resplit, slot_loads
from moe_mk.placement.balance.policy import EPLB_POLICIES, EplbPolicy, Policy, SlotPlacement
from moe_mk.placement.balance.request import PlacementRequest, Split
from moe_mk.placement.balance.shares import Cost
from moe_mk.placement.balance.topology import InfeasiblePlacement, Topology

__all__ = [
    "EPLB_POLICIES", "PlacementRequest", "Cost", "EplbPolicy", "InfeasiblePlacement", "Moves", "SlotPlacement",
    "PlacementPlan", "Policy", "Split", "Topology", "balanced_packing", "inverse", "plan",
    "rebalance_experts", "rebalance_experts_hierarchical", "replicate_experts", "resplit", "slot_loads",
]  # fmt: skip
