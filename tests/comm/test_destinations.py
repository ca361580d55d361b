"""Expected visits of a token: published figures, cases by hand, and drawn routings, with and without kept groups."""

import numpy as np
import pytest

from moe_mk.comm.destinations import expected_groups


@pytest.mark.row(37)
@pytest.mark.parametrize(
    "groups,distinct",
    [(2, 1.993), (4, 3.614), (8, 5.295), (16, 6.523), (32, 7.267), (64, 7.676), (128, 7.890), (256, 8.0)],
)
def test_without_a_limit_it_is_the_published_figure(groups: int, distinct: float) -> None:
    assert expected_groups(256, 8, groups) == pytest.approx(distinct, abs=6e-4)
    assert expected_groups(256, 8, groups, expert_groups=8, kept=8) == expected_groups(256, 8, groups)


def test_cases_by_hand() -> None:
    # 4 experts in 2 groups, one kept, 2 chosen: both lie in one group, whichever it is.
    assert expected_groups(4, 2, 2, expert_groups=2, kept=1) == pytest.approx(1.0)
    assert expected_groups(4, 2, 4, expert_groups=2, kept=1) == pytest.approx(2.0), "each on a rank of its own"
    assert expected_groups(4, 2, 1, expert_groups=2, kept=1) == pytest.approx(1.0)
    # 6 experts in 3 groups, 2 kept, 3 chosen. The second is of the first one's group with chance 1/5; then the third
    # opens a second group. Else two groups are seen already. Two groups either way; 3 of 6 ranks; and of 3 nodes 2.
    assert expected_groups(6, 3, 3, expert_groups=3, kept=2) == pytest.approx(2.0)
    assert expected_groups(6, 3, 6, expert_groups=3, kept=2) == pytest.approx(3.0)
    # 8 experts in 4 groups of 2, 2 nodes of 2 groups, 2 kept, 2 chosen: another node with chance 4/7.
    assert expected_groups(8, 2, 2, expert_groups=4, kept=2) == pytest.approx(1 + 4 / 7)


def drawn(num_experts: int, top_k: int, groups: int, expert_groups: int, kept: int) -> float:
    """The mean over random scores: keep the groups with the best ones, then take the best experts of those."""
    scores = np.random.default_rng(0).random((8_000, expert_groups, num_experts // expert_groups))
    best = np.argsort(-scores.max(2), axis=1)[:, :kept]
    masked = np.full_like(scores, -1.0)
    np.put_along_axis(masked, best[:, :, None], np.take_along_axis(scores, best[:, :, None], 1), 1)
    chosen = np.argsort(-masked.reshape(len(scores), -1), axis=1)[:, :top_k] // (num_experts // groups)
    return float(np.mean([len(set(row)) for row in chosen]))


@pytest.mark.row(40)
@pytest.mark.parametrize(
    "case",
    [
        (256, 8, 8, 8, 4),  # DeepSeek-V3, a node a group
        (256, 8, 4, 8, 4),  # two groups a node
        (256, 8, 2, 8, 4),
        (256, 8, 32, 8, 4),  # four ranks a group
        (64, 6, 16, 8, 3),
        (16, 4, 16, 4, 1),  # an expert a rank, one group kept
    ],
)
def test_with_kept_groups_it_is_what_drawn_scores_give(case: tuple[int, int, int, int, int]) -> None:
    num_experts, top_k, groups, expert_groups, kept = case
    found = expected_groups(num_experts, top_k, groups, expert_groups=expert_groups, kept=kept)
    assert found == pytest.approx(drawn(*case), rel=0.01)
    assert found <= expected_groups(num_experts, top_k, groups) and found <= top_k
    if groups <= expert_groups:
        assert found <= kept, "no token visits more nodes than it keeps groups"


def test_groups_that_lie_across_nodes_set_no_limit() -> None:
    assert expected_groups(24, 4, 3, expert_groups=8, kept=1) == expected_groups(24, 4, 3)
    assert expected_groups(250, 8, 5, expert_groups=8, kept=1) == expected_groups(250, 8, 5)
