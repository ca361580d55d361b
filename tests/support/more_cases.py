"""The same test over other cases: plugins repeat what the built-in backends are tested for."""

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import pytest


def with_cases(test: Callable[..., None], names: str, cases: Iterable[Any]) -> Callable[..., None]:
    """A copy of a parametrised test with other cases of the same arguments; its other marks stay."""
    marks = getattr(test, "pytestmark", [])
    kept = [mark for mark in marks if not (mark.name == "parametrize" and mark.args[0] == names)]
    assert len(kept) < len(marks), f"{test.__name__} is not parametrised over {names!r}"
    assert isinstance(test, FunctionType)
    copy = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copy.__annotations__, copy.pytestmark = test.__annotations__, kept  # type: ignore[attr-defined]
    return pytest.mark.parametrize(names, list(cases))(copy)
