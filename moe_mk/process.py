"""Processes: whether they have ended, and what forked children release, so that peers detect the end of this rank.

A connection ends when its last descriptor is closed. A helper that a rank forks (`os.fork`, multiprocessing with
"fork") inherits them all, so that the peers of a rank that is killed would see its connections open as long as the
helper lives. Spawned processes inherit none: every descriptor is closed at exec.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from moe_mk.errors import unless_signalled

T = TypeVar("T")

STAT_BYTES = 4096
"""More than /proc/<number>/stat ever has."""


@dataclass(frozen=True)
class Process:
    """A process so that it cannot be taken for a later one of the same number."""

    number: int
    started: str
    """Clock ticks after boot; "" where the system does not state it."""
    namespace: int
    """Inode of its pid namespace, 0 where there is none; numbers mean something only within one."""

    @classmethod
    def this(cls) -> Process:
        """The process that calls; read once, so that later calls need no descriptor."""
        number = os.getpid()
        if number not in _this:
            _this[number] = cls.of(number)
        return _this[number]

    @classmethod
    def of(cls, number: int) -> Process:
        """A running process of this namespace. Raises FileNotFoundError or ProcessLookupError if there is none."""
        namespace = Path("/proc/self/ns/pid")
        if not Path("/proc/self/stat").exists():
            _expect_exists(number)
            return cls(number, "", 0)
        descriptor = _opened(number)
        try:
            return cls(number, _read(descriptor)[1], namespace.stat().st_ino if namespace.exists() else 0)
        finally:
            os.close(descriptor)


_this: dict[int, Process] = {}
"""By number: a forked child is another process."""


class WatchedProcess:
    """A process that is looked at again and again. All views of it in this process share one descriptor.

    The descriptor is opened at the first look, best at set-up, so that later ones need none: a process that has no
    descriptor or memory left for a moment cannot see, which is not to see that the other one has ended.
    """

    _shared: ClassVar[WeakValueDictionary[Process, WatchedProcess]] = WeakValueDictionary()
    _descriptor = -1

    def __init__(self, process: Process, seen_from: Process) -> None:
        self.process, self._is_gone = process, False
        self._is_visible = process.namespace == seen_from.namespace
        in_child(self, WatchedProcess.__del__)
        self.is_gone()

    @classmethod
    def of(cls, process: Process, seen_from: Process | None = None) -> WatchedProcess:
        """seen_from: the process that looks; None: this one."""
        found = cls._shared.get(process)
        if found is None:
            found = cls._shared[process] = cls(process, seen_from or Process.this())
        return found

    def is_gone(self) -> bool:
        """Whether it has ended, reaped or not; False where that cannot be seen, for a moment or at all."""
        if not self._is_gone and self._is_visible:
            try:
                self._is_gone = self._has_ended()
            except unless_signalled(FileNotFoundError, ProcessLookupError):
                self._is_gone = True
            except unless_signalled(OSError, MemoryError):  # no descriptor or memory is left: at the next look
                return False
        return self._is_gone

    def _has_ended(self) -> bool:
        if not self.process.started:
            _expect_exists(self.process.number)
            return False
        if self._descriptor < 0:
            self._descriptor = _opened(self.process.number)
        state, started = _read(self._descriptor)
        return state in "ZX" or started != self.process.started

    def __del__(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _opened(number: int) -> int:
    """The file with the state of a process, which stays that of this one. Raises OSError."""
    try:
        return os.open(f"/proc/{number}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except unless_signalled(FileNotFoundError):
        _expect_exists(number)
        raise PermissionError(f"process {number} is hidden from this one") from None


def _read(descriptor: int) -> tuple[str, str]:
    """State letter and start time. Raises ProcessLookupError once it was reaped."""
    text = os.pread(descriptor, STAT_BYTES, 0).decode(errors="replace")
    fields = text.rpartition(")")[2].split()  # the name before them may hold spaces and brackets
    return fields[0], fields[19]


def _expect_exists(number: int) -> None:
    """Raise ProcessLookupError where there is no such process."""
    try:
        os.kill(number, 0)
    except unless_signalled(PermissionError):
        pass  # it exists, and belongs to another user


# What is released in children.

FORKED = (
    "this process was forked after the windows were opened, and they belong to its parent; start helpers with "
    'multiprocessing.get_context("spawn"), or fork before the layer is built, or build a layer of its own in the child'
)

_ACTIONS: MutableMapping[object, Callable[[Any], object]] = WeakKeyDictionary()


def in_child(owner: T, action: Callable[[T], object]) -> T:
    """Run action(owner) in every child that this process forks while `owner` lives; returns the owner.

    The child has none of the other threads, and locks they held stay locked: an action takes none. It must not refer
    to the owner otherwise than by its argument. One action for each owner: a later one replaces it.
    """
    _ACTIONS[owner] = action
    return owner


def _act() -> None:
    for owner, action in list(_ACTIONS.items()):
        with suppress(OSError):  # a descriptor that cannot be closed does not keep the others open
            action(owner)
    _ACTIONS.clear()


os.register_at_fork(after_in_child=_act)
