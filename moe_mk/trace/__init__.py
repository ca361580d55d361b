"""Spans of one forward: what ran, when, and what it overlapped; counts of activations close to zero.

Names that need torch are imported on first use: a process that only reads the clock does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_mk.trace.recorder import STAGES, Recorder, Span, Spans

if TYPE_CHECKING:
    from moe_mk.trace.profiler import profiled
    from moe_mk.trace.sparsity import NearZero, count_idle_units, count_near_zero

__all__ = [
    "STAGES", "NearZero", "Recorder", "Span", "Spans", "count_idle_units", "count_near_zero", "profiled",
]  # fmt: skip

_MODULE_OF = {
    "profiled": "profiler", "NearZero": "sparsity", "count_idle_units": "sparsity", "count_near_zero": "sparsity",
}  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
