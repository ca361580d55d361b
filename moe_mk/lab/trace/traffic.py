"""How many nodes tokens must reach under a placement: exact expectations over the choice among copies.

    token 7 of rank 0 (node 0) selects experts 3 and 9;  expert 3 is on node 1 with share .5, on node 2 with .5
    expert 9 on node 1 alone                           nodes reached: 1 for certain, 2 with .5 -> 1.5 remote nodes

E experts, P slots, W ranks that live; X is copies of one expert, or nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from moe_mk.errors import ConfigError
from moe_mk.placement.balance.topology import Doubles, Ints, Topology
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.registry import did_you_mean

Choice = Literal["near", "share"]
"""How a token finds its copy: "near" ones first as far as shares allow, as layers do, or drawn by share alone."""
ROWS = 8192
"""Tokens that are looked at together."""


class Slotted(Protocol):
    """Experts and shares of all slots [X layers, P]: of a plan, or of layers that serve."""

    @property
    def phy2log(self) -> Ints:
        """Expert of every slot; -1 for an empty one."""

    @property
    def share(self) -> NDArray[np.float32]:
        """Part of its expert's tokens that a slot takes."""


@dataclass(frozen=True)
class NodesPerToken:
    """Expected nodes a token reaches, averaged over all tokens and layers."""

    all: float
    """Its own node included, where one of its experts is served there."""
    remote: float
    """Others than its own: each costs one message over the network where rows are sent once to a node."""


def slots_of_map(expert_map: ExpertMap, layers: int) -> tuple[Ints, NDArray[np.float32]]:
    """Experts and shares [X, P] of a map that serves every layer."""
    share_P = np.zeros(expert_map.num_physical, np.float32)
    for expert, replicas in enumerate(expert_map.physical_of_logical):
        share_P[list(replicas)] = expert_map.shares_of(expert)
    slots_P = np.asarray(expert_map.physical_to_global(), np.int64)
    return np.tile(slots_P, (layers, 1)), np.tile(share_P, (layers, 1))


def flows(share_X: Sequence[float] | Doubles, rank_X: Ints, node_W: Ints) -> Doubles:
    """Return the part of its tokens of one expert that every rank sends to each copy, [W, copies]; rows sum to 1.

    Each rank first fills the copies it holds itself, then those of its node, then all that are left, so that every copy
    takes its share when ranks bring equally many tokens. share_X, rank_X: share and rank of every copy.
    """
    ranks, left_X = len(node_W), np.asarray(share_X, np.float64).copy()
    want_W = np.full(ranks, 1.0 / ranks)
    flow_WX = np.zeros((ranks, len(left_X)))
    for circle_W in (np.arange(ranks), node_W):
        for circle in np.unique(circle_W[rank_X]):
            near_X, members_W = circle_W[rank_X] == circle, circle_W == circle
            have, need = left_X[near_X].sum(), want_W[members_W].sum()
            flow = min(have, need)
            if flow <= 0.0:
                continue
            flow_WX[np.ix_(members_W, near_X)] += np.outer(want_W[members_W] / need, left_X[near_X] / have) * flow
            left_X[near_X] *= 1.0 - flow / have
            want_W[members_W] *= 1.0 - flow / need
    if (rest := left_X.sum()) > 0.0:
        flow_WX += np.outer(want_W, left_X / rest)
    total_W1 = flow_WX.sum(1, keepdims=True)
    result: Doubles = np.divide(flow_WX, total_W1, out=np.tile(share_X, (ranks, 1)), where=total_W1 > 0.0)
    return result


def node_chances(
    slots_P: Ints, share_P: NDArray[np.float32], num_experts: int, topology: Topology, choice: Choice
) -> Doubles:
    """Chance that a token of a living rank which wants an expert goes to a node, [W, E + 1, nodes].

    The last entry stands for assignments of -1, which are not sent.
    """
    if choice not in get_args(Choice):
        raise ConfigError(f"choice={choice!r} is unknown{did_you_mean(choice, get_args(Choice))}")
    living = np.flatnonzero(topology.alive_W)
    number_W = np.full(topology.gpus, -1)
    number_W[living] = np.arange(len(living))
    node_W = topology.node_W[living]
    chance = np.zeros((len(living), num_experts + 1, topology.nodes))
    serving = np.flatnonzero((slots_P >= 0) & (share_P > 0) & topology.alive_W[topology.gpu_P])
    by_expert = serving[np.argsort(slots_P[serving], kind="stable")]
    first = np.searchsorted(slots_P[by_expert], np.arange(num_experts + 1))
    for expert in range(num_experts):
        mine = by_expert[first[expert] : first[expert + 1]]
        if len(mine) == 0:  # no live copy
            continue
        share_X, rank_X = share_P[mine].astype(np.float64), number_W[topology.gpu_P[mine]]
        share_X = share_X / share_X.sum()
        alone = len(mine) == 1 or choice == "share"
        part_WX = share_X[None] if alone else flows(share_X, rank_X, node_W)
        for copy, rank in enumerate(rank_X):
            chance[:, expert, node_W[rank]] += part_WX[:, copy]
    return chance


def expected_nodes(ids_TK: Ints, rank_T: Ints, chance_WEX: Doubles, node_W: Ints) -> tuple[float, float]:
    """Sums over tokens of the nodes they reach: all of them, and those that are not their own.

    rank_T: the living rank that brings each token. node_W: nodes of living ranks. Copies of different experts are
    chosen independently, as the hash of the layer does.
    """
    everywhere = remote = 0.0
    for start in range(0, len(ids_TK), ROWS):
        ids, rank = ids_TK[start : start + ROWS], rank_T[start : start + ROWS]
        reached_TX = 1.0 - np.prod(1.0 - chance_WEX[rank[:, None], ids], axis=1)  # id -1 indexes the last entry
        at_home = reached_TX[np.arange(len(rank)), node_W[rank]].sum()
        everywhere += float(reached_TX.sum())
        remote += float(reached_TX.sum() - at_home)
    return everywhere, remote
