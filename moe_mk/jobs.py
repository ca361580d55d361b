"""Calls on other threads, made by a caller that a signal handler may interrupt between any two instructions.

Python runs signal handlers in the main thread, and what they raise leaves whatever was running there. `Condition`,
`Event`, `Future` and `ThreadPoolExecutor` take their locks in Python code: interrupted in it, a lock stays locked, and
every thread that needs it waits for ever. A caller and its threads therefore share only what one call into C changes:
a deque, an entry of a dictionary, an attribute; and every wait has a limit. A `with` statement over a `threading.Lock`
is such a call too, `acquire()` before a `try` is not. `SimpleQueue.get(timeout=...)` is none: where a handler runs past
its limit, it waits for ever (CPython 3.11).
"""

from __future__ import annotations

import os
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, Generic, TypeVar, cast

from moe_mk.errors import UnsupportedError, unless_signalled
from moe_mk.trace.clock import now

X = TypeVar("X")
LINGER_S = 1.0
"""How long a thread without work stays for the next job."""
LOOK_S = 0.1
"""How often a wait looks for itself: an interrupt may have taken the ring that it was for."""
BEGIN_S = 1.0
"""How long a started thread may take to begin: one without memory for its first frame ends without a sign."""


class Bell:
    """Wakes one thread that waits for it, now or next. Rings without a wait between them are one."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the thread; never waits."""
        try:
            self._lock.release()
        except unless_signalled(RuntimeError):
            return  # it has rung already

    def wait(self, limit_s: float) -> bool:
        """Whether it rings within so many seconds, or has rung."""
        return self._lock.acquire(timeout=limit_s)


class Job(Generic[X]):
    """A call that a thread makes, at most once, and its outcome."""

    __slots__ = ("__weakref__", "_bell", "_call", "_owner", "_value", "error", "has_ended", "threads")

    def __init__(self, call: Callable[[], X], bell: Bell | None = None) -> None:
        """bell: rung when the call has ended; None: one of its own."""
        self._call: Callable[[], X] | None = call
        self._bell = Bell() if bell is None else bell
        self._owner, self._value = dict[str, str](), list[X]()
        self.has_ended = False
        self.error: BaseException | None = None
        self.threads: Threads | None = None

    @classmethod
    def failed(cls, error: BaseException) -> Job[X]:
        """One that has ended in an error."""
        one = cls(lambda: cast(X, None))
        one.error, one.has_ended = error, True
        return one

    def run(self) -> None:
        """Make the call, unless it was cancelled. Its exception is kept, but that of a signal handler is raised."""
        call = self._call
        if call is None or self._owner.setdefault("is", "thread") != "thread":
            return
        try:
            self._value.append(call())
        except unless_signalled(BaseException) as error:
            self.error = error
        self._call = call = None
        self.has_ended = True
        self._bell.ring()
        self = cast(Any, None)  # the traceback of the error refers to this frame

    def cancel(self) -> None:
        """Never begin the call; without effect once it has begun."""
        if self._owner.setdefault("is", "nothing") == "nothing":
            self._call = None

    @property
    def is_over(self) -> bool:
        """Whether no thread runs it, now or later."""
        return self.has_ended or self._owner.get("is") == "nothing"

    def wait(self, limit_s: float) -> bool:
        """Whether it ends within so many seconds; made here if its threads have ended for lack of memory."""
        return listen(self._bell, self._ends, limit_s)

    def _ends(self) -> bool:
        if self.threads is not None and not (self.has_ended or self._owner):
            self.threads.help()
        return self.has_ended

    def result(self) -> X:
        """The result of a call that has ended; raises its exception."""
        assert self.has_ended, "the call has not ended"
        if self.error is not None:
            raise self.error
        return self._value[0]


def listen(bell: Bell, is_so: Callable[[], bool], limit_s: float) -> bool:
    """Whether something becomes true within so many seconds; asked again at every ring of a bell."""
    until = now() + limit_s
    while not is_so():
        if (left := until - now()) <= 0:
            return False
        bell.wait(min(left, LOOK_S))
    return True


