"""A symmetric heap: every rank has a window of the same shape, and every rank writes and reads every window.

    window of a rank   [ flags, one word a cache line pair | barrier flags, one a rank | data ]

A rank that waits for a flag sees the puts that precede its `signal`; no answer is sent. Offsets
are bytes in the data of a window. The operations are those of a PGAS heap (NVSHMEM's put, put_signal, wait_until,
quiet), between processes of one host over shared memory and between ranks of one process over its own.

The interface that every heap provides:

    rank, size, shape, layer, traffic      the rank, size of windows, the layer served, bytes moved
    put, signal, put_signal, quiet         to a peer; a signal is seen after every put before it to the same peer
    wait_until                             flags of the own window; ends in CommError, never in a hang
    data(rank, ...)                        the own window, as a view
    read(peer, ...), get(peer, ...)        bytes of a peer's window: seen in place or fetched, and copied
    barrier                                between processes only

A heap whose `is_addressable` is true offers more: `data` and `address` of any peer's window, `reserve` before kernels
write there themselves, and `flag_address` of any flag. For one that reaches peers by messages it is false, and it
has none of these but its own window.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_mk.comm.failure import Failure
from moe_mk.comm.symmetric.flags import COUNT_MASK, FAILED, WORD_BYTES, Waiting, Words, is_behind, is_failure, word_of
from moe_mk.comm.symmetric.memory import Memory, free_bytes
from moe_mk.comm.traffic import Traffic
from moe_mk.errors import CommError, MoEMKError, ShapeError, unless_signalled
from moe_mk.process import FORKED, in_child

FLAG_BYTES = 128
"""Two cache lines: processors fetch lines in pairs, and neighbours must not share one."""
PAGE_BYTES = 4096

NOTE_BYTES = 256
"""Of a failure in a window: the rank that caused it as i32, the length of the text as u32, the text."""
NOT_KNOWN = "its call failed: the cause is not known"

StartWaiting = Callable[[str, int, str], Waiting]
"""Begin to wait, given phase, epoch and layer."""


def aligned(num_bytes: int, to: int = PAGE_BYTES) -> int:
    """Round a number of bytes up to the next multiple of `to`."""
    return -(-num_bytes // to) * to


@dataclass(frozen=True)
class WindowShape:
    """The window of one rank."""

    ranks: int
    num_flags: int
    data_bytes: int
    notes_bytes: int = 0
    """Of the data, the last ones, which have pages from the start, as flags have: a failure is reported there."""

    @cached_property
    def data_at(self) -> int:
        """Where the data of a window begins."""
        return aligned((self.num_flags + self.ranks) * FLAG_BYTES)

    @cached_property
    def window_bytes(self) -> int:
        """From one rank's window to the next."""
        return self.data_at + aligned(self.data_bytes)

    @property
    def total_bytes(self) -> int:
        return self.ranks * self.window_bytes


