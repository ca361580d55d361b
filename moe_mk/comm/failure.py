"""Failures of calls: how a failure on one rank ends the call on all ranks of the group.

An exception between dispatch and combine on one rank leaves its peers waiting for rows that will never arrive, and its
next call would be matched with their current one. The rank that fails therefore reports it to its peers, whose calls
end in CommError with that rank and the cause. Every later call over the group is refused with the first cause until all
ranks have agreed to continue (`Communicator.recover`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakSet

from moe_mk.errors import CommError, MoEMKError

if TYPE_CHECKING:
    from _thread import RLock
    from threading import Lock

FRAMES = 200
"""By how much the recursion limit is raised while an error is reported, which may be that no frame was left."""
REPORTED = "its call failed: "
ANOTHER_THREAD = (
    "another thread is calling over this group, so peers cannot know whose call comes first; make all calls from one "
    "thread, or give each thread a group of its own"
)
RECOVERED = "the ranks have recovered since this call began, so it cannot end; make the call again"
ABANDONED = "the call was abandoned before it ended: its flight was closed or dropped"


@dataclass(frozen=True)
class Failure:
    """The first failure of a group, as recorded on one rank."""

    text: str
    """The cause, on one line, with the type of the exception; as a peer has reported it, where one did."""
    culprit: int | None
    """The rank that caused it, where one is known."""
    here: bool = False
    """Whether it arose on this rank and no peer is to blame."""

    @property
    def report(self) -> str:
        """The text that peers receive with the culprit; for another rank, what this one observed of it."""
        return f"{REPORTED}{self.text}" if self.here else self.text

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Report of an exception to the peers: its own, or the peer that a CommError names."""
        if isinstance(error, GeneratorExit):
            return cls(ABANDONED, rank, here=True)
        if isinstance(error, CommError) and error.peer is not None:
            return cls(_one_line(error.detail), error.peer)
        return cls(describe(error), rank, here=True)


def describe(error: BaseException) -> str:
    """An exception on one line, its type included, whether or not it has a message: `MemoryError()` has none."""
    text = _one_line(str(error))
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}()"


def _one_line(text: str) -> str:
    return " ".join(text.split())


class GroupResource(ABC):
    """A resource that layers keep open over a group, whose state is not defined after a failed call."""

    @abstractmethod
    def abort(self, failure: Failure) -> None:
        """Wake peers that wait for this rank in it, and refuse further calls. Never raises, never waits."""

    @abstractmethod
    def reopen(self) -> None:
        """Start over, on every rank at once. Raises UnsupportedError where only a new group helps."""


@dataclass(frozen=True)
class Change:
    """Subject of a vote of all ranks, see `CallGroups.decide`."""

    make: Callable[[], object]
    undo: Callable[[], object]


@dataclass(eq=False)
class Changes:
    """Of one rank in one group."""

    made: int = 0
    """How many votes were accepted."""
    undecided: tuple[int, Change] | None = None
    """The number that `made` has if this change is made: its vote has not ended here."""


@dataclass(eq=False)
class GroupStatus:
    """Whether calls over a group may go on; shared by all views of it in this process."""

    failure: Failure | None = None
    is_reported: bool = False
    """Whether peers were sent the failure: an interrupt may have come first."""
    epoch: int = 0
    """Number of recoveries after failures."""
    resources: WeakSet[GroupResource] = field(default_factory=WeakSet)
    changes: Changes = field(default_factory=Changes)

    def check(self, rank: int, phase: str, layer: str) -> None:
        """Raise CommError if an earlier call failed."""
        if (failure := self.failure) is None:
            return
        who = "" if failure.culprit is None else f" on rank {failure.culprit}"
        cause = failure.text.removeprefix(REPORTED)
        text = (
            f"an earlier call over this group failed{who}: {cause}; call recover() of the layer on every rank, or "
            "build the layer over a new group"
        )
        raise CommError(text, rank=rank, phase=phase, layer=layer, peer=failure.culprit)


class Exclusive:
    """A context for one thread at a time. Raises the exception made by `error` if another stays inside for `limit_s`.

    Whatever a signal handler raises within it, or while it begins or ends, the lock is free afterwards.
    """

    __slots__ = ("__exit__", "_error", "_limit_s", "_lock")
    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
        ) -> None: ...

    def __init__(self, lock: RLock | Lock, error: Callable[[], MoEMKError], limit_s: float = 0.0) -> None:
        self._lock, self._error, self._limit_s = lock, error, limit_s
        # In C: a handler may run at the first instruction of a function of Python.
        object.__setattr__(self, "__exit__", lock.__exit__)

    def __enter__(self) -> None:
        taken = list[bool]()
        try:
            # One step: a handler runs before it or after it, or while it waits, without the lock.
            taken.extend(map(self._lock.acquire, (True,), (self._limit_s,)))
            if True in taken:
                return
        except BaseException:
            if True in taken:
                self._lock.release()
            raise
        raise self._error()


class AbortOnError:
    """A context that reports exceptions raised inside to the ranks of a group, and re-raises them."""

    __slots__ = ("_drops", "_epoch", "_fail")

    def __init__(self, fail: Callable[[BaseException, int], None], epoch: int, *, drops: bool) -> None:
        """epoch: of the group, as the call begins. drops: whether a flight that is closed inside is reported."""
        self._fail, self._epoch, self._drops = fail, epoch, drops

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and (self._drops or not isinstance(error, GeneratorExit)):
            self._fail(error, self._epoch)
