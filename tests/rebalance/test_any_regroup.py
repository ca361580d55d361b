"""A group that loses or gains a rank while one of its ranks meets any exception at any step: made by all in the end."""

import pytest

from moe_mk.lab.testing.on_ranks import RankWorld
from tests.rebalance import any_regroup_ranks as ranks
from tests.support.worlds import world_of

world = world_of(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "verb"),
    [("all_to_all", "lose"), ("all_to_all", "leave"), ("all_to_all", "join"), ("one_sided", "join")],
)
def test_a_change_of_ranks_that_is_cut_anywhere_ends_at_once_and_can_be_made_again(
    world: RankWorld, transport: str, verb: str
) -> None:
    assert world.call(ranks.thrown, transport, verb, 5, 1, timeout_s=300.0) == [[], [], []]


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", ranks.VERBS)
@pytest.mark.parametrize("transport", ["all_to_all", "one_sided"])
@pytest.mark.parametrize("seed", [2, 3])
def test_many_changes_of_ranks(world: RankWorld, transport: str, verb: str, seed: int) -> None:
    assert world.call(ranks.thrown, transport, verb, 40, seed, timeout_s=3000.0) == [[], [], []]
