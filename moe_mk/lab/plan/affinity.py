"""Placement by affinity: experts selected by the same tokens are placed on one node, so that tokens reach fewer nodes.

Swaps pairs of experts between nodes, best gain first, while the number of co-selected pairs inside nodes grows
(Kernighan and Lin 1970, on the co-selection graph). The result is accepted only if tokens of the trace reach fewer
nodes than under the linear placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_mk.errors import ConfigError
from moe_mk.placement.expert_map import ExpertMap

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AffinityPlacement:
    """A placement, and the nodes per token of the trace it was computed from."""

    expert_map: ExpertMap
    nodes_per_token: float
    linear_nodes_per_token: float
    """With consecutive experts on one node."""
    swaps: int


def place_by_affinity(ids_TK: Ints, num_experts: int, *, ranks: int, nodes: int) -> AffinityPlacement:
    """Place experts by the selections of a trace: equally many per node and rank, never worse than linear.

    ids_TK: logical experts of each token; -1: no expert. Runs on the host, O(E^2) a swap.
    Raises ConfigError for numbers that do not divide, or ids outside [-1, E).
    """
    if min(num_experts, ranks, nodes) < 1 or num_experts % ranks or ranks % nodes:
        raise ConfigError(
            f"{num_experts} experts, {ranks} ranks and {nodes} nodes must divide: experts by ranks, ranks by nodes"
        )
    if ids_TK.ndim != 2 or (ids_TK.size and not -1 <= ids_TK.min() <= ids_TK.max() < num_experts):
        raise ConfigError(f"ids must be (tokens, choices) in [-1, {num_experts}), got shape {ids_TK.shape}")
    linear_E = np.arange(num_experts, dtype=np.int64) // (num_experts // nodes)
    node_E, swaps = _swapped(linear_E, together(ids_TK, num_experts))
    linear, found = (nodes_per_token(ids_TK, each) for each in (linear_E, node_E))
    if found >= linear:
        node_E, found, swaps = linear_E, linear, 0
    order = np.argsort(node_E, kind="stable")
    return AffinityPlacement(ExpertMap.from_physical(order.tolist(), ranks, num_experts), found, linear, swaps)


def nodes_per_token(ids_TK: Ints, node_E: Ints) -> float:
    """Mean distinct nodes of a token; 0 without tokens."""
    if not len(ids_TK):
        return 0.0
    visits_TX = np.zeros((len(ids_TK), int(node_E.max()) + 1), bool)
    row, column = np.nonzero(ids_TK >= 0)
    visits_TX[row, node_E[ids_TK[row, column]]] = True
    return float(visits_TX.sum(1).mean())


def together(ids_TK: Ints, num_experts: int) -> Ints:
    """(E, E): how many tokens chose both experts; 0 with itself."""
    chosen_TE = np.zeros((len(ids_TK), num_experts), np.float32)
    row, column = np.nonzero(ids_TK >= 0)
    chosen_TE[row, ids_TK[row, column]] = 1.0
    pairs_EE = np.rint(chosen_TE.T @ chosen_TE).astype(np.int64)
    np.fill_diagonal(pairs_EE, 0)
    result: Ints = pairs_EE
    return result


def _swapped(node_E: Ints, pairs_EE: Ints) -> tuple[Ints, int]:
    """Swap while any swap gains; each raises the co-choices inside nodes, so it ends."""
    node_E, swaps, experts = node_E.copy(), 0, np.arange(len(node_E))
    while True:
        inside_EX = np.stack([pairs_EE[:, node_E == node].sum(1) for node in range(int(node_E.max()) + 1)], axis=1)
        company_EE = inside_EX[:, node_E]  # of expert a in the node of expert b
        own_E = inside_EX[experts, node_E]
        gain_EE = company_EE + company_EE.T - own_E[:, None] - own_E[None] - 2 * pairs_EE
        gain_EE[node_E[:, None] == node_E[None]] = 0
        a, b = np.unravel_index(int(gain_EE.argmax()), gain_EE.shape)
        if gain_EE[a, b] <= 0:
            return node_E, swaps
        node_E[a], node_E[b] = node_E[b], node_E[a]
        swaps += 1
