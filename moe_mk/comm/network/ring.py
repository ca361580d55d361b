"""A queue of commands between one producer and one consumer, without a lock, in memory that both map.

    [ head, by the producer alone | tail, by the consumer alone | command 0 | command 1 | ... | command capacity - 1 ]

Head and tail count commands since the beginning, so they are equal when all is done, and any capacity will do. The
producer stores the head after the command, and looks at the tail only when the ring seems full (Lamport's queue with a
cached index). A command between tail and head is committed: whoever consumes, now or later, begins at the tail.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moe_mk.comm.network.command import COMMAND_BYTES, TransferCommand
from moe_mk.comm.symmetric.flags import WORD_BYTES, words_of
from moe_mk.errors import ShapeError

HEAD_AT, TAIL_AT, COMMANDS_AT = 0, 128, 256
"""Head and tail two cache lines apart: processors fetch lines in pairs."""

Packed = npt.NDArray[np.uint64]
"""(X, 2): commands as they lie in memory."""


def ring_bytes(capacity: int) -> int:
    """What a ring takes."""
    return COMMANDS_AT + capacity * COMMAND_BYTES


def packed(commands: list[TransferCommand]) -> Packed:
    """Commands as they lie in memory."""
    return np.array([command.pack() for command in commands], dtype=np.uint64).reshape(-1, 2)


class CommandRing:
    """One end of a ring; zeroed memory is an empty one. Each end belongs to one thread."""

    def __init__(self, memory: Tensor, capacity: int) -> None:
        """memory: uint8. Raises ShapeError where it is not what `ring_bytes` says."""
        if memory.numel() != ring_bytes(capacity) or capacity < 1:
            raise ShapeError(f"a ring of {capacity} commands takes {ring_bytes(capacity)} B, got {memory.numel()} B")
        self.capacity = capacity
        self._words = words_of(memory)
        self._slots: Packed = memory.numpy()[COMMANDS_AT:].view(np.uint64).reshape(capacity, 2)
        self._head, self._seen_tail = self.head, self.tail

    @property
    def head(self) -> int:
        """Commands committed since the beginning."""
        return self._words.load(HEAD_AT)

    @property
    def tail(self) -> int:
        """Commands completed since the beginning."""
        return self._words.load(TAIL_AT)

    @property
    def has_room(self) -> bool:
        """Whether one more command can be committed."""
        return self._room() > 0

    def push(self, command: TransferCommand) -> bool:
        """Commit one command; False if the ring is full."""
        if self._room() < 1:
            return False
        self._slots[self._head % self.capacity] = command.pack()
        self._commit(1)
        return True

    def push_many(self, commands_X2: Packed) -> int:
        """Commit as many commands as there is room for; returns how many."""
        count = min(self._room(), len(commands_X2))
        first = self._head % self.capacity
        before_end = min(count, self.capacity - first)
        self._slots[first : first + before_end] = commands_X2[:before_end]
        self._slots[: count - before_end] = commands_X2[before_end:count]
        if count:
            self._commit(count)
        return count

    def read(self, number: int, most: int) -> Packed:
        """A copy of the committed commands from a number on, at most so many."""
        count = min(most, self.head - number)
        places = (number + np.arange(count, dtype=np.int64)) % self.capacity
        return self._slots[places]

    def complete(self, tail: int) -> None:
        """All commands before this number are done, and their places free."""
        self._words.store(TAIL_AT, tail)

    def _room(self) -> int:
        room = self.capacity - (self._head - self._seen_tail)
        if room < 1:
            self._seen_tail = self.tail
            room = self.capacity - (self._head - self._seen_tail)
        return room

    def _commit(self, count: int) -> None:
        self._head += count
        self._words.store(HEAD_AT, self._head)


assert COMMAND_BYTES % WORD_BYTES == 0
