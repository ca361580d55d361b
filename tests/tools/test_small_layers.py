"""Small calls between processes: what they are compared with, and their ratios."""

import pytest

from moe_mk.lab.testing.on_ranks import RankWorld


@pytest.mark.row(112)
def test_a_ratio_is_the_median_of_those_within_rounds(world: RankWorld) -> None:
    from common import ratio

    # (clock, processor) of three rounds on two ranks: the slower rank counts, and the last round is slow as a whole.
    one = [{"one": [(1.0, 2.0), (1.0, 2.0), (90.0, 9.0)], "other": [(1.0, 1.0), (1.0, 1.0), (60.0, 9.0)]}]
    two = [{"one": [(1.2, 2.0), (1.4, 2.0), (1.0, 1.0)], "other": [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]}]
    assert [ratio(one + two, "one", "other", clock) for clock in (0, 1)] == pytest.approx([1.4, 2.0])
