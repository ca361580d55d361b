"""The modules of benchmarks/, imported by name, in other processes too."""

import sys
from collections.abc import Iterator

import pytest

from moe_mk.lab.testing.on_ranks import RankWorld
from tools.results import ROOT


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[str]:
    """Their folder, on the path."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    yield folder
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def world(benchmarks: str) -> Iterator[RankWorld]:
    with RankWorld(2) as two:
        yield two
