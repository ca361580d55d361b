"""The steps of one message, by name and by who takes them: through a proxy on the CPU, and without one.

Through a proxy the processor posts the work in twelve steps (NVSHMEM's IBRC); a device that posts it itself needs eight
(IBGDA), and none of them is the processor's. Here the device is the producing thread, the card is the link: the twelve
steps are taken and noted one by one; the eight are a model (`device_path.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

Key = tuple[int, int]
"""Of a message: its channel, and the number of its last command in the ring."""


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
    PRODUCER_TOLD = ("producer_told", Actor.CPU)

    @property
    def actor(self) -> Actor:
        """Who takes it."""
        return self.value[1]


class DirectStep(Enum):
    """From the device itself, in order: name and actor."""

    DATA_PRODUCED = ("data_produced", Actor.PRODUCER)
    WORK_QUEUED = ("work_queued", Actor.PRODUCER)
    RECORD_WRITTEN = ("record_written", Actor.PRODUCER)
    DOORBELL_RUNG = ("doorbell_rung", Actor.PRODUCER)
    WORK_READ = ("work_read", Actor.CARD)
    DATA_READ = ("data_read", Actor.CARD)
    DATA_SENT = ("data_sent", Actor.CARD)
    COMPLETION_WRITTEN = ("completion_written", Actor.CARD)

    @property
    def actor(self) -> Actor:
        """Who takes it."""
        return self.value[1]


OnStep = Callable[[Step, Key], None]


@dataclass
class StepLog:
    """Notes every step of every message, with the time."""

    clock: Callable[[], float]
    notes: dict[Key, list[tuple[Step, float]]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, step: Step, key: Key) -> None:
        """Note a step; threads may do so at once."""
        self.notes[key].append((step, self.clock()))

    def steps(self, key: Key) -> list[Step]:
        """What one message has gone through, in the order of its notes."""
        return [step for step, _ in self.notes[key]]

    def latency_s(self, key: Key) -> float:
        """From the first step to the last: the sum of all between."""
        times = [time for _, time in self.notes[key]]
        return sum(after - before for before, after in pairwise(times))
