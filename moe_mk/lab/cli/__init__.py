"""The verbs of the `moe-mk` command."""

from moe_mk.lab.cli.app import app

__all__ = ["app"]
