"""Expected values under uniform routing: ranks or nodes that a token reaches, experts that any token chooses."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import comb


@cache
def expected_groups(
    num_experts: int, top_k: int, groups: int, *, expert_groups: int = 1, kept: int | None = None
) -> float:
    """Distinct groups that one token is sent to under uniform routing; groups are ranks, or nodes.

    Without a limit g (1 - C(E - E/g, K) / C(E, K)): 5.295 of 8 and 7.267 of 32 for 256 experts and top-8.

    kept: the router takes experts from so many of its `expert_groups` only, those whose best scores are highest: with 4
    of 8 kept, 3.983 of 8 nodes and 6.820 of 32 ranks. Experts are placed in order, so that each expert group is on
    whole ranks or nodes, or they on it; where neither divides the other, the limit is left out.
    """
    most = min(kept or expert_groups, expert_groups)
    aligned = num_experts % expert_groups == 0 and (groups % expert_groups == 0 or expert_groups % groups == 0)
    if most < expert_groups and aligned:
        return groups * (1.0 - _missed(num_experts // expert_groups, expert_groups, most, groups, top_k))
    elsewhere = max(num_experts - max(num_experts // groups, 1), 0)
    return groups * (1.0 - comb(elsewhere, top_k) / comb(num_experts, top_k))


def expected_experts(num_local: float, num_experts: int, top_k: int, tokens: int) -> float:
    """How many of L = `num_local` experts at least one of `tokens` tokens chooses: L (1 - (1 - K/E)^tokens)."""
    return num_local * (1.0 - (1.0 - top_k / num_experts) ** tokens)


def _missed(per_group: int, expert_groups: int, kept: int, groups: int, top_k: int) -> float:
    """The chance that none of K experts is on one given rank or node, of experts that are drawn best first.

    per_group: experts of an expert group. Once `kept` expert groups have shown up, all others are out.
    """
    own_groups = max(expert_groups // groups, 1)
    own = max(per_group // max(groups // expert_groups, 1), 1)
    # (expert groups seen, experts of the own group seen, all of them elsewhere): chance
    states = {(0, 0): 1.0}
    for drawn in range(top_k):
        after: dict[tuple[int, int], float] = defaultdict(float)
        for (seen, in_own), chance in states.items():
            is_full = seen == kept
            pool = (kept if is_full else expert_groups) * per_group - drawn
            foreign = seen - (in_own > 0)
            others = per_group - own - in_own if in_own or not is_full else 0
            known = foreign * per_group - (drawn - in_own)
            new = 0 if is_full else (expert_groups - own_groups - foreign) * per_group
            after[seen + (in_own == 0), in_own + 1] += chance * others / pool
            after[seen, in_own] += chance * known / pool
            after[seen + 1, in_own] += chance * new / pool
        states = after
    return sum(states.values())
