"""The choice among replicas: deterministic, in proportion to shares, near ones first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk import ExpertMap
from moe_mk.placement.expert_map import POINT, edges_of, mixed, seen_from

CPU = torch.device("cpu")
# expert 0 in physical 0, 2, 4 with shares .5, .25, .25; expert 1 in 1; expert 2 in 3; expert 3 in 5.
SHARED = ExpertMap(((0, 1), (0, 2), (0, 3)), 4, (0.5, 1.0, 0.25, 1.0, 0.25, 1.0))


def test_edges_by_hand() -> None:
    one = 1 << POINT
    assert edges_of(3, [0.5, 0.3, 0.2]) == [3 * one + one // 2, 3 * one + round(0.8 * one), 4 * one]
    assert edges_of(0, [0.5, 0.0, 0.5, 0.0]) == [one // 2, one // 2, one, one]  # what takes nothing is never first


def test_tokens_fall_on_replicas_in_proportion_to_shares() -> None:
    counts = torch.bincount(SHARED.tables(CPU).to_physical(torch.zeros(20_000, 1, dtype=torch.int32), 0).flatten())
    # Five standard deviations of 20000 draws at 1/2 are 354.
    assert abs(int(counts[0]) - 10_000) < 354 and abs(int(counts[2]) - 5_000) < 306 and int(counts[1]) == 0


@pytest.mark.row(109)
def test_one_token_on_each_of_many_ranks_spreads_over_the_replicas() -> None:
    spread = ExpertMap(tuple((0, rank + 1) for rank in range(8)), 9)
    chosen = [int(spread.tables(CPU).to_physical(torch.zeros(1, 1, dtype=torch.int32), salt=r)) for r in range(64)]
    assert len(set(chosen)) == 8 and max(chosen.count(p) for p in set(chosen)) <= 16


def test_a_replica_without_share_gets_nothing() -> None:
    placed = ExpertMap(((0, 1), (0, 2)), 3, (0.0, 1.0, 1.0, 1.0))
    assert set(placed.tables(CPU).to_physical(torch.zeros(999, 1, dtype=torch.int32), 0).flatten().tolist()) == {2}


def test_a_lost_expert_goes_nowhere() -> None:
    left = ExpertMap(((0, 1), (0, 3)), 4, (0.625, 1.0, 0.375, 1.0), lost=frozenset({2}))
    assert left.global_to_physical() == [0, 1, -1, 3]
    ids_TK = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    physical_TK = left.tables(CPU).to_physical(ids_TK, 0)
    assert physical_TK[1].tolist() == [-1, 3] and physical_TK[0, 1] == 1 and physical_TK[0, 0] in (0, 2)


def test_near_replicas_come_first_by_hand() -> None:
    # Four ranks on two nodes; copies on ranks 0 and 3 with shares .5 each; every rank brings a quarter of the tokens.
    # Ranks 0 and 3 use their own. Rank 1 shares a node with 0 and takes the quarter that 0 has left; so 2 with 3.
    ways = [seen_from(rank, [0.5, 0.5], [0, 3], 4, per_node=2) for rank in range(4)]
    assert ways == [[0.25, 0.0], [0.25, 0.0], [0.0, 0.25], [0.0, 0.25]]
    # Shares .1 and .9: rank 0 can keep .1 of its .25 here, and no more than that may fall on replica 0.
    assert seen_from(0, [0.1, 0.9], [0, 3], 4, per_node=2) == pytest.approx([0.1, 0.15])


@given(
    st.integers(1, 4).flatmap(
        lambda nodes: st.tuples(
            st.just(nodes),
            st.integers(1, 3),
            st.lists(st.tuples(st.integers(0, nodes * 3), st.integers(0, 9)), min_size=1, max_size=8),
        )
    )
)
def test_over_all_ranks_the_shares_hold_whatever_is_near(drawn: tuple[int, int, list[tuple[int, int]]]) -> None:
    nodes, per_node, copies = drawn
    ranks = nodes * per_node
    where, weight = [r % ranks for r, _ in copies], [w for _, w in copies]
    total = sum(weight) or 1
    shares = [w / total for w in weight] if sum(weight) else [1.0] + [0.0] * (len(copies) - 1)
    ways = [seen_from(rank, shares, where, ranks, per_node) for rank in range(ranks)]
    assert [sum(column) for column in zip(*ways, strict=True)] == pytest.approx(shares, abs=1e-9)
    assert [sum(way) for way in ways] == pytest.approx([1 / ranks] * ranks, abs=1e-9)


def test_neighbouring_numbers_hash_far_apart() -> None:
    hashed = mixed(torch.arange(1 << 14, dtype=torch.int64))
    assert hashed.unique().numel() == 1 << 14 and hashed.min() >= 0 and hashed.max() < 1 << 32
    assert torch.bincount(hashed >> 28, minlength=16).float().std() < 5 * 32  # 1024 a bin, sd 31
