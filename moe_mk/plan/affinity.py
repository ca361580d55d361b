"""Placement by affinity: experts that the same tokens choose go to the same node, so that a token visits fewer nodes.

Swaps of two experts between two nodes, best first, while pairs chosen together gain company (Kernighan and Lin 1970 on
the graph of co-choices). The pairwise gain is only a guide: what counts is the nodes that tokens of the trace visit,
and the linear placement stays where it is better.
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
    """A placement and what it does to the tokens it was made from."""

    expert_map: ExpertMap
    nodes_per_token: float
    linear_nodes_per_token: float
    """Of consecutive experts together."""
    swaps: int


def place_by_affinity(ids_TK: Ints, num_experts: int, *, ranks: int, nodes: int) -> AffinityPlacement:
    """Choose nodes of experts from the choices of a trace; equal experts a node and a rank, never worse than linear.

    ids_TK: logical experts of each token; -1 goes nowhere. Host only, O(E^2) a swap.
    Raises ConfigError for numbers that do not divide, or ids outside [-1, E).
    """
    if min(num_experts, ranks, nodes) < 1 or num_experts % ranks or ranks % nodes:
        raise ConfigError(f"{num_experts} experts, {ranks} ranks and {nodes} nodes must divide, each the one before")
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
