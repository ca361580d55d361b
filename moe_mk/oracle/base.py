"""What one quantisation type declares; the engine in `decide.py` does the rest.

What every type with rounded activations declares alike: what experts compute with, what travels, what else to hold.

Experts that read rounded activations and a transport that can carry them quantise before sending; else tokens travel in
the layer's dtype and the experts round. Never both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.experts.base import ExpertsTraits
from moe_mk.oracle.fallback import WeightFormat, as_stored, in_fp8, in_layer_dtype
from moe_mk.prepare_finalize.base import TransportTraits
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import Registry


class Oracle(ABC):
    """The choices that depend on how experts are stored."""

    name: ClassVar[str]
    stored: ClassVar[frozenset[str]]
    """Values of model.quant.weights it serves."""

    @classmethod
    @abstractmethod
    def compute_scheme(cls, problem: Problem, experts: ExpertsTraits) -> QuantScheme:
        """What the experts round activations to."""

    @classmethod
    @abstractmethod
    def wire_scheme(cls, problem: Problem, transport: TransportTraits, compute: QuantScheme) -> QuantScheme:
        """What tokens are quantised to before they travel, given what the experts compute with."""

    @classmethod
    def formats(cls, problem: Problem) -> tuple[WeightFormat, ...]:
        """The formats the weights may be held in, best first. By default only the one they are stored in."""
        return (as_stored(problem),)


ORACLES: Registry[type[Oracle]] = Registry("oracle", Oracle, group="moe_mk.oracles")


class RoundedOracle(Oracle):
    """A type whose checkpoints ask for rounded activations, or leave them in the layer's dtype (weight-only)."""

    @classmethod
    def compute_scheme(cls, problem: Problem, experts: ExpertsTraits) -> QuantScheme:
        """What kernel.activations asks for, else the first that the experts name among the two that are possible."""
        activations, wish = problem.activations, problem.config.kernel.activations
        if activations is None or wish == "plain":
            return problem.dtype
        possible = [name for name in experts.computes if name in ("plain", activations.family)]
        rounds = wish == "checkpoint" or (bool(possible) and possible[0] != "plain")
        return activations if rounds else problem.dtype

    @classmethod
    def wire_scheme(cls, problem: Problem, transport: TransportTraits, compute: QuantScheme) -> QuantScheme:
        """The rounded activations if they may travel and the experts read them, or if kernel.wire insists."""
        activations, wish = problem.activations, problem.config.kernel.wire
        if activations is None or activations.family not in transport.wire or wish == "plain":
            return problem.dtype
        return activations if wish in ("fp8", "checkpoint") or compute == activations else problem.dtype

    @classmethod
    def formats(cls, problem: Problem) -> tuple[WeightFormat, ...]:
        """As stored, with rounded activations or weight-only; else in FP8; else in the layer's dtype."""
        return as_stored(problem), in_fp8(problem), in_layer_dtype(problem)
