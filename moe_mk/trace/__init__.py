"""Spans of one forward: what ran, when, and what it overlapped.

Names that need torch are imported on first use: a process that only reads the clock does not import torch.
"""

from typing import TYPE_CHECKING

from moe_mk.imports import at_first_use
from moe_mk.trace.recorder import STAGES, Recorder, Span, Spans

if TYPE_CHECKING:
    from moe_mk.trace.profiler import profiled

__all__ = ["STAGES", "Recorder", "Span", "Spans", "profiled"]

if not TYPE_CHECKING:
    __getattr__ = at_first_use(__name__, {"profiler": "profiled"})
