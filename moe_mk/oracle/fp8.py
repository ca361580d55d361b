"""Experts stored in FP8: blocks of 128 x 128, whole channels or whole matrices."""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, RoundedOracle
from moe_mk.oracle.decide import decide
from moe_mk.oracle.fallback import WeightFormat, as_stored, in_layer_dtype
from moe_mk.oracle.verdict import Decision
from moe_mk.runner.monolithic import MonolithicKernel


@ORACLES.register("fp8")
class Fp8Oracle(RoundedOracle):
    """FP8 e4m3 weights, activations in FP8 as the checkpoint states or in the layer's dtype."""

    name: ClassVar[str] = "fp8"
    stored: ClassVar[frozenset[str]] = frozenset({"fp8_block", "fp8_channel", "fp8_tensor"})

    @classmethod
    def formats(cls, problem: Problem) -> tuple[WeightFormat, ...]:
        """As stored; else decoded once to the layer's dtype."""
        return as_stored(problem), in_layer_dtype(problem)


def select_fp8_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair. Raises UnsupportedError with every reason if none can serve."""
    return decide(problem, Fp8Oracle)


def make_fp8_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
