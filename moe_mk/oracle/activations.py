"""What experts round activations to, and what tokens travel in: one rule for every type that has rounded activations.

Experts that read rounded activations and a transport that can carry them quantise before sending; else tokens travel in
the layer's dtype and the experts round. Never both.
"""

from __future__ import annotations

from moe_mk.config.problem import Problem
from moe_mk.experts.base import ExpertsTraits
from moe_mk.prepare_finalize.base import TransportTraits
from moe_mk.quant.tensor import QuantScheme


def rounded_or_plain(problem: Problem, experts: ExpertsTraits) -> QuantScheme:
    """What kernel.activations asks for, else the first that the experts name among the two that are possible."""
    activations, wish = problem.activations, problem.config.kernel.activations
    if activations is None or wish == "plain":
        return problem.dtype
    possible = [name for name in experts.computes if name in ("plain", activations.family)]
    rounds = wish == "checkpoint" or (bool(possible) and possible[0] != "plain")
    return activations if rounds else problem.dtype


def rounded_wire(problem: Problem, transport: TransportTraits, compute: QuantScheme) -> QuantScheme:
    """The rounded activations if they may travel and the experts read them, or if kernel.wire insists."""
    activations, wish = problem.activations, problem.config.kernel.wire
    if activations is None or activations.family not in transport.wire or wish == "plain":
        return problem.dtype
    return activations if wish in ("fp8", "checkpoint") or compute == activations else problem.dtype
