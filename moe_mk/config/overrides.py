"""Settings named by their bare key, as keyword arguments are, put where they belong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from moe_mk.errors import ConfigError
from moe_mk.registry import did_you_mean


def place_overrides(data: dict[str, Any], overrides: Mapping[str, Any], groups: Mapping[str, Any]) -> None:
    """Write each override into the group of settings that has its key; an unknown key raises ConfigError."""
    home = {
        key: group
        for group, cls in groups.items()
        if isinstance(cls, type) and issubclass(cls, BaseModel)
        for key in cls.model_fields
    }
    for key, value in overrides.items():
        if key not in home:
            raise ConfigError(f"unknown setting {key!r}{did_you_mean(key, list(home))}")
        data[home[key]][key] = value
