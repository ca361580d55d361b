"""Ties: two choices of experts are both correct if their scores are equal within rounding.

A choice is accepted if every score can be changed by at most a rounding error such that these groups and experts are
the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray

from moe_mk.config.moe import RouterConfig
from moe_mk.oracle.verdict import Decision
from moe_mk.verify.dense import Array, group_worth, num_counted


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
