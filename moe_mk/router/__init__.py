"""From hidden states to a routing: the gate, and the choice of experts."""

from moe_mk.router.gate import GateChoice, choose_gate_tier, gate_logits
from moe_mk.router.router import ROUTERS, Router, RouterKind
from moe_mk.router.topk import grouped_topk, topk

__all__ = ["ROUTERS", "GateChoice", "Router", "RouterKind", "choose_gate_tier", "gate_logits", "grouped_topk", "topk"]
