"""Processes that the tests of a module share."""

from collections.abc import Iterator
from typing import Any

import pytest

from moe_mk.lab.testing.on_ranks import RankWorld


def world_of(ranks: int, **settings: Any) -> Any:
    """A fixture of a module: one world of so many processes."""

    @pytest.fixture(scope="module", name="world")
    def world() -> Iterator[RankWorld]:
        with RankWorld(ranks, **settings) as started:
            yield started

    return world
