"""Experts stored in MXFP8, 32 values under a power of two, with activations in the same format."""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, RoundedOracle
from moe_mk.oracle.decide import decide
from moe_mk.oracle.verdict import Decision
from moe_mk.runner.monolithic import MonolithicKernel


@ORACLES.register("mxfp8")
class Mxfp8Oracle(RoundedOracle):
    """e4m3 weights and activations with an E8M0 scale for 32."""

    name: ClassVar[str] = "mxfp8"
    stored: ClassVar[frozenset[str]] = frozenset({"mxfp8"})


def select_mxfp8_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair and the weight format. Raises UnsupportedError with every reason."""
    return decide(problem, Mxfp8Oracle)


def make_mxfp8_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
