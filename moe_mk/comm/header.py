"""Announcement of a message between two ranks: a tag, and a header with a few rows behind it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.errors import unless_signalled
from moe_mk.process import Process

HEADER_BYTES = 256
MAGIC = b"moe-mk 1"
LAYOUT = struct.Struct("<8s 12q H")
TEXT_BYTES = HEADER_BYTES - LAYOUT.size
EAGER_BYTES = 1 << 16
"""Rows of no more than this are copied into the message of their header: a message costs more than the copy."""
# Tags of rows are 31 bits: 9 of the epoch, 6 of the call (never 0), 16 of the size. Below 2^16 are all others.
# A rank never has 63 calls open. Epochs do not wrap: what was sent in one stays with gloo until somebody receives it.
EPOCHS, CALLS, SIZES = 1 << 9, (1 << 6) - 1, (1 << 16) - 1
HANG_UP_TAG, RECOVERY_TAG, NOTICE_TAGS, HEADER_TAGS = 0, 1, EPOCHS, 2 * EPOCHS
"""Tags of headers, with the rows in them, and of what a rank reports out of order: one of each for every epoch."""
UNKNOWN = -1
ANY = -1
"""The bytes that a rank awaits which learns from the header how many rows come with it."""


class Kind(IntEnum):
    """Kind of message that a header announces."""

    ROWS = 0
    FAILED = 1
    """The sender, or a peer that it names, failed."""
    WAITING = 2
    """The sender has waited for a peer longer than its timeout."""


@dataclass(frozen=True)
class Header:
    """Header of one message. text: the phase of rows, the cause of a failure."""

    kind: Kind
    epoch: int
    call: int
    text: str
    layer: int = 0
    count: int = 0
    num_bytes: int = 0
    expected_bytes: int = 0
    """That the sender awaits from the receiver in the same call."""
    peer: int = UNKNOWN
    """The rank that failed or is awaited."""
    process: Process | None = None
    host: int = 0
    """Of the process, see `host_number`."""
    rows: bytes = b""
    """Those that came with the header."""

    def packed(self) -> bytearray:
        """Return the header as 256 bytes."""
        process = self.process
        who = (0, 0, 0) if process is None else (process.number, int(process.started), process.namespace)
        text = self.text.encode()[:TEXT_BYTES]
        numbers = (
            self.kind, self.epoch, self.call, self.layer, self.count, self.num_bytes, self.expected_bytes, self.peer,
            *who, self.host,
        )  # fmt: skip
        memory = bytearray(HEADER_BYTES)
        LAYOUT.pack_into(memory, 0, MAGIC, *numbers, len(text))
        memory[LAYOUT.size : LAYOUT.size + len(text)] = text
        return memory

    def message(self) -> Tensor:
        """uint8, in memory of its own."""
        return torch.frombuffer(self.packed(), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, memory: bytes | bytearray) -> Self:
        """From a message, with the rows that are behind it. Raises ValueError for what no header can be."""
        magic, kind, epoch, call, layer, count, num_bytes, expected, peer, number, started, namespace, host, length = (
            LAYOUT.unpack_from(memory)
        )
        if magic != MAGIC or kind not in Kind.__members__.values() or length > TEXT_BYTES:
            raise ValueError(f"no header of this version: it begins with {bytes(memory[:16])!r}")
        text = bytes(memory[LAYOUT.size : LAYOUT.size + length]).decode(errors="replace")
        process = Process(number, str(started), namespace) if number else None
        eager = num_bytes if 0 < num_bytes <= EAGER_BYTES else 0
        rows = bytes(memory[HEADER_BYTES : HEADER_BYTES + eager])
        return cls(Kind(kind), epoch, call, text, layer, count, num_bytes, expected, peer, process, host, rows)


class Envelope(NamedTuple):
    """Rows for one peer that travel in the message of their header: memory of their own, with room for it in front."""

    tensor: Tensor
    """uint8 on the host, dense."""
    memory: memoryview
    """The same bytes."""
    at: int
    """Where the rows begin, at HEADER_BYTES or later."""
    num_bytes: int
    """Of the rows; where that is more than EAGER_BYTES, the message ends with its header."""
    num_rows: int

    @classmethod
    def empty(cls, num_bytes: int, num_rows: int) -> Envelope:
        """Memory for rows that are to be written."""
        tensor = torch.empty(HEADER_BYTES + num_bytes, dtype=torch.uint8, device="cpu")
        return cls(tensor, tensor.numpy().data, HEADER_BYTES, num_bytes, num_rows)

    @classmethod
    def of(cls, rows: Tensor | None, num_rows: int) -> Envelope:
        """The message of rows, dense and never empty, or of a number alone."""
        num_bytes = bytes_of(rows)
        envelope = cls.empty(num_bytes if num_bytes <= EAGER_BYTES else 0, num_rows)
        if rows is not None and envelope.num_bytes:
            envelope.rows.copy_(as_bytes(rows))
        return envelope._replace(num_bytes=num_bytes)

    @property
    def rows(self) -> Tensor:
        return self.tensor[self.at : self.at + self.num_bytes]

    def message(self) -> Tensor:
        return self.tensor[self.at - HEADER_BYTES : self.at + self.num_bytes]


class Arrival(NamedTuple):
    """Rows that came with their header, in the memory of the message; the next message goes elsewhere."""

    num_rows: int
    """As announced."""
    num_bytes: int
    tensor: Tensor
    """uint8: HEADER_BYTES, then the rows."""
    memory: bytearray
    """The same bytes."""

    @property
    def rows(self) -> Tensor:
        return self.tensor[HEADER_BYTES : HEADER_BYTES + self.num_bytes]

    @property
    def address(self) -> int:
        return self.tensor.data_ptr() + HEADER_BYTES


@dataclass(frozen=True, slots=True)
class RowHeaders:
    """Headers of rows of one phase, one layer and one epoch, written and compared without an object for each."""

    epoch: int
    text: bytes
    layer: int
    sender: tuple[int, int, int, int]
    """Process number, start time, namespace and host of this rank."""

    def write(self, envelope: Envelope, call: int, expected_bytes: int) -> None:
        """Write the header in front of rows. expected_bytes: from the receiver, or ANY."""
        at = envelope.at - HEADER_BYTES
        LAYOUT.pack_into(
            envelope.memory, at, MAGIC, Kind.ROWS, self.epoch, call, self.layer, envelope.num_rows, envelope.num_bytes,
            expected_bytes, UNKNOWN, *self.sender, len(self.text),
        )  # fmt: skip
        at += LAYOUT.size
        envelope.memory[at : at + len(self.text)] = self.text

    def read(
        self, memory: bytearray, call: int, expected_bytes: int, awaited_bytes: int
    ) -> tuple[int, int, tuple[int, ...]] | None:
        """Count, bytes of rows and sender of the header of this call; None for any other header.

        expected_bytes: that the peer is to await, or ANY. awaited_bytes: that it is to send, or ANY up to EAGER_BYTES.
        """
        magic, kind, epoch, called, layer, count, num_bytes, expected, peer, *who, length = LAYOUT.unpack_from(memory)
        found = magic, kind, epoch, called, layer, expected, peer, length
        if found != (MAGIC, Kind.ROWS, self.epoch, call, self.layer, expected_bytes, UNKNOWN, len(self.text)):
            return None
        if not 0 <= num_bytes <= EAGER_BYTES or (awaited_bytes not in (ANY, num_bytes)):
            return None
        if memory[LAYOUT.size : LAYOUT.size + length] != self.text:
            return None
        return count, num_bytes, tuple(who)


@cache
def host_number() -> int:
    """A number of this host since it was started, in 63 bits; 0 where it cannot be read.

    The namespace of a process does not distinguish hosts: the first one has the same inode on all of them.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except unless_signalled(FileNotFoundError, PermissionError):
        return 0
    return int.from_bytes(hashlib.sha256(boot).digest()[:8], "big") >> 1


