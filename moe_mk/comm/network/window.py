"""The memory of a rank that its proxy may access: the window that peers write, registered memory, and counters.

Counters implement remote atomic additions in software: a value arrives in a message, and the receiving proxy adds it to
a counter. The network needs no remote atomics, only writes (as in UCCL-EP). A counter has one word for each source, and
each word has one writer: the source itself where it shares the memory, else the proxy of the owner. Reading a counter
adds up its words, so concurrent additions are not lost and the processor needs no atomic addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock

from moe_mk.comm.network.command import MOST_BYTES
from moe_mk.comm.network.frames import Frame, FrameError, Kind, LinkError
from moe_mk.comm.symmetric.flags import Words
from moe_mk.errors import unless_signalled

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class OwnWindow:
    """The memory of one rank, as its proxy sees it."""

    registered: memoryview
    """All bytes that a command of this rank may name; the data of the window come first."""
    data_bytes: int
    """How many of them a peer may write and read."""
    num_flags: int
    words: Words
    flag_at: Callable[[int], int]
    sources: int
    """Ranks that may add to a counter: each has a word of its own in it."""
    num_counters: int
    arrived: Event
    """Set whenever a flag or counter has changed, or a peer was lost."""
    reserve: Callable[[int, int], None] = lambda start, num_bytes: None
    """Take the pages of a range of the registered memory before it is written. Raises OSError where there are none."""
    counter_flags: range = range(0)
    """Flags that are words of counters: peers add to them and never store."""
    lock: Lock = field(default_factory=Lock)
    """Between threads of this process that serve one source."""

    def check(self, frame: Frame) -> None:
        """Raise FrameError for a flag, a counter or bytes that a peer may not name."""
        if frame.kind is Kind.STORE and (frame.flag >= self.num_flags or frame.flag in self.counter_flags):
            what = "a word of a counter" if frame.flag < self.num_flags else f"none of {self.num_flags}"
            raise FrameError(f"flag {frame.flag} is {what}")
        if frame.kind is Kind.ADD and frame.flag >= self.num_counters:
            raise FrameError(f"counter {frame.flag} is none of {self.num_counters}")
        if frame.kind is Kind.GET:
            self.asked(frame)

    def incoming(self, frame: Frame) -> memoryview:
        """Where a peer's payload goes. Raises FrameError beyond the data of the window, LinkError without memory."""
        place = self._data(frame.at, frame.size)
        try:
            self.reserve(frame.at, frame.size)
        except unless_signalled(OSError) as problem:
            raise LinkError(f"no memory for {frame.size} bytes that arrive: {problem.strerror}") from problem
        return place

    def asked(self, frame: Frame) -> memoryview:
        """Range that a peer's get requests: `at`, and the lower 24 bits of `value`. FrameError beyond the data."""
        return self._data(frame.at, frame.value & MOST_BYTES)

    def own(self, source: int, size: int) -> memoryview:
        """Bytes that a command names. Raises LinkError beyond the registered memory."""
        if source + size > self.registered.nbytes:
            raise LinkError(f"bytes {source} to {source + size} are outside of {self.registered.nbytes} registered")
        return self.registered[source : source + size]

    def add(self, source: int, counter: int, value: int) -> None:
        """Add to a counter, which `check` has passed: modulo 2^64, for one source."""
        place = self.flag_at(self.counter_flags.start + counter * self.sources + source)
        with self.lock:
            self.words.store(place, self.words.load(place) + value & _WORD)

    def counter(self, counter: int) -> int:
        """Sum of what all sources have added so far, modulo 2^64."""
        first = self.counter_flags.start + counter * self.sources
        return sum(self.words.load(self.flag_at(first + source)) for source in range(self.sources)) & _WORD

    def _data(self, at: int, size: int) -> memoryview:
        if at + size > self.data_bytes:
            raise FrameError(f"bytes {at} to {at + size} are outside of a window of {self.data_bytes}")
        return self.registered[at : at + size]
