"""The bubble of a pipeline, counted on its timetable."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.errors import ConfigError
from moe_mk.lab.plan.pipeline import bubble


@given(stages=st.integers(1, 12), micro_batches=st.integers(1, 40))
def test_it_is_what_the_timetable_shows(stages: int, micro_batches: int) -> None:
    # Stage s works on micro-batch m in step s + m.
    steps = {stage + batch for stage in range(stages) for batch in range(micro_batches)}
    assert bubble(stages, micro_batches) == 1 - Fraction(micro_batches, len(steps))


def test_by_hand() -> None:
    assert bubble(1, 5) == 0 and bubble(2, 1) == Fraction(1, 2) and bubble(3, 4) == Fraction(1, 3)
    with pytest.raises(ConfigError, match="0 stages, 3 micro-batches"):
        bubble(0, 3)
