"""Who owns what, for sixteen devices, as in the figure of Switch Transformers."""

from __future__ import annotations

import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.plan.layouts import layout


@pytest.mark.row(30)
@pytest.mark.parametrize(
    "strategy,experts,slices,copies,shards",
    [
        ("data", 1, 1, 16, 16),
        ("model", 1, 16, 1, 1),
        ("model+data", 1, 4, 4, 4),
        ("expert+data", 16, 1, 1, 16),
        ("expert+model+data", 4, 4, 1, 4),
    ],
)
def test_owner_sets_of_sixteen_devices(strategy: str, experts: int, slices: int, copies: int, shards: int) -> None:
    table = layout(strategy, 16)
    assert (table.experts, table.slices, table.copies, table.shards) == (experts, slices, copies, shards)
    owners = [table.owners(expert=e, slice_=s) for e in range(experts) for s in range(slices)]
    assert {len(each) for each in owners} == {copies}
    assert frozenset().union(*owners) == frozenset(range(16))
    assert {len(table.readers(shard)) for shard in range(shards)} == {16 // shards}


@pytest.mark.row(30)
def test_rows_of_the_grid_share_a_batch_and_columns_a_slice() -> None:
    table = layout("model+data", 16)
    assert table.owners(slice_=1) == {1, 5, 9, 13}
    assert table.readers(1) == {4, 5, 6, 7}
    assert layout("expert+model+data", 16).owners(expert=2, slice_=3) == {11}
    assert list(table.lines())[5].endswith("  batch 1 of 4")


def test_what_makes_no_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match="12 are none; use 9 or 16"):
        layout("model+data", 12)
    with pytest.raises(ConfigError, match="expert"):
        layout("experts+data", 16)
    assert layout("data", 12).copies == 12
    assert layout("expert+model+data", 1).copies == 1
