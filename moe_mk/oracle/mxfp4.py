"""Experts stored in MXFP4 (gpt-oss, DeepSeek-V4): W4A8 with MXFP8 activations, or weight-only W4A16."""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.experts.base import ExpertsTraits
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.activations import rounded_or_plain, rounded_wire
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, Oracle
from moe_mk.oracle.decide import decide
from moe_mk.oracle.fallback import Form, as_stored, in_fp8, in_layer_dtype
from moe_mk.oracle.verdict import Decision
from moe_mk.prepare_finalize.base import TransportTraits
from moe_mk.quant.tensor import QuantScheme
from moe_mk.runner.naive import MonolithicKernel


@ORACLES.register("mxfp4")
class Mxfp4Oracle(Oracle):
    """Four-bit weights with an E8M0 scale for 32; activations in MXFP8 or in the layer's dtype."""

    name: ClassVar[str] = "mxfp4"
    stored: ClassVar[frozenset[str]] = frozenset({"mxfp4"})

    @classmethod
    def compute_scheme(cls, problem: Problem, experts: ExpertsTraits) -> QuantScheme:
        """What kernel.activations asks for, else what the experts do best."""
        return rounded_or_plain(problem, experts)

    @classmethod
    def wire_scheme(cls, problem: Problem, transport: TransportTraits, compute: QuantScheme) -> QuantScheme:
        """The checkpoint's activations if they may travel and the experts read them, or if kernel.wire insists."""
        return rounded_wire(problem, transport, compute)

    @classmethod
    def forms(cls, problem: Problem) -> tuple[Form, ...]:
        """As stored (W4A8, then weight-only W4A16); else in FP8 blocks; else in the layer's dtype."""
        return as_stored(problem), in_fp8(problem), in_layer_dtype(problem)


def select_mxfp4_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair, and the form the weights are held in. Raises UnsupportedError with every reason."""
    return decide(problem, Mxfp4Oracle)


def make_mxfp4_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
