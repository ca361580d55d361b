"""Waiting for a peer without burning a core that the peer may need, and never for ever."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_mk.errors import CommError

Clock = Callable[[], float]
"""Seconds on a steady clock."""

SPINS, YIELDS = 50, 100
FIRST_SLEEP_S, LONGEST_SLEEP_S, GROWTH = 20e-6, 500e-6, 1.25
PULSE_S = 0.05
"""How often a peer is looked at while it is awaited."""


@dataclass(frozen=True)
class Process:
    """A process so that it cannot be taken for a later one of the same number."""

    number: int
    started: str
    """Clock ticks after boot."""
    namespace: int
    """Inode of its pid namespace; numbers mean something only within one."""

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, number: int) -> Process:
        """A running process of this namespace."""
        return cls(number, _stat(number)[1], os.stat("/proc/self/ns/pid").st_ino)

    def is_gone(self, seen_from: Process) -> bool:
        """Whether it has ended, reaped or not; False where it cannot be seen."""
        if self.namespace != seen_from.namespace:
            return False
        try:
            state, started = _stat(self.number)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX" or started != self.started


def _stat(number: int) -> tuple[str, str]:
    """State letter and start time; the name before them may hold spaces and brackets."""
    fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]


class Waiting(ABC):
    """One wait for words of peers."""

    def __init__(self, rank: int, phase: str, epoch: int, layer: str) -> None:
        self.rank, self.phase, self.epoch, self.layer = rank, phase, epoch, layer

    @abstractmethod
    def pause(self, peer: int) -> None:
        """Let time pass between two looks at the word of `peer`. Raises CommError when that is pointless."""

    def error(self, peer: int, text: str) -> CommError:
        """A failure with rank, phase, epoch and peer."""
        return CommError(f"epoch {self.epoch}: {text}", rank=self.rank, phase=self.phase, layer=self.layer, peer=peer)


class WaitingInLockstep(Waiting):
    """Between ranks of one thread nothing happens while one of them waits."""

    def pause(self, peer: int) -> None:
        """A word that is not there will not come."""
        raise self.error(peer, "has made no such call; ranks of one process must be advanced hop by hop")


class WaitingForProcess(Waiting):
    """Spin, then offer the core to others, then sleep for longer and longer; look after the peer meanwhile."""

    def __init__(
        self, rank: int, phase: str, epoch: int, layer: str, *, peers: Sequence[Process], timeout_s: float, clock: Clock
    ) -> None:
        super().__init__(rank, phase, epoch, layer)
        self._peers, self._timeout_s, self._clock = peers, timeout_s, clock
        self._turns, self._sleep_s = 0, FIRST_SLEEP_S
        self._began = self._looked = 0.0
        self._verdict = ""

    def pause(self, peer: int) -> None:
        """Raise only after one more look: a peer may have stored its word right before it ended."""
        if self._verdict:
            raise self.error(peer, self._verdict)
        self._turns += 1
        if self._turns <= SPINS:
            return
        if self._turns <= SPINS + YIELDS:
            os.sched_yield()
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * GROWTH, LONGEST_SLEEP_S)
        self._look(peer)

    def _look(self, peer: int) -> None:
        now = self._clock()
        self._began = self._began or now
        if now - self._began > self._timeout_s:
            self._verdict = f"sent nothing within {self._timeout_s:g} s [kernel.timeout_s]; it is dead, stuck or late"
        elif now - self._looked > PULSE_S:
            self._looked = now
            if self._peers[peer].is_gone(self._peers[self.rank]):
                self._verdict = f"its process {self._peers[peer].number} has ended"
