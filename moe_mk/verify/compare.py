"""The verdict: whether what a layer computed agrees with the reference, within what its number formats allow.

The limit comes from the decision, not from experience. Each place where numbers are rounded contributes the mean square
of its relative error (`QuantScheme.relative_rms`). What enters gate and up enters their product twice, so it counts
2^2 = 4; what enters the down projection counts once:

    e^2 = 4 x^2 + x^2     activations before both GEMMs, in the compute scheme
        + 4 w^2 + w^2     weights decoded to the layer's dtype, where the experts compute in it
        + 4 d^2 + 4 d^2   in the layer's dtype: gate and up; hidden, output, what travels home, sum
        + 4 a^2 + b^2     f32 sums over H terms, then over I, at worst one after the other: a^2 = f^2 H / 2,
                          b^2 = f^2 I / 2, f of one rounding, I of the widest experts
        + 4 q^2           tokens that travel in a scheme in which the experts do not compute
        + 4 r^2 + r^2     weights requantised at load, where they are held in another scheme than the stored one

All tokens together must stay within 1.5 e, and every single one within 3 e, as relative L2 error.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_mk.oracle.verdict import Decision
from moe_mk.quant.plain import FP32, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.verify.dense import Progress, dense_layer
from moe_mk.verify.ties import could_choose, tie_tolerance
from moe_mk.weights.layer_weights import LayerWeights

ALL_TOKENS = 1.5
ONE_TOKEN = 3.0


@dataclass(frozen=True)
class Verification:
    """How near two results are, and whether that is near enough."""

    num_tokens: int
    routing_equal: int
    """Tokens that went to the same set of experts."""
    routing_ties: int
    """Tokens that differ only between experts whose scores are equal within rounding."""
    error: float
    """Relative L2 error over all tokens."""
    worst_token_error: float
    worst_token: int
    cosine: float
    max_abs: float
    limit: float
    worst_token_limit: float

    @property
    def passed(self) -> bool:
        """NaN fails, and so does any token routed elsewhere without a tie."""
        if not self.num_tokens:
            return True
        routed = self.routing_equal + self.routing_ties == self.num_tokens
        return routed and self.error <= self.limit and self.worst_token_error <= self.worst_token_limit

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON."""
        return asdict(self) | {"passed": self.passed}


def error_of(decision: Decision) -> float:
    """The root mean square relative error e that the number formats of a decision lead one to expect."""
    problem, compute, wire = decision.problem, decision.compute, decision.wire
    model = problem.config.model
    widest = max(model.moe_intermediate_size, model.shared_size)
    experts = experts_error(problem.dtype, compute, problem.weights, model.hidden_size, widest)
    q = wire.relative_rms if wire.block is not None and wire != compute else 0.0
    r = 0.0 if decision.effect is None else decision.effect.rounding
    return math.sqrt(experts**2 + 4 * q**2 + 5 * r**2)


def experts_error(
    dtype: Plain, compute: QuantScheme, weights: QuantScheme, hidden_size: int, intermediate_size: int | None = None
) -> float:
    """The same for w13 -> act -> w2 and its way home, without what the way out may round.

    intermediate_size: None is the hidden size.
    """
    d, x = dtype.relative_rms, compute.relative_rms
    w = d if weights.block is not None and compute == dtype else 0.0
    a, b = (FP32.relative_rms * math.sqrt(n / 2) for n in (hidden_size, intermediate_size or hidden_size))
    return math.sqrt(5 * x**2 + 5 * w**2 + 8 * d**2 + 4 * a**2 + b**2)


class Answer(NamedTuple):
    """What a layer was asked, and what it gave."""

    x_TH: Tensor
    y_TH: Tensor
    ids_TK: Tensor
    """The logical experts it chose."""
    token_ids_T: Tensor | None = None
    """Tokens of the vocabulary, of a layer that chooses experts by them."""


def verify(
    answer: Answer, decision: Decision, weights: LayerWeights, on_progress: Progress | None = None
) -> Verification:
    """Judge a layer's output and its choice of experts against the independent reference.

    weights: of all experts, unsliced. Tokens whose choice differs by a tie are computed again with the layer's choice;
    a table of experts by token id leaves no ties. Raises ShapeError or ConfigError for token ids that it needs and that
    are missing or do not fit.
    """
    config, ids = decision.problem.config, answer.ids_TK.cpu().numpy().astype(np.int64)
    expected = dense_layer(answer.x_TH, config, weights, on_progress=on_progress, token_ids_T=answer.token_ids_T)
    tolerance = tie_tolerance(decision)
    elsewhere = [t for t in range(len(ids)) if set(ids[t]) != set(expected.ids_TK[t])]
    by_scores = elsewhere if weights.table_XK is None else []
    ties = [t for t in by_scores if could_choose(ids[t], expected.biased_TE[t], config.router, tolerance)]
    if ties:
        taken = expected.ids_TK.copy()
        taken[ties] = ids[ties]
        expected = dense_layer(answer.x_TH, config, weights, taken, on_progress)
    return _judge(answer.y_TH, expected.y_TH, decision, routing_equal=len(ids) - len(elsewhere), routing_ties=len(ties))


def _judge(
    y_TH: Tensor, expected_TH: Tensor, decision: Decision, routing_equal: int, routing_ties: int
) -> Verification:
    got, want, e = y_TH.cpu().double(), expected_TH.double(), error_of(decision)
    tiny = torch.finfo(torch.float32).tiny
    distance_T, size_T = (got - want).norm(dim=1), want.norm(dim=1)
    relative_T = torch.nan_to_num(distance_T / size_T.clamp_min(tiny), nan=math.inf)
    worst = int(relative_T.argmax()) if len(relative_T) else -1
    return Verification(
        num_tokens=got.shape[0],
        routing_equal=routing_equal,
        routing_ties=routing_ties,
        error=float(distance_T.norm() / size_T.norm().clamp_min(tiny)),
        worst_token_error=float(relative_T[worst]) if len(relative_T) else 0.0,
        worst_token=worst,
        cosine=float((got * want).sum() / (got.norm() * want.norm()).clamp_min(tiny)),
        max_abs=float((got - want).abs().max()) if got.numel() else 0.0,
        limit=ALL_TOKENS * e,
        worst_token_limit=ONE_TOKEN * e,
    )
