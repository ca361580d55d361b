"""Experts stored in the layer's own floating point: nothing is quantised anywhere."""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.experts.base import ExpertsTraits
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, Oracle
from moe_mk.oracle.decide import decide
from moe_mk.oracle.verdict import Decision
from moe_mk.prepare_finalize.base import TransportTraits
from moe_mk.quant.tensor import QuantScheme
from moe_mk.runner.monolithic import MonolithicKernel


@ORACLES.register("unquantized")
class UnquantizedOracle(Oracle):
    """Tokens travel and are multiplied in the layer's dtype."""

    name: ClassVar[str] = "unquantized"
    stored: ClassVar[frozenset[str]] = frozenset({"bf16", "fp16", "fp32"})

    @classmethod
    def compute_scheme(cls, problem: Problem, experts: ExpertsTraits) -> QuantScheme:
        """The layer's dtype."""
        return problem.dtype

    @classmethod
    def wire_scheme(cls, problem: Problem, transport: TransportTraits, compute: QuantScheme) -> QuantScheme:
        """The layer's dtype."""
        return problem.dtype


def select_unquantized_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair. Raises UnsupportedError with every reason if none can serve."""
    return decide(problem, UnquantizedOracle)


def make_unquantized_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
