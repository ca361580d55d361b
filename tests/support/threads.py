"""Threads of this process that run jobs, or wait for one."""

import sys
import time
from types import FrameType

from moe_mk.jobs import _Thread


def job_threads() -> int:
    """How many there are."""

    def runs_jobs(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not _Thread.run.__code__:
            frame = frame.f_back
        return frame is not None

    return sum(runs_jobs(frame) for frame in sys._current_frames().values())


def job_threads_left(limit_s: float = 5.0) -> int:
    """How many are left once those without a job have had time to end."""
    until = time.monotonic() + limit_s
    while (left := job_threads()) and time.monotonic() < until:
        time.sleep(0.01)
    return left
