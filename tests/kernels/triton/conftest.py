"""Compiled kernels of the tests go to a folder of the run, never into the tree or the home of whoever runs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernels_are_cached_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield
