"""Work beside serving, on a thread of its own, whose end is always told: a result, an error, or that it is too slow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moe_mk.trace.clock import now

X = TypeVar("X")


@dataclass(frozen=True)
class Done(Generic[X]):
    """What a job returned."""

    value: X


@dataclass(frozen=True)
class Failed:
    """What a job raised, or why it was given up."""

    error: BaseException


class BackgroundJob(Generic[X]):
    """Runs one job at a time. The thread is a daemon: a job that hangs keeps no program from ending."""

    def __init__(self, name: str, *, limit_s: float, inline: bool = False) -> None:
        """limit_s: a job that runs longer is given up. inline: run jobs where they are started, for repeatable runs."""
        self.name, self.limit_s, self.inline = name, limit_s, inline
        self._box: list[Done[X] | Failed] | None = None
        self._thread: threading.Thread | None = None
        self._since = 0.0

    @property
    def busy(self) -> bool:
        """Whether a job was started whose end has not been told yet."""
        return self._box is not None

    def start(self, job: Callable[[], X]) -> None:
        """Start a job; there must be none."""
        assert not self.busy, f"{self.name} has a job already"
        box: list[Done[X] | Failed] = []
        self._box, self._since = box, now()
        if self.inline:
            _run(job, box)
            return
        self._thread = threading.Thread(target=_run, args=(job, box), name=self.name, daemon=True)
        self._thread.start()

    def poll(self) -> Done[X] | Failed | None:
        """How the job ended, told once; None while there is nothing to tell. Never waits."""
        if self._box is None:
            return None
        if self._box:
            return self._end(self._box[0])
        if self._thread is not None and not self._thread.is_alive() and not self._box:
            return self._end(Failed(RuntimeError(f"{self.name} ended without a word")))
        seconds = now() - self._since
        if seconds > self.limit_s:
            return self._end(Failed(TimeoutError(f"{self.name} took more than {self.limit_s:g} s and was given up")))
        return None

    def forget(self) -> None:
        """Give up the job; what it returns later goes nowhere."""
        self._box = self._thread = None

    def _end(self, outcome: Done[X] | Failed) -> Done[X] | Failed:
        self.forget()
        return outcome


def _run(job: Callable[[], X], box: list[Done[X] | Failed]) -> None:
    try:
        box.append(Done(job()))
    except BaseException as problem:
        box.append(Failed(problem))
