"""Experts stored in NVFP4: four-bit activations where the experts read them, or weight-only W4A16."""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, RoundedOracle
from moe_mk.oracle.decide import decide
from moe_mk.oracle.verdict import Decision
from moe_mk.runner.monolithic import MonolithicKernel


@ORACLES.register("nvfp4")
class Nvfp4Oracle(RoundedOracle):
    """Four-bit weights with FP8 scales for 16 under one f32 scale; activations alike or in the layer's dtype."""

    name: ClassVar[str] = "nvfp4"
    stored: ClassVar[frozenset[str]] = frozenset({"nvfp4"})


def select_nvfp4_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair and the weight format. Raises UnsupportedError with every reason."""
    return decide(problem, Nvfp4Oracle)


def make_nvfp4_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
