"""Experts stored in MXFP4 (gpt-oss, DeepSeek-V4): W4A8 with MXFP8 activations, or weight-only W4A16."""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, RoundedOracle
from moe_mk.oracle.decide import decide
from moe_mk.oracle.verdict import Decision
from moe_mk.runner.monolithic import MonolithicKernel


@ORACLES.register("mxfp4")
class Mxfp4Oracle(RoundedOracle):
    """Four-bit weights with an E8M0 scale for 32; activations in MXFP8 or in the layer's dtype."""

    name: ClassVar[str] = "mxfp4"
    stored: ClassVar[frozenset[str]] = frozenset({"mxfp4"})


def select_mxfp4_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair and the weight format. Raises UnsupportedError with every reason."""
    return decide(problem, Mxfp4Oracle)


def make_mxfp4_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
