"""What a proxy may touch of its rank: the window that peers write, and the memory that commands may name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from moe_mk.comm.network.atomics import Counters
from moe_mk.comm.network.command import MOST_BYTES
from moe_mk.comm.network.frames import Frame, FrameError, LinkError
from moe_mk.comm.network.sequence import Kind
from moe_mk.comm.symmetric.flags import Words


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
    counters: Counters
    num_counters: int
    arrived: Event
    """Set whenever a flag or counter has changed, or a peer was lost."""
    reserve: Callable[[int, int], None] = lambda start, num_bytes: None
    """Take the pages of a range of the registered memory before it is written. Raises OSError where there are none."""
    counter_flags: range = range(0)
    """Flags that are words of counters: peers add to them and never store."""

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
        except OSError as problem:
            raise LinkError(f"no memory for {frame.size} bytes that arrive: {problem.strerror}") from problem
        return place

    def asked(self, frame: Frame) -> memoryview:
        """What a peer's get asks for: `at`, and the lower 24 bits of `value`. Raises FrameError beyond the data."""
        return self._data(frame.at, frame.value & MOST_BYTES)

    def own(self, source: int, size: int) -> memoryview:
        """Bytes that a command names. Raises LinkError beyond the registered memory."""
        if source + size > self.registered.nbytes:
            raise LinkError(f"bytes {source} to {source + size} lie outside of {self.registered.nbytes} registered")
        return self.registered[source : source + size]

    def store(self, flag: int, word: int) -> None:
        """Store a flag, which `check` has passed."""
        self.words.store(self.flag_at(flag), word)

    def add(self, source: int, counter: int, value: int) -> None:
        """Add to a counter, which `check` has passed."""
        self.counters.add(source, counter, value)

    def _data(self, at: int, size: int) -> memoryview:
        if at + size > self.data_bytes:
            raise FrameError(f"bytes {at} to {at + size} lie outside of a window of {self.data_bytes}")
        return self.registered[at : at + size]
