"""Background jobs on a daemon thread. Every job ends in a result, an error, or a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from moe_mk.errors import unless_signalled
from moe_mk.trace.clock import now

X = TypeVar("X")


class BackgroundJob(Generic[X]):
    """Runs one job at a time. The thread is a daemon: a job that hangs keeps no program from ending."""

    def __init__(self, name: str, *, limit_s: float, inline: bool = False) -> None:
        """limit_s: jobs that run longer are abandoned. inline: run jobs inside `start`, for repeatable runs."""
        self.name, self.limit_s, self.inline = name, limit_s, inline
        self._future: Future[X] | None = None
        self._since = 0.0

    @property
    def busy(self) -> bool:
        """Whether a job was started whose outcome `poll` has not returned yet."""
        return self._future is not None

    def start(self, job: Callable[[], X]) -> None:
        """Start a job; the previous one must have ended."""
        assert not self.busy, f"{self.name} has a job already"
        future: Future[X] = Future()
        self._future, self._since = future, now()
        if self.inline:
            _run(job, future)
            return
        try:
            threading.Thread(target=_run, args=(job, future), name=self.name, daemon=True).start()
        except unless_signalled(RuntimeError, MemoryError) as problem:  # the system has no thread now
            future.set_exception(problem)

    def poll(self) -> Future[X] | None:
        """The outcome of the job, returned once; None while it runs or if there is none. Never blocks."""
        future = self._future
        if future is None:
            return None
        if not future.done():
            if now() - self._since <= self.limit_s:
                return None
            future = Future()
            text = f"{self.name} took more than {self.limit_s:g} s and was abandoned"
            future.set_exception(TimeoutError(text))
        self.forget()
        return future

    def forget(self) -> None:
        """Abandon the job; a later result is discarded."""
        self._future = None


def _run(job: Callable[[], X], future: Future[X]) -> None:
    try:
        future.set_result(job())
    except BaseException as problem:
        future.set_exception(problem)
