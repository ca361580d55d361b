"""Expected nodes: who sends how much to which copy, and what a token reaches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.lab.trace.traffic import expected_nodes, flows, node_chances, slots_of_map
from moe_mk.placement.eplb import Topology
from moe_mk.placement.expert_map import ExpertMap, seen_from


@given(st.integers(0, 500))
def test_flows_are_those_of_the_layers_tables(seed: int) -> None:
    draw = np.random.default_rng(seed)
    nodes, per_node = int(draw.integers(1, 4)), int(draw.integers(1, 4))
    ranks = nodes * per_node
    copies = int(draw.integers(1, ranks + 1))
    where = np.sort(draw.permutation(ranks)[:copies])
    share = draw.dirichlet(np.ones(copies)) * (draw.random(copies) < 0.8)
    share = share / share.sum() if share.sum() > 0 else np.full(copies, 1.0 / copies)
    flow = flows(share, where, np.arange(ranks) // per_node)
    assert flow.sum(1) == pytest.approx(np.ones(ranks))
    assert flow.mean(0) == pytest.approx(share, abs=1e-9)  # every copy takes its share
    for rank in range(ranks):
        expected = np.array(seen_from(rank, share.tolist(), where.tolist(), ranks, per_node))
        assert flow[rank] == pytest.approx(expected / expected.sum(), abs=1e-9)


def test_chances_sum_to_one_for_experts_that_are_somewhere() -> None:
    slots, share = slots_of_map(ExpertMap(((0, 1), (1, 2)), 4, lost=frozenset({3})), 1)
    chance = node_chances(slots[0], share[0], 4, Topology(2, 2, 2), "near")
    assert chance.sum(2).tolist() == [[1, 1, 1, 0, 0]] * 2  # expert 3 is lost; the last is -1
    assert chance[0, 1].tolist() == [1, 0] and chance[1, 1].tolist() == [0, 1]


def test_only_copies_with_a_share_on_living_ranks_are_reached() -> None:
    # Rank 1 of node 0 is dead. Expert 0: one living copy with a share; expert 1 has none on node 0, expert 2 nowhere.
    slots, share = np.array([0, 1, 0, 2, -1, 1]), np.array([0.25, 0.0, 0.75, 0.0, 1.0, 1.0], np.float32)
    topology = Topology(4, 2, (2, 1, 1, 2), alive=(True, False, True, True))
    chance = node_chances(slots, share, 3, topology, "share")
    assert chance.tolist() == [[[1, 0], [0, 1], [0, 0], [0, 0]]] * 3


@given(st.integers(0, 200))
def test_expected_nodes_equal_what_enumeration_gives(seed: int) -> None:
    """Two experts a token, each on one of two nodes by chance: all four outcomes, weighed."""
    draw = np.random.default_rng(seed)
    chance = np.zeros((2, 4, 2))
    chance[:, :3, 0] = draw.random((2, 3))
    chance[:, :3, 1] = 1 - chance[:, :3, 0]
    ids, rank, node = draw.integers(-1, 3, (20, 2)), draw.integers(0, 2, 20), np.array([0, 1])
    everywhere = remote = 0.0
    for (one, two), home in zip(ids, rank, strict=True):
        if one == two:
            two = -1
        for first in range(2):
            for second in range(2):
                outcome = [(one, first), (two, second)]
                weight = np.prod([chance[home, e, n] if e >= 0 else 0.5 for e, n in outcome])
                reached = {n for e, n in outcome if e >= 0}
                everywhere += weight * len(reached)
                remote += weight * len(reached - {node[home]})
    same = ids[:, 0] == ids[:, 1]
    ids[same, 1] = -1
    assert expected_nodes(ids, rank, chance, node) == pytest.approx((everywhere, remote))


def test_no_tokens_reach_no_nodes() -> None:
    assert expected_nodes(np.zeros((0, 2), np.int64), np.zeros(0, np.int64), np.ones((1, 3, 1)), np.zeros(1, int)) == (
        0,
        0,
    )
