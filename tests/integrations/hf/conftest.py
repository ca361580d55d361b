"""Every test of this room finds "moe_mk" registered with no settings, and leaves it so."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if find_spec("transformers") is None:
        yield
        return
    from moe_mk.integrations.transformers import register

    monkeypatch.setattr("moe_mk.integrations.hf.linears.PART", 4096)  # weights have several parts, as large ones have
    register()
    yield
    register()
