"""Spans of one forward: what ran, when, and what it overlapped; counts of activations close to zero.

Names that need torch are imported on first use: a process that only reads the clock does not import torch.
"""

from typing import TYPE_CHECKING

from moe_mk.imports import at_first_use
from moe_mk.trace.recorder import STAGES, Recorder, Span, Spans

if TYPE_CHECKING:
    from moe_mk.trace.profiler import profiled
    from moe_mk.trace.sparsity import NearZero, count_idle_units, count_near_zero

__all__ = [
    "STAGES", "NearZero", "Recorder", "Span", "Spans", "count_idle_units", "count_near_zero", "profiled",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = at_first_use(
        __name__, {"profiler": "profiled", "sparsity": "NearZero count_idle_units count_near_zero"}
    )
