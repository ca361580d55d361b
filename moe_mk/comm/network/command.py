"""Transfer commands and the ring that a producer writes them to.

    put, get      op 4 | peer 8 | flag 12 | size 24 | source 40 | at 40
    store, add    op 4 | peer 8 | flag 12 | size 24 |  16 unused | value 64

A command has 128 bits, which a producer writes with two stores whatever the size of the transfer; the proxy does the
rest. The division of work, and 8 bits of rank and 24 bits of size in a command, are those of UCCL-EP.

`CommandRing` is a lock-free queue between one producer and one consumer, in memory that both map.

    [ head, written by the producer | tail, written by the consumer | command 0 | ... | command capacity - 1 ]

Head and tail count commands since the start: they are equal when all commands are done, and any capacity is valid. The
producer stores the head after the command and reads the tail only when the ring seems full (Lamport's queue with a
cached index). A command between tail and head is committed: every consumer, also a later one, starts at the tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moe_mk.comm.symmetric.flags import WORD_BYTES, words_of
from moe_mk.errors import ShapeError, UnsupportedError

COMMAND_BYTES = 16
FIELD_BITS = {"peer": 8, "flag": 12, "size": 24, "source": 40, "at": 40, "value": 64}
MOST_BYTES = (1 << FIELD_BITS["size"]) - 1
"""What one command may move."""
_FIELD_MASKS = {name: (1 << bits) - 1 for name, bits in FIELD_BITS.items()}
_WORD = (1 << 64) - 1


HEAD_AT, TAIL_AT, COMMANDS_AT = 0, 128, 256
"""Head and tail two cache lines apart: processors fetch lines in pairs."""
Packed = npt.NDArray[np.uint64]
"""(X, 2): commands in their memory format."""


class Op(IntEnum):
    """Operation of a command. Zero is none, so unwritten memory is no command."""

    PUT = 1
    """Bytes of this rank to a peer."""
    STORE = 2
    """A word into a flag of a peer, after all puts to it before."""
    ADD = 3
    """A number onto a counter of a peer, after all puts to it before."""
    GET = 4
    """Bytes of a peer to this rank, after all puts to it before."""


CARRIES_VALUE = frozenset({Op.STORE, Op.ADD})


@dataclass(frozen=True, slots=True)
class TransferCommand:
    """One request of a producer to its proxy. Raises UnsupportedError with every field that is out of its limits."""

    op: Op
    peer: int
    size: int = 0
    """Bytes to move."""
    source: int = 0
    """Position in this rank's registered memory: the source, for a get the destination."""
    at: int = 0
    """Where they go in the data of the peer's window; for a get, where they lie there."""
    flag: int = 0
    value: int = 0

    def __post_init__(self) -> None:
        unused = ("source", "at") if self.op in CARRIES_VALUE else ("value",)
        over = [
            f"{name}={number} does not fit {FIELD_BITS[name]} bits: 0 to {mask}"
            for name, mask in _FIELD_MASKS.items()
            if not 0 <= (number := getattr(self, name)) <= mask
        ]
        over += [f"{name}={number} has no place in it" for name in unused if (number := getattr(self, name))]
        if over:
            raise UnsupportedError(f"a {self.op.name} command cannot be packed into {COMMAND_BYTES * 8} bits", over)

    def pack(self) -> tuple[int, int]:
        body = self.value if self.op in CARRIES_VALUE else self.source << FIELD_BITS["at"] | self.at
        head = self.op | self.peer << 4 | self.flag << 12 | self.size << 24
        return head | (body >> 64) << 48, body & _WORD

    @classmethod
    def unpack(cls, first: int, second: int) -> TransferCommand:
        """The command of two words. Raises UnsupportedError for words that are none."""
        try:
            op = Op(first & 0xF)
        except ValueError as problem:
            raise UnsupportedError("two words are no command", [f"op={first & 0xF} is none of {[*Op]}"]) from problem
        peer, flag, size = first >> 4 & 0xFF, first >> 12 & 0xFFF, first >> 24 & MOST_BYTES
        if op in CARRIES_VALUE:
            return cls(op, peer, size, flag=flag, value=second)
        body = (first >> 48) << 64 | second
        return cls(op, peer, size, body >> FIELD_BITS["at"], body & _FIELD_MASKS["at"], flag)


def ring_bytes(capacity: int) -> int:
    """Size of a ring in bytes."""
    return COMMANDS_AT + capacity * COMMAND_BYTES


class CommandRing:
    """One end of a ring; zeroed memory is an empty one. Each end belongs to one thread."""

    def __init__(self, memory: Tensor, capacity: int) -> None:
        """memory: uint8. Raises ShapeError where its size is not `ring_bytes`."""
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
