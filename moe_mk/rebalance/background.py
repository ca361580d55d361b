"""Background jobs on a daemon thread. Every job ends in a result, an error, or a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moe_mk.trace.clock import now

X = TypeVar("X")


@dataclass(frozen=True)
class Done(Generic[X]):
    """The result of a job."""

    value: X


@dataclass(frozen=True)
class Failed:
    """The exception of a job, or its timeout."""

    error: BaseException


class BackgroundJob(Generic[X]):
    """Runs one job at a time. The thread is a daemon: a job that hangs keeps no program from ending."""

    def __init__(self, name: str, *, limit_s: float, inline: bool = False) -> None:
        """limit_s: jobs that run longer are abandoned. inline: run jobs inside `start`, for repeatable runs."""
        self.name, self.limit_s, self.inline = name, limit_s, inline
        self._box: list[Done[X] | Failed] | None = None
        self._thread: threading.Thread | None = None
        self._since = 0.0

    @property
    def busy(self) -> bool:
        """Whether a job was started whose outcome `poll` has not returned yet."""
        return self._box is not None

    def start(self, job: Callable[[], X]) -> None:
        """Start a job; the previous one must have ended."""
        assert not self.busy, f"{self.name} has a job already"
        box: list[Done[X] | Failed] = []
        self._box, self._since = box, now()
        if self.inline:
            _run(job, box)
            return
        self._thread = threading.Thread(target=_run, args=(job, box), name=self.name, daemon=True)
        self._thread.start()

    def poll(self) -> Done[X] | Failed | None:
        """The outcome of the job, returned once; None while it runs or if there is none. Never blocks."""
        if self._box is None:
            return None
        if self._box:
            return self._end(self._box[0])
        if self._thread is not None and not self._thread.is_alive() and not self._box:
            return self._end(Failed(RuntimeError(f"{self.name} ended without a result")))
        seconds = now() - self._since
        if seconds > self.limit_s:
            return self._end(Failed(TimeoutError(f"{self.name} took more than {self.limit_s:g} s and was abandoned")))
        return None

    def forget(self) -> None:
        """Abandon the job; a later result is discarded."""
        self._box = self._thread = None

    def _end(self, outcome: Done[X] | Failed) -> Done[X] | Failed:
        self.forget()
        return outcome


def _run(job: Callable[[], X], box: list[Done[X] | Failed]) -> None:
    try:
        box.append(Done(job()))
    except BaseException as problem:
        box.append(Failed(problem))
