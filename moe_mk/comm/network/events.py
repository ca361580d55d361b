"""Measurements of a proxy: the steps of one message, and statistics by peer.

A CPU proxy posts a message in twelve steps (as NVSHMEM's IBRC); a device that posts it itself needs eight (IBGDA), none
of them on the CPU. Here the producing thread stands for the device and the link for the network card. `Watch` measures
how long messages take to be confirmed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

Key = tuple[int, int]
"""Of a message: its channel, and the number of its last command in the ring."""
US = 1e6


class Actor(Enum):
    """Who takes a step."""

    PRODUCER = "producer"
    CPU = "cpu"
    CARD = "card"


class Step(Enum):
    """Through a proxy, in order: name and actor."""

    DATA_PRODUCED = ("data_produced", Actor.PRODUCER)
    REQUEST_WRITTEN = ("request_written", Actor.PRODUCER)
    REQUEST_SEEN = ("request_seen", Actor.CPU)
    WORK_QUEUED = ("work_queued", Actor.CPU)
    RECORD_WRITTEN = ("record_written", Actor.CPU)
    DOORBELL_RUNG = ("doorbell_rung", Actor.CPU)
    WORK_READ = ("work_read", Actor.CARD)
    DATA_READ = ("data_read", Actor.CARD)
    DATA_SENT = ("data_sent", Actor.CARD)
    COMPLETION_WRITTEN = ("completion_written", Actor.CARD)
    COMPLETION_SEEN = ("completion_seen", Actor.CPU)
    PRODUCER_REPORTED = ("producer_reported", Actor.CPU)

    @property
    def actor(self) -> Actor:
        return self.value[1]


OnStep = Callable[[Step, Key], None]


@dataclass
class Completion:
    """Times from the link to the confirmation, of one peer."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    by_us: Counter[int] = field(default_factory=Counter)
    """Messages by the power of two of microseconds that they took at most."""

    def add(self, seconds: float) -> None:
        self.count, self.total_s = self.count + 1, self.total_s + seconds
        self.longest_s = max(self.longest_s, seconds)
        self.by_us[1 << max(int(seconds * US), 0).bit_length()] += 1


@dataclass
class Watch:
    """Counters of a running proxy. Written by its threads, each for peers on its own channels."""

    completion: dict[int, Completion] = field(default_factory=lambda: defaultdict(Completion))
    messages: Counter[int] = field(default_factory=Counter)
    """Sent to each peer, acknowledgements not counted."""
    sizes: Counter[int] = field(default_factory=Counter)
    """Messages with payload by its size, as the power of two it is at most."""
    most_in_flight: Counter[int] = field(default_factory=Counter)
    """Bytes to each peer that were at some time sent and not confirmed."""
    held_back: Counter[int] = field(default_factory=Counter)
    """How often a message to each peer had to wait for confirmations of earlier ones."""
