"""The `moe-mk` command."""

from moe_mk.cli.app import app

__all__ = ["app"]
