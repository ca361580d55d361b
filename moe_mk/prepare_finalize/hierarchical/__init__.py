"""Dispatch and combine over two levels, within nodes and between them."""

from moe_mk.prepare_finalize.hierarchical.transport import Hierarchical

__all__ = ["Hierarchical"]