def bytes_of(rows: Tensor | None) -> int:
    """The size of rows, 0 without any."""
    return 0 if rows is None else rows.numel() * rows.element_size()


def as_bytes(rows: Tensor) -> Tensor:
    """Dense rows as one row of bytes, in the same memory."""
    return rows.view(-1).view(torch.uint8)


def row_tag(epoch: int, call: int, rows: Tensor) -> int:
    """Of rows that follow their header: those of another epoch, call or size have another tag."""
    return (epoch * (CALLS + 1) + 1 + call % CALLS) << 16 | bytes_of(rows) % SIZES


@dataclass
class Receive:
    """A message that is awaited from a peer."""

    peer: int
    tag: int
    memory: bytearray
    tensor: Tensor
    work: dist.Work | RuntimeError = field(default_factory=lambda: RuntimeError("it was not posted"))
    """An error where the connection had ended, and until it is posted."""
    has_come: bool = False
    """Whether it was waited for: gloo would wait for ever if asked again."""

    @classmethod
    def of(cls, peer: int, tag: int, num_bytes: int = HEADER_BYTES) -> Self:
        """One that is not posted yet."""
        return cls(peer, tag, *message_memory(num_bytes))


def message_memory(num_bytes: int = HEADER_BYTES + EAGER_BYTES) -> tuple[bytearray, Tensor]:
    """Zeros, and the same bytes as a tensor."""
    memory = bytearray(num_bytes)
    return memory, torch.frombuffer(memory, dtype=torch.uint8)


