"""What version this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version that is installed, or the words "not installed" for sources on the path."""
    try:
        return version("moe-mk")
    except PackageNotFoundError:
        return "not installed"
