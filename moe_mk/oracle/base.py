"""What one quantisation type declares; the engine in `decide.py` does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.experts.base import ExpertsTraits
from moe_mk.oracle.fallback import Form, as_stored
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
    def forms(cls, problem: Problem) -> tuple[Form, ...]:
        """The forms the weights may be held in, best first. By default only the one they are stored in."""
        return (as_stored(problem),)


ORACLES: Registry[type[Oracle]] = Registry("oracle", Oracle, group="moe_mk.oracles")
