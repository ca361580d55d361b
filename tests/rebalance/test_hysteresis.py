"""Two thresholds and a dwell time: a swinging load costs one rebalance per dwell time at most."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_mk import ConfigError
from moe_mk.rebalance import Hysteresis, Thresholds


def fired(values: list[float], limits: Thresholds) -> list[int]:
    state, steps = Hysteresis(), []
    for step, value in enumerate(values):
        state, fires = state.observe(value, step, limits)
        steps += [step] * fires
    return steps


@pytest.mark.row(133)
def test_by_hand() -> None:
    limits = Thresholds(1.2, 1.1, dwell=3)
    # above high: fires. 1.15 is between: stays hot, fires again when rested. Below low it is calm.
    assert fired([1.15, 1.3, 1.15, 1.15, 1.15, 1.05, 1.15, 1.15, 1.15, 1.21], limits) == [1, 4, 9]
    assert fired([1.2, 1.3, 1.1, 1.1, 1.1, 1.1], limits) == [1, 4], "high is not above, low is not below"
    hot = Hysteresis(hot=True, fired_at=0)
    assert hot.observe(float("nan"), 1, limits) == (hot, False), "what is no number changes nothing"


@pytest.mark.row(133)
@given(st.lists(st.floats(1.0, 3.0), max_size=60), st.integers(1, 20))
def test_any_load_fires_at_most_once_per_dwell_time_and_only_when_hot(values: list[float], dwell: int) -> None:
    steps = fired(values, Thresholds(1.5, 1.2, dwell))
    assert all(later - earlier >= dwell for earlier, later in pairwise(steps))
    assert all(values[step] >= 1.2 for step in steps)
    assert bool(steps) == any(value > 1.5 for value in values)


def test_thresholds_that_cannot_be_say_all() -> None:
    with pytest.raises(ConfigError, match=r"low=1.3, high=1.2; dwell=0 must be at least 1 step"):
        Thresholds(1.2, 1.3, 0)
    with pytest.raises(ConfigError, match=r"low=0.99"):
        Thresholds(1.2, 0.99)
    assert Thresholds(1.0, 1.0, 1).low == Thresholds(1.2, 1.2).high - 0.2 == 1.0
