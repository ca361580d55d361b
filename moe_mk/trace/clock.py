"""The one place where the clock is asked."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds on a steady clock; only differences mean anything."""
    return time.perf_counter()
