"""Experts stored as integers of 4 or 8 bits in groups (compressed-tensors, GPTQ, AWQ): W4A16 and W8A16.

Checkpoints define no activations; `model.quant.activations = int8` asks for integer products (W4A8, W8A8).
"""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, RoundedOracle
from moe_mk.oracle.decide import decide
from moe_mk.oracle.fallback import WeightFormat, as_stored, in_fp8, in_layer_dtype
from moe_mk.oracle.verdict import Decision
from moe_mk.quant.grouped import GROUPED
from moe_mk.runner.monolithic import MonolithicKernel


@ORACLES.register("int_wna16")
class IntWna16Oracle(RoundedOracle):
    """Unsigned codes with a scale, and optionally a zero point, for a group of columns."""

    name: ClassVar[str] = "int_wna16"
    stored: ClassVar[frozenset[str]] = frozenset(GROUPED)

    @classmethod
    def formats(cls, problem: Problem) -> tuple[WeightFormat, ...]:
        """The stored format; then FP8 for four bits, whose rounding is finer than theirs; then the layer's dtype."""
        four = GROUPED[problem.config.model.quant.weights].bits == 4
        return as_stored(problem), *((in_fp8(problem),) if four else ()), in_layer_dtype(problem)


def select_int_wna16_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair and the weight format. Raises UnsupportedError with every reason."""
    return decide(problem, IntWna16Oracle)


def make_int_wna16_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
