"""Expert load balancing: which experts to copy, where every copy lies, and what part of the tokens it takes.

`rebalance_experts` and its three steps answer exactly as DeepSeek's; `plan` and `resplit` are what to use instead.
Pure functions on the CPU; nothing here talks to other ranks.
"""

from __future__ import annotations

from moe_mk.placement.balance.ask import Ask, Split
from moe_mk.placement.balance.compat import (
    balanced_packing,
    inverse,
    rebalance_experts,
    rebalance_experts_hierarchical,
    replicate_experts,
)
from moe_mk.placement.balance.moves import Moves
from moe_mk.placement.balance.plan import PlacementPlan, plan, resplit, slot_loads
from moe_mk.placement.balance.policy import EPLB_POLICIES, EplbPolicy, Placed, Policy
from moe_mk.placement.balance.shares import Cost
from moe_mk.placement.balance.spread import least_peak
from moe_mk.placement.balance.topology import InfeasiblePlacement, Topology

__all__ = [
    "EPLB_POLICIES",
    "Ask",
    "Cost",
    "EplbPolicy",
    "InfeasiblePlacement",
    "Moves",
    "Placed",
    "PlacementPlan",
    "Policy",
    "Split",
    "Topology",
    "balanced_packing",
    "inverse",
    "least_peak",
    "plan",
    "rebalance_experts",
    "rebalance_experts_hierarchical",
    "replicate_experts",
    "resplit",
    "slot_loads",
]
