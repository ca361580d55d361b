"""What a manager warns of before anything has happened."""

import warnings
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk import ExpertMap
from moe_mk.rebalance import RebalanceWarning
from moe_mk.rebalance.status import warn_of_fatal_ranks

EXPERTS = 4
Rows = list[list[int]]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4), min_size=1, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_ranks_that_cannot_be_lost_hold_an_expert_that_is_nowhere_else(
    drawn: list[tuple[list[list[int]], bool]],
) -> None:
    layers: list[Any] = []
    fatal: dict[str, list[int]] = {}
    for number, (rows, has_source) in enumerate(drawn):
        lost = frozenset(range(EXPERTS)) - {e for row in rows for e in row}
        placed = ExpertMap(tuple(map(tuple, rows)), EXPERTS, lost=lost)
        layers.append(SimpleNamespace(name=f"l{number}", expert_map=placed, source=object() if has_source else None))
        only = [
            rank
            for rank, row in enumerate(rows)
            if any(all(e not in other for at, other in enumerate(rows) if at != rank) for e in row)
        ]
        if only and len(rows) > 1 and not has_source:
            fatal[f"l{number}"] = only
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_fatal_ranks(layers)
    assert [each.category for each in caught] == [RebalanceWarning] * bool(fatal)
    if fatal:
        (name, ranks), text = next(iter(fatal.items())), str(caught[0].message)
        assert f"the loss of ranks {ranks} cannot be repaired" in text and f"of layer {name!r}" in text
        assert (f"and {len(fatal) - 1} more layers" in text) == (len(fatal) > 1)
