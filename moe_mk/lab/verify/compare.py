"""Compares the output of a layer with the reference, within the error expected from its number formats.

Ties: two choices of experts are both correct if every score can be changed by at most a rounding error such that these
groups and experts are the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.config.moe import MoEConfig
from moe_mk.config.router import RouterConfig
from moe_mk.lab.verify.dense import Array, Progress, dense_layer, group_worth, num_counted
from moe_mk.oracle.expected_error import ALL_TOKENS, ONE_TOKEN, error_of
from moe_mk.oracle.verdict import Decision
from moe_mk.weights.layer_weights import LayerWeights


@dataclass(frozen=True)
class Verification:
    """The difference of two results, and whether it is within the limit."""

    num_tokens: int
    routing_equal: int
    """Tokens with the same set of experts."""
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
        """False for NaN, and for any token routed differently without a tie."""
        if not self.num_tokens:
            return True
        routed = self.routing_equal + self.routing_ties == self.num_tokens
        return routed and self.error <= self.limit and self.worst_token_error <= self.worst_token_limit

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON."""
        return asdict(self) | {"passed": self.passed}


class Answer(NamedTuple):
    """The inputs and outputs of a layer."""

    x_TH: Tensor
    y_TH: Tensor
    ids_TK: Tensor
    """The chosen logical experts."""
    token_ids_T: Tensor | None = None
    """Token ids, for layers that choose experts by token id."""


def verify(
    answer: Answer,
    decision: Decision,
    weights: LayerWeights,
    on_progress: Progress | None = None,
    *,
    config: MoEConfig | None = None,
) -> Verification:
    """Compare a layer's output and its choice of experts with the independent reference.

    weights: of all experts, unsliced. config: of the reference, if it is not the layer's. Tokens whose choice differs
    by a tie are recomputed with the layer's choice; layers that choose by token id have no ties. Raises ShapeError or
    ConfigError for missing or invalid token ids.
    """
    config, ids = config or decision.problem.config, answer.ids_TK.cpu().numpy().astype(np.int64)
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


def tie_tolerance(decision: Decision) -> float:
    """The largest rounding error of a score: of f32 sums of logits, or one spacing of a layer's dtype below 1.

    One spacing of a logit changes its sigmoid by less than half of the sigmoid's spacing, which is rounded once.
    """
    coarse = decision.problem.config.router.router_dtype == "model"
    return torch.finfo(decision.problem.dtype.dtype).eps if coarse else 1e-5


def could_choose(ids_K: NDArray[np.int64], biased_E: Array, router: RouterConfig, tolerance: float) -> bool:
    """Whether these experts of one token are the best ones if every score has an error of up to `tolerance`.

    biased_E: the compared scores. A missing or repeated id and -1 are never accepted.
    """
    chosen, size = set(ids_K.tolist()), len(biased_E) // router.num_expert_group
    if len(chosen) != router.top_k or min(chosen) < 0:
        return False
    return any(
        _are_best(chosen, [e for g in groups for e in range(g * size, (g + 1) * size)], biased_E, tolerance)
        for groups in _kept_groups({expert // size for expert in chosen}, biased_E, router, tolerance)
    )


def _are_best(chosen: set[int], experts: list[int], biased_E: Array, tolerance: float) -> bool:
    left = [float(biased_E[e]) for e in experts if e not in chosen]
    return not left or max(left) - min(float(biased_E[e]) for e in chosen) <= 2.0 * tolerance


def _kept_groups(touched: set[int], biased_E: Array, router: RouterConfig, tolerance: float) -> Iterator[set[int]]:
    """Every set of kept groups that includes those used and is the best within the tolerance."""
    worth = group_worth(biased_E, router)
    margin = 2.0 * tolerance * num_counted(router, len(biased_E))
    others = [g for g in range(len(worth)) if g not in touched]
    for more in combinations(others, max(0, router.topk_group - len(touched))):
        kept = touched | set(more)
        outside = [value for g, value in enumerate(worth) if g not in kept]
        if len(kept) == router.topk_group and (not outside or max(outside) - min(worth[g] for g in kept) <= margin):
            yield kept
