"""Calls go by keyword to whatever build is there."""

from __future__ import annotations

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.prepare_finalize.deepep.common import Call


def old(x: int, *, hook: bool = False) -> tuple[int, bool]:
    return x, hook


def new(scale: float = 1.0, hook: bool = False, x: int = 0, overlap: bool = False) -> tuple[int, bool, bool]:
    return x, hook, overlap


def test_order_does_not_matter_and_options_that_a_build_lacks_are_left_out() -> None:
    assert Call(old, ["x"])({"x": 3}, {"hook": True, "overlap": True}) == (3, True)
    assert Call(new, ["x"])({"x": 3}, {"hook": True, "overlap": True}) == (3, True, True)
    assert Call(lambda **anything: anything, ["x"])({"x": 3}, {"y": 4}) == {"x": 3, "y": 4}


def test_what_an_adapter_cannot_do_without_is_asked_for_when_it_is_built() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)old of the installed build lacks.*no 'mask'.*no 'scale'"):
        Call(old, ["x", "mask", "scale"])
