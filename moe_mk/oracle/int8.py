"""Experts stored in INT8 with a scale a channel or a block: W8A8 with a scale a token, or weight-only W8A16."""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, RoundedOracle
from moe_mk.oracle.decide import decide
from moe_mk.oracle.verdict import Decision
from moe_mk.runner.monolithic import MonolithicKernel


@ORACLES.register("int8")
class Int8Oracle(RoundedOracle):
    """Symmetric INT8 weights, activations in INT8 per token or in the layer's dtype."""

    name: ClassVar[str] = "int8"
    stored: ClassVar[frozenset[str]] = frozenset({"int8", "int8_block"})


def select_int8_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair and the weight format. Raises UnsupportedError with every reason."""
    return decide(problem, Int8Oracle)


def make_int8_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
