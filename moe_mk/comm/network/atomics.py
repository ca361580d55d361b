"""Atomics in software: a number arrives with an immediate, and the receiving proxy adds it to a counter.

Networks without remote atomics, or with slow ones, need no more than a write (UCCL-EP). A counter is one word for each
source, written by one hand alone: by the source itself where it shares the memory, by the owner's proxy where it does
not. Reading adds the words up, so nothing is lost among writers and no processor need have an atomic addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from moe_mk.comm.symmetric.flags import Words

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Counters:
    """Counters of one window."""

    words: Words
    sources: int
    at: Callable[[int], int]
    """Where word number n lies, in bytes."""
    lock: Lock
    """Between threads of this process that serve one source."""

    def add(self, source: int, counter: int, value: int) -> None:
        """Add a number, modulo 2^64, for one source."""
        place = self.at(counter * self.sources + source)
        with self.lock:
            self.words.store(place, self.words.load(place) + value & _WORD)

    def value(self, counter: int) -> int:
        """What all sources have added so far, modulo 2^64."""
        first = counter * self.sources
        return sum(self.words.load(self.at(first + source)) for source in range(self.sources)) & _WORD
