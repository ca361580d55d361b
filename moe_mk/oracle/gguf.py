"""Experts in the blocks of GGUF files, weight-only."""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, RoundedOracle
from moe_mk.oracle.decide import decide
from moe_mk.oracle.fallback import WeightFormat, as_stored, in_fp8, in_layer_dtype
from moe_mk.oracle.verdict import Decision
from moe_mk.quant.gguf import GGUF
from moe_mk.runner.monolithic import MonolithicKernel

FINER_THAN_FP8 = frozenset({"q8_0", "q6_k", "q5_k"})
"""Types that FP8 would round visibly."""


@ORACLES.register("gguf")
class GgufOracle(RoundedOracle):
    """Codes, scales and minima of a block are adjacent bytes; down projections may have another type."""

    name: ClassVar[str] = "gguf"
    stored: ClassVar[frozenset[str]] = frozenset(GGUF)

    @classmethod
    def formats(cls, problem: Problem) -> tuple[WeightFormat, ...]:
        """The stored format; then FP8 for four bits, whose rounding is finer than theirs; then the layer's dtype."""
        quant = problem.config.model.quant
        fine = {quant.weights, quant.down} & FINER_THAN_FP8
        return as_stored(problem), *(() if fine else (in_fp8(problem),)), in_layer_dtype(problem)


def select_gguf_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair and the weight format. Raises UnsupportedError with every reason."""
    return decide(problem, GgufOracle)


def make_gguf_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
