"""Experts stored in INT8 with a scale a channel or a block: W8A8 with a scale a token, or weight-only W8A16."""

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


@ORACLES.register("int8")
class Int8Oracle(Oracle):
    """Symmetric INT8 weights, activations in INT8 per token or in the layer's dtype."""

    name: ClassVar[str] = "int8"
    stored: ClassVar[frozenset[str]] = frozenset({"int8", "int8_block"})

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
        """As stored (W8A8, then weight-only W8A16); else in FP8 of the same size; else in the layer's dtype."""
        return as_stored(problem), in_fp8(problem), in_layer_dtype(problem)


def select_int8_moe_backend(problem: Problem) -> Decision:
    """Phase one: choose the pair, and the form the weights are held in. Raises UnsupportedError with every reason."""
    return decide(problem, Int8Oracle)


def make_int8_moe_kernel(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Phase two: build what was chosen."""
    return assemble(decision, parts)
