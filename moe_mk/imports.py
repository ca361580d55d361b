"""Imports at first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module


def at_first_use(package: str, homes: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], object]:
    """The `__getattr__` of a package (PEP 562) that imports a module when one of its names is first used.

    homes: module below the package -> its names, separated by spaces; a name that is also a module's would mean that
    module once it is imported. modules: those that are attributes themselves.
    """
    home_of = {name: f"{package}.{module}" for module, names in homes.items() for name in names.split()}

    def get(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
