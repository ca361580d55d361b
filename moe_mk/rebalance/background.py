"""Background jobs on a daemon thread. Every job ends in a result, an error, or a timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from moe_mk.errors import UnsupportedError
from moe_mk.jobs import Job, Threads
from moe_mk.trace.clock import now

X = TypeVar("X")


class BackgroundJob(Generic[X]):
    """Runs one job at a time. The thread is a daemon: a job that hangs keeps no program from ending."""

    def __init__(self, name: str, *, limit_s: float, inline: bool = False) -> None:
        """limit_s: jobs that run longer are abandoned. inline: run jobs inside `start`, for repeatable runs."""
        self.name, self.limit_s, self.inline = name, limit_s, inline
        self._job: Job[X] | None = None
        self._since = 0.0

    @property
    def busy(self) -> bool:
        """Whether a job was started whose outcome `poll` has not returned yet."""
        return self._job is not None

    def start(self, job: Callable[[], X]) -> None:
        """Start a job; the previous one must have ended."""
        assert not self.busy, f"{self.name} has a job already"
        self._job, self._since = Job(job), now()
        if self.inline:
            self._job.run()
            return
        try:
            Threads(1, linger_s=0.0).put(self._job)  # a job that was abandoned may still have its thread
        except UnsupportedError as problem:  # the system has no thread now
            self._job = Job.failed(problem)

    def poll(self) -> Job[X] | None:
        """The job once it has ended, returned once; None while it runs or if there is none. Never blocks."""
        job = self._job
        if job is None:
            return None
        if not job.has_ended:
            if now() - self._since <= self.limit_s:
                return None
            job.cancel()
            job = Job.failed(TimeoutError(f"{self.name} took more than {self.limit_s:g} s and was abandoned"))
        self.forget()
        return job

    def forget(self) -> None:
        """Abandon the job; a later result is discarded."""
        self._job = None
