"""Spans of one forward: what ran, when, and what it overlapped."""

from moe_mk.trace.recorder import STAGES, Recorder, Span, Spans

__all__ = ["STAGES", "Recorder", "Span", "Spans"]
