"""Bare keys find their group."""

import pytest
from pydantic import BaseModel

from moe_mk.config.moe import place_overrides
from moe_mk.errors import ConfigError


class Left(BaseModel):
    a: int
    b: int


class Right(BaseModel):
    c: int


def test_each_key_is_written_where_it_lives() -> None:
    data = {"left": {"a": 1, "b": 2}, "right": {"c": 3}}
    place_overrides(data, {"b": 20, "c": 30}, {"left": Left, "right": Right, "name": str})
    assert data == {"left": {"a": 1, "b": 20}, "right": {"c": 30}}


def test_an_unknown_key_changes_nothing_it_can_mistake() -> None:
    data = {"left": {"a": 1}, "right": {}}
    place_overrides(data, {"left.a": 7}, {"left": Left, "right": Right, "name": str})
    assert data["left"]["a"] == 7
    with pytest.raises(ConfigError, match=r"unknown setting 'right.a'"):
        place_overrides(data, {"right.a": 7}, {"left": Left, "right": Right, "name": str})
    with pytest.raises(ConfigError, match=r"unknown setting 'left' \(known: a, b, c\)"):
        place_overrides({"left": {}}, {"left": {"a": 5}}, {"left": Left, "right": Right})
