"""Processes, and whether they have ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moe_mk.errors import unless_signalled


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
        return cls.of(os.getpid())

    @classmethod
    def of(cls, number: int) -> Process:
        """A running process of this namespace."""
        namespace = Path("/proc/self/ns/pid")
        return cls(number, _stat(number)[1], namespace.stat().st_ino if namespace.exists() else 0)

    def is_gone(self, seen_from: Process) -> bool:
        """Whether it has ended, reaped or not; False where it cannot be seen."""
        if self.namespace != seen_from.namespace:
            return False
        try:
            state, started = _stat(self.number)
        except unless_signalled(FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX" or started != self.started


def _stat(number: int) -> tuple[str, str]:
    """State letter and start time. Raises FileNotFoundError or ProcessLookupError where there is no such process."""
    if Path("/proc/self/stat").exists():
        text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # the name before them may hold spaces and brackets
        return fields[0], fields[19]
    try:
        os.kill(number, 0)
    except unless_signalled(PermissionError):
        pass  # it exists, and belongs to another user
    return "R", ""
