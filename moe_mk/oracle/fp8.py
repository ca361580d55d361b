"""Experts stored in FP8 blocks: who rounds activations to FP8, and whether tokens travel in it.

The rule of the wire: experts that read FP8 activations and a transport that can carry them quantise before sending;
else tokens travel in the layer's dtype and the experts round. Never both.
"""

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
from moe_mk.runner.naive import MonolithicKernel


@ORACLES.register("fp8")
class Fp8Oracle(Oracle):
    """FP8 e4m3 weights in blocks, activations per token and group or in the layer's dtype."""

    name: ClassVar[str] = "fp8"
    stored: ClassVar[frozenset[str]] = frozenset({"fp8_block"})

    @classmethod
    def compute_scheme(cls, problem: Problem, experts: ExpertsTraits) -> QuantScheme:
        """What kernel.activations asks for, else what the experts do best."""
        wish = {"checkpoint": "fp8", "plain": "plain", "auto": experts.computes[0]}[problem.config.kernel.activations]
        activations = problem.activations
        return activations if wish == "fp8" and activations is not None else problem.dtype

    @classmethod
    def wire_scheme(cls, problem: Problem, transport: TransportTraits, compute: QuantScheme) -> QuantScheme:
        """FP8 if it may travel and the experts read it, or if kernel.wire insists."""
        activations, wish = problem.activations, problem.config.kernel.wire
        if activations is None or "fp8" not in transport.wire or wish == "plain":
            return problem.dtype
        return activations if wish == "fp8" or compute == activations else problem.dtype


def select_fp8_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair. Raises UnsupportedError with every reason if none can serve."""
    return decide(problem, Fp8Oracle)


def make_fp8_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
