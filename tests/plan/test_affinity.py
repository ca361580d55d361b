"""Experts that go together: swaps by hand, and never worse than linear."""

from pathlib import Path

import numpy as np
import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.plan.affinity import nodes_per_token, place_by_affinity, together
from moe_mk.lab.trace.routing import RoutingTrace


@pytest.mark.row(41)
def test_partners_meet_on_one_node() -> None:
    # Experts 0 and 2 are always chosen together, so are 1 and 3. Linear {0 1} {2 3} needs two nodes, {0 2} {1 3} one.
    ids_TK = np.array([[0, 2], [1, 3], [2, 0], [3, -1]])
    assert together(ids_TK, 4)[0].tolist() == [0, 0, 2, 0]
    found = place_by_affinity(ids_TK, 4, ranks=2, nodes=2)
    assert (found.nodes_per_token, found.linear_nodes_per_token, found.swaps) == (1.0, 1.75, 1)
    assert {frozenset(experts) for experts in found.expert_map.experts_of_rank} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }


@pytest.mark.row(41)
@pytest.mark.parametrize("seed", range(5))
def test_it_is_never_worse_than_linear(seed: int) -> None:
    draw = np.random.default_rng(seed)
    home_E = draw.permutation(32) // 8  # hidden topics of eight experts each
    wanted_TE = (home_E[None] == draw.integers(0, 4, 400)[:, None]) * draw.random() * 2 + draw.random((400, 32))
    ids_TK = np.argsort(-wanted_TE, axis=1)[:, :4]
    found = place_by_affinity(ids_TK, 32, ranks=8, nodes=4)
    assert found.nodes_per_token <= found.linear_nodes_per_token
    node_E = np.empty(32, np.int64)
    for rank, experts in enumerate(found.expert_map.experts_of_rank):
        node_E[list(experts)] = rank // 2
    assert nodes_per_token(ids_TK, node_E) == found.nodes_per_token


@pytest.mark.row(41)
def test_on_the_trace_of_a_trained_model_it_gains_and_keeps_gaining_on_tokens_it_has_not_seen() -> None:
    trace = RoutingTrace.read(Path(__file__).parents[2] / "examples" / "data" / "tiny_routing.safetensors")
    for layer in trace.layers:
        ids_TK = trace.filter(layers=[layer]).ids_RK.numpy().astype(np.int64)
        seen, unseen = np.array_split(ids_TK, 2)
        found = place_by_affinity(seen, trace.facts.num_experts, ranks=4, nodes=2)
        assert found.nodes_per_token < found.linear_nodes_per_token
        node_E = np.empty(32, np.int64)
        for rank, experts in enumerate(found.expert_map.experts_of_rank):
            node_E[list(experts)] = rank // 2
        assert nodes_per_token(unseen, node_E) < nodes_per_token(unseen, np.arange(32) // 16)


@pytest.mark.row(41)
def test_pairs_that_meet_at_the_cost_of_nodes_are_left_as_they_were() -> None:
    # Experts 2 and 6 in each other's place join more pairs, but the last token is sent to two nodes like all others.
    rows = ([0, 5, 2, 4], [4, 3, 0, 6], [4, 5, 3, 7], [2, 7, 4, 6], [6, 4, 1, 0], [0, 7, 2, 4], [0, 1, 2, 3])
    ids_TK, swapped_E = np.array(rows), np.array([0, 0, 1, 0, 1, 1, 0, 1])
    pairs_EE, linear_E = together(ids_TK, 8), np.arange(8) // 4
    inside = [int(pairs_EE[node_E[:, None] == node_E[None]].sum()) for node_E in (linear_E, swapped_E)]
    assert inside[1] > inside[0]
    found = place_by_affinity(ids_TK, 8, ranks=2, nodes=2)
    assert found.nodes_per_token == found.linear_nodes_per_token == 13 / 7 and found.swaps == 0


def test_a_trace_that_linear_suits_leaves_linear() -> None:
    ids_TK = np.array([[0, 1], [2, 3]])
    found = place_by_affinity(ids_TK, 4, ranks=2, nodes=2)
    assert found.swaps == 0 and found.expert_map.experts_of_rank == ((0, 1), (2, 3))
    no_tokens = place_by_affinity(np.empty((0, 2), np.int64), 4, ranks=2, nodes=2)
    assert no_tokens.nodes_per_token == 0.0
    assert place_by_affinity(np.full((3, 2), -1), 4, ranks=2, nodes=1).nodes_per_token == 0.0


def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 experts, 4 ranks and 2 nodes must divide"):
        place_by_affinity(np.zeros((1, 1), np.int64), 6, ranks=4, nodes=2)
    with pytest.raises(ConfigError, match=r"\[-1, 4\)"):
        place_by_affinity(np.array([[4]]), 4, ranks=2, nodes=2)
