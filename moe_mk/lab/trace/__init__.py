"""Traces for other programs and from them: Chrome traces, waits read from one, recorded routings, own and imported."""
