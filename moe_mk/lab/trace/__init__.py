"""Traces for other programs and from them: Chrome traces, waits read from one, imported recordings of routings."""