class Threads:
    """Up to `count` daemon threads, which run jobs in the order in which these are given, and end when they are idle.

    A thread refers to the job that it runs and to nothing else. A forked child starts threads of its own.
    """

    def __init__(self, count: int, *, linger_s: float = LINGER_S) -> None:
        self.count, self.linger_s = count, linger_s
        self._jobs, self._bell, self._process = deque[Job[Any]](), Bell(), os.getpid()
        self._threads = list[_Thread]()

    def put(self, job: Job[Any]) -> None:
        """Run a job as soon as a thread is free. Raises UnsupportedError where the system allows no thread."""
        if self._process != os.getpid():
            self._jobs, self._bell, self._process, self._threads = deque(), Bell(), os.getpid(), []
        job.threads = self
        self._jobs.append(job)
        self._bell.ring()
        self._threads = [each for each in self._threads if each.is_there]
        if len(self._threads) >= self.count:
            return
        thread = _Thread(self._jobs, self._bell, self.linger_s)
        try:
            start_new_thread(thread.run, ())
        except unless_signalled(RuntimeError, MemoryError) as problem:
            if not self._threads:
                job.cancel()
                what = "a thread cannot be started"
                raise UnsupportedError(what, [f"{problem}; raise the limit of processes or of memory"]) from problem
        else:
            self._threads.append(thread)  # not earlier: one that an interrupt kept from starting must not count

    def help(self) -> None:
        """Run the next job here if there is no thread for it: all have ended, or have not begun within BEGIN_S."""
        if self._process != os.getpid() or any(each.is_there for each in self._threads):
            return
        try:
            job = self._jobs.popleft()
        except IndexError:
            return
        _ended(job)

    def start(self, call: Callable[[], X]) -> Job[X]:
        """Run a call as soon as a thread is free."""
        self.put(job := Job(call))
        return job


def _ended(job: Job[Any]) -> None:
    """Run a job; it has ended afterwards, also where there was no memory to keep its error as usual."""
    try:
        job.run()
    except BaseException as error:
        job.error, job.has_ended = error, True
        raise


class _Thread:
    def __init__(self, jobs: deque[Job[Any]], bell: Bell, linger_s: float) -> None:
        self._jobs, self._bell, self._linger_s = jobs, bell, linger_s
        self.has_begun, self.has_ended, self.since = False, False, now()

    @property
    def is_there(self) -> bool:
        return not self.has_ended and (self.has_begun or now() - self.since < BEGIN_S)

    def run(self) -> None:
        self.has_begun = True
        try:
            while self._jobs or self._bell.wait(self._linger_s) or self._is_needed():
                try:
                    job = self._jobs.popleft()
                except IndexError:  # another thread has it
                    continue
                if self._jobs:
                    self._bell.ring()  # for the next thread: several rings may have been one
                with suppress(BaseException):  # which the job keeps
                    _ended(job)
                del job
        finally:
            self.has_ended = True

    def _is_needed(self) -> bool:
        """Whether there is a job after all. One that is put from here on finds a thread less, and starts it."""
        self.has_ended = True
        self.has_ended = not self._jobs
        return not self.has_ended


def all_results(threads: Threads, calls: Iterable[Callable[[], X]], each: Callable[[X], None] | None = None) -> list[X]:
    """Make calls on threads; returns their results in order, and raises the first exception among them.

    each: called in this thread with every result, in the order of the calls. Calls that have not begun when one fails,
    or when this is interrupted, are never made; those that have begun are waited for, since what they write to may be
    closed next, and its descriptor be that of another file.
    """
    jobs, results = [Job(call) for call in calls], list[X]()
    try:
        for job in jobs:
            threads.put(job)
        for job in jobs:
            job.wait(float("inf"))
            results.append(job.result())
            if each is not None:
                each(results[-1])
    finally:
        _end(jobs)
    return results


def _end(jobs: Sequence[Job[Any]]) -> None:
    """Cancel calls and wait for those that have begun; an interrupt meanwhile is raised afterwards."""
    interrupt: BaseException | None = None
    while not all(job.is_over for job in jobs):
        try:
            for job in jobs:
                job.cancel()
            for job in jobs:
                _ = job.is_over or job.wait(float("inf"))
        except BaseException as another:
            interrupt = another
    if interrupt is not None:
        raise interrupt