@dataclass
class Posts:
    """Messages to be posted in order, each with the work that gloo returns; `post` is repeated until all are posted.

    A pending operation whose buffer is freed blocks its gloo connection for good, and a message that is posted twice is
    taken for the next one. An interrupt must cause neither, so `map` calls gloo while `extend` stores the result, and
    the next `post` resumes behind the last message that was posted.
    """

    messages: Sequence[tuple[int, int, Tensor]]
    """Peer, tag, and the memory of each."""
    works: list[dist.Work | RuntimeError] = field(default_factory=list)

    def post(self, how: Callable[[list[Tensor], int, int], dist.Work]) -> None:
        """how: gloo's send or recv. An error is kept for whoever waits for the message: some are never needed."""
        while (done := len(self.works)) < len(self.messages):
            peers, tags, tensors = zip(*self.messages[done:], strict=True)
            try:
                self.works.extend(map(how, [[tensor] for tensor in tensors], peers, tags))
            except unless_signalled(RuntimeError) as problem:
                self.works.append(problem)


@dataclass
class Recovery:
    """An agreement of all ranks to start over, which the next `recover` continues if an interrupt ends this one."""

    epoch: int
    """In which it began."""
    left_out: int = 0
    """Ranks that the others go on without, as bits."""
    receives: dict[int, tuple[Receive, Posts]] = field(default_factory=dict)
    """The message of each peer that is awaited or has come."""
    sends: Posts | None = None
    number: int = 0
    """Of this rank; in the end the largest of all."""
    has_ended: bool = False

    @property
    def is_sent(self) -> bool:
        """Whether peers have this rank's message, with which they go on to the next epoch."""
        return self.sends is not None and bool(self.sends.works)

    def call(
        self, group: dist.ProcessGroup, peers: Sequence[int], left_out: int, number: int, process: Process
    ) -> None:
        """Await a message of each peer, and send one to each, once for each set of ranks that are left out."""
        for peer in peers:
            self.await_message(peer, group)
        if self.sends is None or self.left_out != left_out:
            self.number = number
            mine = Header(Kind.ROWS, self.epoch, 0, "recovery", count=left_out, num_bytes=number, process=process)
            self.left_out, self.sends = left_out, Posts([(peer, RECOVERY_TAG, mine.message()) for peer in peers])
        self.sends.post(group.send)

    def await_message(self, peer: int, group: dist.ProcessGroup) -> None:
        """Await one of a peer, unless it is awaited or has come."""
        if peer not in self.receives:
            receive = Receive.of(peer, RECOVERY_TAG)
            self.receives[peer] = receive, Posts([(peer, RECOVERY_TAG, receive.tensor)])
        self.receives[peer][1].post(group.recv)


@dataclass(frozen=True)
class Caller:
    """The view of a group that makes a call."""

    layer: str
    layer_number: int
    timeout_s: float
    rank_of: Mapping[int, int]
    """The ranks of the view, as errors name them, by rank of the process group."""
    limit: str = "kernel.timeout_s"
    """What the timeout comes from."""
