"""A device that posts its work to the card itself: a model of queue, record, doorbell and card, without a processor.

    1 data   2 queue entry   3 record   4 doorbell   |   5 card reads the queue   6 the data   7 sends   8 completes

The record counts what was queued and lies in memory; the doorbell brings the card that number over the bus, and may be
lost. The card compares its own count with the newest number it knows of: a doorbell, or the record that it is made
to read again (the replay of doorbell records, IBGDA). So work is neither lost with a doorbell nor done twice by two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from moe_mk.comm.network.events import Actor
from moe_mk.errors import CommError

W = TypeVar("W")


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
        return self.value[1]


@dataclass
class WorkQueue(Generic[W]):
    """A ring of entries with its record, doorbell and completions. Producer and card are the two that use it."""

    capacity: int
    on_step: Callable[[DirectStep, int], None] = lambda step, number: None
    record: int = 0
    """Entries ever queued."""
    doorbell: int = 0
    """The newest number the card has been reported."""
    completed: int = 0
    """Entries the card has completed: the completion queue as a count."""
    _entries: dict[int, W] = field(default_factory=dict)

    def post(self, work: W, *, is_doorbell_lost: bool = False) -> int:
        """Steps 1 to 4, by the device; returns the number of the entry. Raises CommError if the ring is full."""
        if self.record - self.completed >= self.capacity:
            text = f"{self.capacity} entries are queued and not completed; wait for completions first"
            raise CommError(text, rank=0, phase="post")
        number = self.record
        self.on_step(DirectStep.DATA_PRODUCED, number)
        self._entries[number % self.capacity] = work
        self.on_step(DirectStep.WORK_QUEUED, number)
        self.record += 1
        self.on_step(DirectStep.RECORD_WRITTEN, number)
        if not is_doorbell_lost:
            self.doorbell = self.record
        self.on_step(DirectStep.DOORBELL_RUNG, number)
        return number

    def replay(self) -> None:
        """Make the card read the record: what a timeout does where a doorbell may have been lost."""
        self.doorbell = self.record

    def serve(self, send: Callable[[W], None]) -> int:
        """Steps 5 to 8, by the card, for everything it has been reported of; returns how many entries."""
        begun = self.completed
        while self.completed < self.doorbell:
            number = self.completed
            work = self._entries[number % self.capacity]
            self.on_step(DirectStep.WORK_READ, number)
            self.on_step(DirectStep.DATA_READ, number)
            send(work)
            self.on_step(DirectStep.DATA_SENT, number)
            self.completed += 1
            self.on_step(DirectStep.COMPLETION_WRITTEN, number)
        return self.completed - begun
