"""Which cases of a parametrised test run in `make test`, and which only in `make test-rest` and in CI."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quick_where(quick: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters; those for which `quick` is false are marked `thorough`. A case that is a tuple is
    several arguments, of `quick` too."""
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[] if quick(*values) else [pytest.mark.thorough]))
    return marked


def thorough(*cases: Any) -> list[Any]:
    return quick_where(lambda *_: False, cases)