class SymmetricHeap:
    """One rank's hold on the windows of all."""

    def __init__(
        self, memory: Memory, words: Words, shape: WindowShape, rank: int, waiting: StartWaiting, layer: str = ""
    ) -> None:
        assert memory.num_bytes == shape.total_bytes
        self.rank, self.size, self.shape = rank, shape.ranks, shape
        self.layer = layer
        """Whom it serves now, for errors."""
        self._memory, self._words, self._waiting = memory, words, waiting
        self._barriers, self._is_forked = 0, False
        if memory.is_shared:
            in_child(self, SymmetricHeap._leave_to_parent)
        self.traffic = Traffic()
        """What each operation moved: "put" and "signal" to a window, "get" from one, by its rank."""
        self.notes_at: int | None = None
        """Where the data of every window has room for a note of each rank, `NOTE_BYTES` each; None: nowhere."""
        self.failures_at: int | None = None
        """The flag in which rank 0 reports a failure, those of the other ranks behind it; None: no such flags."""

    def _leave_to_parent(self) -> None:
        """In a forked child: refuse every operation."""
        self._is_forked = True

    def _check(self) -> None:
        if self._is_forked:
            raise CommError(FORKED, rank=self.rank, phase="windows", layer=self.layer)

    is_addressable = True
    """Whether windows of peers are in this process's memory."""

    @property
    def is_concurrent(self) -> bool:
        """Whether peers go on while this rank waits: they are other processes."""
        return self._memory.is_shared

    def address(self, peer: int, at: int = 0) -> int:
        """Address of a byte of a peer's window in this process, for kernels that read and write there.

        Whoever writes reserves before and signals after, and counts its own traffic.
        """
        return self._memory.bytes.data_ptr() + self._data_at(peer) + at

    def flag_address(self, peer: int, flag: int) -> int:
        """Address of a flag of a peer's window in this process, for kernels that raise it or look at it."""
        return self._memory.bytes.data_ptr() + self._flag_at(peer, flag)

    def data(self, peer: int, at: int, num_bytes: int) -> Tensor:
        """Bytes of a peer's window as they lie there, (num_bytes,) uint8. Raises ShapeError beyond its end."""
        self._check()
        if not (0 <= peer < self.size and 0 <= at and at + num_bytes <= self.shape.data_bytes):
            raise ShapeError(
                f"bytes {at} to {at + num_bytes} of rank {peer} are outside of {self.size} windows of "
                f"{self.shape.data_bytes} bytes"
            )
        start = self._data_at(peer) + at
        return self._memory.bytes[start : start + num_bytes]

    def put(self, peer: int, at: int, rows_RB: Tensor, index_X: Tensor | None = None) -> None:
        """Write rows of bytes into a peer's window, one behind the other.

        index_X: only these rows, gathered straight into the window. Raises CommError where memory has run out.
        """
        count = rows_RB.shape[0] if index_X is None else index_X.shape[0]
        width = rows_RB.shape[1]
        there_XB = self.data(peer, at, count * width).view(count, width)
        if not there_XB.numel():
            return
        self.reserve(peer, at, count * width)
        self.traffic.moved("put", peer, count * width, self.rank)
        if index_X is None:
            there_XB.copy_(rows_RB)
        else:
            torch.index_select(rows_RB, 0, index_X, out=there_XB)

    def get(self, peer: int, at: int, num_bytes: int) -> Tensor:
        """Copy bytes out of a peer's window."""
        return self.read(peer, at, num_bytes).clone()

    def read(self, peer: int, at: int, num_bytes: int) -> Tensor:
        """Bytes of a peer's window where they lie, for a caller that reads them once."""
        self.traffic.moved("get", peer, num_bytes, self.rank)
        return self.data(peer, at, num_bytes)

    def signal(self, peer: int, flag: int, epoch: int, count: int = 0) -> None:
        """Store a flag of a peer; everything put before is seen by whoever sees it."""
        self._check()
        self.traffic.moved("signal", peer, WORD_BYTES, self.rank)
        self._words.store(self._flag_at(peer, flag), word_of(epoch, count))

    def put_signal(self, peer: int, at: int, rows_RB: Tensor, flag: int, epoch: int) -> None:
        """`put`, then `signal` with the number of rows."""
        self.put(peer, at, rows_RB)
        self.signal(peer, flag, epoch, rows_RB.shape[0])

    def wait_until(self, flags: Mapping[int, int], epoch: int, phase: str) -> dict[int, int]:
        """Wait until each flag of this window has come to `epoch`; returns the counts by peer.

        flags: the flag that each peer stores. Raises CommError when a peer has ended or is later than the deadline.
        """
        self._check()
        waiting, counts = self._waiting(phase, epoch, self.layer), {}
        load, failures_at = self._words.load, self.failures_at
        for peer, flag in flags.items():
            at = self._flag_at(self.rank, flag)
            failed_at = at if failures_at is None else self._flag_at(self.rank, failures_at + peer)
            while is_behind(word := load(at), epoch) and not is_failure(word):
                # Looked at once more: the peer may have completed this call and failed in its next one.
                if is_failure(load(failed_at)) and is_behind(load(at), epoch):
                    raise self.failure_of(peer, phase)
                waiting.pause(peer)
            if is_failure(word):
                raise self.failure_of(peer, phase)
            counts[peer] = word & COUNT_MASK
        return counts

    def report(self, failure: Failure, flags: Sequence[int]) -> None:
        """Store a failure of this rank in flags of every peer, with a note of the cause where there is room.

        Whoever waits for one of them, now or later and for whichever epoch, ends in CommError. Where the flag is that
        of `failures_at`, so does a wait for any other flag of this rank, unless it was stored before. Never raises.
        """
        text, culprit = failure.report.encode()[: NOTE_BYTES - 8], -1 if failure.culprit is None else failure.culprit
        memory = bytearray(struct.pack("<iI", culprit, len(text)) + text.ljust(NOTE_BYTES - 8))
        note = torch.frombuffer(memory, dtype=torch.uint8)
        for peer in (peer for peer in range(self.size) if peer != self.rank):
            with suppress(MoEMKError):
                if self.notes_at is not None:
                    own = self.data(self.rank, self.notes_at + self.rank * NOTE_BYTES, NOTE_BYTES)
                    own.copy_(note)
                    self.put(peer, self.notes_at + self.rank * NOTE_BYTES, own.view(1, NOTE_BYTES))
            with suppress(MoEMKError):
                for flag in flags:
                    self.signal(peer, flag, 0, FAILED)

    def failure_of(self, peer: int, phase: str) -> CommError:
        culprit, cause = peer, ""
        if self.notes_at is not None:
            note = bytes(self.data(self.rank, self.notes_at + peer * NOTE_BYTES, NOTE_BYTES).numpy())
            named, length = struct.unpack_from("<iI", note)
            cause = note[8 : 8 + min(length, NOTE_BYTES - 8)].decode(errors="replace")
            culprit = named if named >= 0 and cause else peer
        return CommError(cause or NOT_KNOWN, rank=self.rank, phase=phase, layer=self.layer, peer=culprit)

    def quiet(self) -> None:
        """Complete all puts of this rank: copies are done when `put` returns, so this is a fence."""
        self._check()
        self._words.fence()

    def barrier(self, phase: str = "barrier") -> None:
        """Wait for every rank; what any put before is seen by all after. Between processes only."""
        self._barriers += 1
        self.quiet()
        first, others = self.shape.num_flags, [peer for peer in range(self.size) if peer != self.rank]
        for peer in others:
            self.signal(peer, first + self.rank, self._barriers)
        self.wait_until({peer: first + peer for peer in others}, self._barriers, phase)

    def _data_at(self, peer: int) -> int:
        return peer * self.shape.window_bytes + self.shape.data_at

    def _flag_at(self, peer: int, flag: int) -> int:
        assert 0 <= flag < self.shape.num_flags + self.size
        return peer * self.shape.window_bytes + flag * FLAG_BYTES

    def reserve(self, peer: int, at: int, num_bytes: int) -> None:
        """Take the pages of a range before it is written. Raises CommError where memory has run out."""
        self._check()
        try:
            self._memory.reserve(self._data_at(peer) + at, num_bytes)
        except unless_signalled(OSError) as problem:
            text = (
                f"shared memory has no room for {num_bytes} bytes more, {free_bytes()} are free: {problem.strerror}; "
                "enlarge /dev/shm (docker run --shm-size) or bring fewer tokens [kernel.max_num_tokens]"
            )
            raise CommError(text, rank=self.rank, phase="put", layer=self.layer, peer=peer) from problem
