"""Print the installed version of moe-mk."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The installed version, or "not installed" for sources on the path."""
    try:
        return version("moe-mk")
    except PackageNotFoundError:
        return "not installed"
