"""Doors to other projects. Each file speaks one host's language; nothing here is imported until a host asks."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from typing import Any


def looked_up(module: str, *names: str) -> Any:
    """An attribute of a module of an engine, of an attribute and so on; None if this version does not have it."""
    try:
        return reduce(getattr, names, import_module(module))
    except (ImportError, AttributeError):
        return None
