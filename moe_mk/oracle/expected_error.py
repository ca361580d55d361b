"""The error that the number formats of a decision cause, and how far a result may be from the reference.

The limit is derived from the decision. Each rounding contributes the mean square of its relative error
(`QuantScheme.relative_rms`). Errors of the inputs of gate and up enter their product twice and count 2^2 = 4; errors of
the input of the down projection count once:

    e^2 = 4 x^2 + x^2     activations before both GEMMs, in the compute scheme
        + 4 w^2 + w^2     weights decoded to the layer's dtype, where the experts compute in it
        + 4 s^2 + 4 s^2   in the dtype of sums: gate and up; hidden, output, combined rows, sum
        + d^2             the result in the layer's dtype, where that is not the dtype of sums
        + 4 a^2 + b^2     f32 sums over H terms, then over I, at worst one after the other: a^2 = f^2 H / 2,
                          b^2 = f^2 I / 2, f of one rounding, I of the widest experts
        + 4 q^2           tokens dispatched in a scheme in which the experts do not compute
        + 4 l^2 + 2 l^2   in the layer's dtype, where tokens are projected to a latent width and rows back from it
        + 4 n^2           in the layer's dtype, where its input is normalised
        + 4 r^2 + r^2     weights requantised at load, where they are held in another scheme than the stored one

All tokens together must stay within 1.5 e, and every single one within 3 e, as relative L2 error.
"""

from __future__ import annotations

import math

from moe_mk.oracle.verdict import Decision
from moe_mk.quant.plain import FP32, Plain
from moe_mk.quant.tensor import QuantScheme

ALL_TOKENS = 1.5
ONE_TOKEN = 3.0
"""The limits as multiples of the expected error: over all tokens, and for each token."""


def error_of(decision: Decision) -> float:
    """The expected root mean square relative error e of the number formats of a decision."""
    problem, compute, wire = decision.problem, decision.compute, decision.wire
    model = problem.config.model
    widest = max(model.moe_intermediate_size, model.shared_size)
    experts = experts_error(problem.dtype, compute, problem.weights, model.hidden_size, widest, problem.sums)
    q = wire.relative_rms if wire.block is not None and wire != compute else 0.0
    r = 0.0 if decision.effect is None else decision.effect.rounding
    projected = 0.0 if problem.token_size == model.hidden_size else problem.dtype.relative_rms
    normalised = 0.0 if model.input_norm is None else problem.dtype.relative_rms
    return math.sqrt(experts**2 + 4 * q**2 + 5 * r**2 + 6 * projected**2 + 4 * normalised**2)


def experts_error(
    dtype: Plain, compute: QuantScheme, weights: QuantScheme, hidden_size: int, intermediate_size: int | None = None,
    sums: Plain | None = None,
) -> float:  # fmt: skip
    """The expected error of w13 -> act -> w2 and combine, without that of dispatch.

    intermediate_size: None is the hidden size. sums: None is dtype.
    """
    d, x, s = dtype.relative_rms, compute.relative_rms, (sums or dtype).relative_rms
    w = d if weights.block is not None and compute == dtype else 0.0
    a, b = (FP32.relative_rms * math.sqrt(n / 2) for n in (hidden_size, intermediate_size or hidden_size))
    return math.sqrt(5 * x**2 + 5 * w**2 + 8 * s**2 + (d**2 if s != d else 0.0) + 4 * a**2 + b**2)
