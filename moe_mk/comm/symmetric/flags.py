"""Flags: 64-bit words that one rank stores and another loads; what was written before the store is seen after the load.

    word = epoch << 32 | count        one store publishes both, and nothing is ever reset
    word = ...... << 32 | all ones    the rank that stores it has failed, in whichever epoch

x86-64 keeps stores in order and loads in order, and an aligned 8-byte access is one access: plain stores and loads are
release and acquire there (Intel SDM 3A 9.2, "total store ordering"), and Python moves none across the other. Elsewhere,
Arm first of all, words go through libatomic, which needs no compiler.

Waiting for a peer without burning a core that the peer may need, and never for ever.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from moe_mk.errors import CommError, UnsupportedError, unless_signalled
from moe_mk.process import WatchedProcess

WORD_BYTES = 8
COUNT_BITS = 32
COUNT_MASK = (1 << COUNT_BITS) - 1
FAILED = COUNT_MASK
"""The count that reports a failure."""
TOTAL_STORE_ORDER = ("x86_64", "amd64")
ACQUIRE, RELEASE, SEQUENTIAL = 2, 3, 5
LIBATOMIC = "libatomic.so.1"


def word_of(epoch: int, count: int) -> int:
    """Pack an epoch (modulo 2^32) and a count into one word."""
    assert 0 <= count <= COUNT_MASK
    return (epoch & COUNT_MASK) << COUNT_BITS | count


def is_behind(word: int, epoch: int) -> bool:
    """Whether a word is of an earlier epoch; epochs wrap, so half of all count as earlier."""
    return ((word >> COUNT_BITS) - epoch) & COUNT_MASK >= 1 << (COUNT_BITS - 1)


def is_failure(word: int) -> bool:
    """Whether a word reports that the rank that stored it has failed."""
    return word & COUNT_MASK == FAILED


class Words(ABC):
    """All words of a memory, by byte offset."""

    @abstractmethod
    def store(self, at: int, word: int) -> None:
        """Store with release: everything written before is seen by whoever loads this word."""

    @abstractmethod
    def load(self, at: int) -> int:
        """Load a flag with acquire semantics."""

    @abstractmethod
    def fence(self) -> None:
        """Complete what was written before anything that follows."""


class PlainWords(Words):
    """Ordinary aligned accesses, for processors that keep their order."""

    def __init__(self, memory: Tensor) -> None:
        assert memory.data_ptr() % WORD_BYTES == 0
        self._words = memory.numpy().view("uint64")

    def store(self, at: int, word: int) -> None:
        self._words[at // WORD_BYTES] = word

    def load(self, at: int) -> int:
        return int(self._words[at // WORD_BYTES])

    def fence(self) -> None:
        """Nothing: stores are seen in order, and copies that bypass the cache end with a fence of their own."""


class AtomicWords(Words):
    """GCC's atomic functions, for every other processor."""

    def __init__(self, memory: Tensor, library: ctypes.CDLL) -> None:
        self._memory, self._base = memory, memory.data_ptr()
        self._store = _function(library, "__atomic_store_8", None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
        self._load = _function(library, "__atomic_load_8", ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int)
        self._add = _function(
            library, "__atomic_fetch_add_8", ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        )
        self._own = ctypes.c_uint64(0)

    def store(self, at: int, word: int) -> None:
        self._store(self._base + at, word, RELEASE)

    def load(self, at: int) -> int:
        return int(self._load(self._base + at, ACQUIRE))

    def fence(self) -> None:
        """A sequentially consistent change of a word of our own."""
        self._add(ctypes.addressof(self._own), 1, SEQUENTIAL)


def reasons_against_words(machine: str | None = None, open_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> str:
    """Why this processor cannot share flags; empty if it can."""
    if (machine or platform.machine()).lower() in TOTAL_STORE_ORDER:
        return ""
    try:
        open_library(LIBATOMIC)
    except unless_signalled(OSError):
        processor = machine or platform.machine()
        return f"{processor} orders memory weakly and {LIBATOMIC} is not installed (Debian: apt install libatomic1)"
    return ""


def words_of(
    memory: Tensor, machine: str | None = None, open_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL
) -> Words:
    """The words of a memory for this processor. Raises UnsupportedError where nothing keeps their order."""
    if reason := reasons_against_words(machine, open_library):
        raise UnsupportedError("memory cannot be shared between ranks", [reason])
    if (machine or platform.machine()).lower() in TOTAL_STORE_ORDER:
        return PlainWords(memory)
    return AtomicWords(memory, open_library(LIBATOMIC))


def _function(library: ctypes.CDLL, name: str, result: object, *arguments: object) -> Callable[..., int]:
    function = getattr(library, name)
    function.restype, function.argtypes = result, list(arguments)
    return function  # type: ignore[no-any-return]


Clock = Callable[[], float]
"""Seconds on a steady clock."""

SPINS, YIELDS = 50, 100
FIRST_SLEEP_S, LONGEST_SLEEP_S, GROWTH = 20e-6, 500e-6, 1.25
PULSE_S = 0.05
"""How often a peer is looked at while it is awaited."""


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
        raise self.error(peer, "has made no such call; ranks of one process must be advanced step by step")


class WaitingForProcess(Waiting):
    """Spin, then offer the core to others, then sleep for longer and longer; look after the peer meanwhile."""

    def __init__(
        self,
        rank: int,
        phase: str,
        epoch: int,
        layer: str,
        *,
        peers: Sequence[WatchedProcess],
        timeout_s: float,
        clock: Clock,
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

    @property
    def _late(self) -> str:
        return f"sent nothing within {self._timeout_s:g} s [kernel.timeout_s]; it is dead, stuck or late"

    def _look(self, peer: int) -> None:
        now = self._clock()
        self._began = self._began or now
        if now - self._began > self._timeout_s:
            self._verdict = self._late
        elif now - self._looked > PULSE_S:
            self._looked = now
            if self._peers[peer].is_gone():
                self._verdict = f"its process {self._peers[peer].process.number} has ended"
