"""The declaration of one quantisation type; `decide.py` evaluates it.

Tokens are quantised once: before dispatch if the experts consume quantised activations and the transport supports them,
otherwise by the experts, after a dispatch in the layer's dtype.
"""

from __future__ import annotations

from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.config.quant import QuantConfig
from moe_mk.experts.base import ExpertsTraits
from moe_mk.oracle.fallback import in_fp8, in_layer_dtype
from moe_mk.prepare_finalize.base import TransportTraits
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import Timing, when_to_round
from moe_mk.registry import Registry

FINER_THAN_FP8 = {n for n, s in GGUF.items() if s.blocks.bits > 4} | {n for n, s in GROUPED.items() if s.bits > 4}
"""Types that FP8 would round visibly."""


class Oracle:
    """Choices that depend on the quantisation type of the stored weights.

    The defaults are for types whose checkpoints define quantised activations, and for weight-only types.
    """

    name: ClassVar[str]
    stored: ClassVar[frozenset[str]]
    """The values of model.quant.weights that this oracle serves."""

    @classmethod
    def compute_scheme(cls, problem: Problem, experts: ExpertsTraits) -> QuantScheme:
        """The scheme to which the experts quantise activations, as set by kernel.activations.

        With auto, the first possible one in the experts' traits.
        """
        activations, wish = problem.activations, problem.config.kernel.activations
        if activations is None or wish == "plain":
            return problem.dtype
        computes = experts.computes_with(problem.config.model.quant.weights)
        possible = [name for name in computes if name in ("plain", activations.family)]
        rounds = problem.config.kernel.rounds or (bool(possible) and possible[0] != "plain")
        return activations if rounds else problem.dtype

    @classmethod
    def wire_scheme(cls, problem: Problem, transport: TransportTraits, compute: QuantScheme) -> QuantScheme:
        """The scheme of tokens in dispatch, given the scheme that the experts compute with.

        Quantised activations if they can be quantised before dispatch, and the experts or kernel.wire ask for it.
        """
        activations, wish = problem.activations, problem.config.kernel.wire
        if activations is None or wish == "plain":
            return problem.dtype
        asked = wish in ("fp8", "checkpoint") or compute == activations
        timing = when_to_round(activations, transport.wire, gathers=transport.gathers, experts_read=asked)
        return activations if timing in (Timing.BEFORE, Timing.EITHER) else problem.dtype

    @classmethod
    def formats(cls, problem: Problem) -> tuple[QuantConfig, ...]:
        """Formats in which weights may be held, best first.

        The stored one. Of quantised weights then FP8, unless it is stored or would round visibly; the layer's dtype.
        """
        quant = problem.config.model.quant
        if quant.kind == "plain":
            return (quant,)
        fine = quant.weights.startswith("fp8") or {quant.weights, quant.down} & FINER_THAN_FP8
        return quant, *(() if fine else (in_fp8(problem),)), in_layer_dtype(problem)


ORACLES: Registry[type[Oracle]] = Registry("oracle", Oracle, group="moe_mk.oracles")
