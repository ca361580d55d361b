"""Collectives of one rank over its group: rows to and from every peer, with sizes that differ and may be zero.

Rows are tensors of shape (rows, X). Every collective is a flight: posted, in flight, complete. `Communicator` is the
interface; `single`, `distributed` and `lockstep` implement it. Failures end in CommError with rank, phase and layer,
never in a hang.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from threading import RLock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_mk.comm.failure import (
    ANOTHER_THREAD,
    FRAMES,
    RECOVERED,
    AbortOnError,
    Changes,
    Exclusive,
    Failure,
    GroupResource,
    GroupStatus,
)  # fmt: skip
from moe_mk.comm.header import Arrival, Envelope
from moe_mk.comm.traffic import Traffic
from moe_mk.errors import CommError, ConfigError, MoEMKError, Suppress, UnsupportedError
from moe_mk.flight import Flight, InFlight, wait

if TYPE_CHECKING:
    from _thread import RLock as Lock


class Communicator(ABC):
    """One rank's view of one group."""

    rank: int
    size: int
    layer: str = ""
    """Name of the layer that this view belongs to, for errors."""
    eager_bytes: int = 0
    """Rows for one rank that `swap_eager` can send with their count, in bytes; 0: counts are exchanged first."""
    layer_number: int = 0
    """The same on all ranks. Messages and flags contain it, so that calls of two layers cannot be confused.
    0: not numbered."""

    def __init__(self, kept: dict[Hashable, object] | None = None, status: GroupStatus | None = None) -> None:
        """kept: resources that transports keep open over the group, by key; views that share it share windows.

        status: of the group, for all its views.
        """
        self.traffic = Traffic()
        self.kept: dict[Hashable, object] = {} if kept is None else kept
        self.status = GroupStatus() if status is None else status
        self.lock: Lock = RLock()
        """Held by the thread that runs a step of a call over the group, and released between two steps."""

    @property
    def changes(self) -> Changes:
        """Votes of the group as known to this rank, see `CallGroups.decide`; the same for all its views."""
        return self.status.changes

    def check(self, phase: str) -> None:
        """Raise CommError if an earlier call over this group failed."""
        if self.status.failure is not None:
            self.status.check(self.rank, phase, self.layer)

    def check_epoch(self, epoch: int, phase: str) -> None:
        """Raise CommError if the ranks have recovered since a call began. epoch: `status.epoch` as it was then."""
        if self.status.epoch != epoch:
            raise CommError(RECOVERED, rank=self.rank, phase=phase, layer=self.layer, on_all_ranks=True)

    def fail(self, error: BaseException, epoch: int | None = None) -> None:
        """End the calls of all ranks over this group: report an exception of this rank to its peers. Never raises.

        Later calls are refused with the first cause, until `recover`. A note is added to the exception.
        An exception that all ranks raise need not be reported. epoch: `status.epoch` when the call began; one that
        began before a recovery has ended with it, and a process that ends can send nothing.
        """
        status = self.status
        if self.size == 1 or (status.failure is not None and status.is_reported) or sys.is_finalizing():
            return
        if epoch is not None and epoch != status.epoch:
            return
        if isinstance(error, MoEMKError) and error.harmless_to_peers:
            return
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + FRAMES)
        try:
            failure = status.failure or Failure.of(error, self.rank)
            self._end_calls(failure)
        finally:
            sys.setrecursionlimit(limit)
        if failure.here and isinstance(error, Exception) and not hasattr(error, "__notes__"):
            error.add_note(
                f"rank {self.rank} reported this to its {self.size - 1} peers, whose calls end in CommError; further "
                "calls over the group are refused until recover() of the layer is called on every rank"
            )

    def _end_calls(self, failure: Failure) -> None:
        self.status.failure, self.status.is_reported = failure, False
        reports, sent = (self._report, *(resource.abort for resource in list(self.status.resources))), 0
        for report in reports:
            with Suppress(Exception):  # memory that one of them lacks keeps the others from nothing
                report(failure)
                sent += 1
        self.status.is_reported = sent == len(reports)  # else the next error of this call, or `recover`, reports it

    def abort_on_error(self, *, drops: bool = True) -> AbortOnError:
        """A context that reports exceptions raised inside to the peers, see `fail`.

        drops: whether a flight that is closed or dropped inside is one. A collective alone is not reported: whoever
        made the call that it belongs to does so, and what peers have sent for it is discarded.
        """
        return AbortOnError(self.fail, self.status.epoch, drops=drops)

    def another_thread(self, phase: str) -> CommError:
        """The error of a step that finds `lock` held by another thread."""
        return CommError(ANOTHER_THREAD, rank=self.rank, phase=phase, layer=self.layer)

    def exclusive(self, phase: str) -> Exclusive:
        """A context that holds `lock` for one step. Raises CommError if another thread does."""
        return Exclusive(self.lock, lambda: self.another_thread(phase))

    def keep(self, resource: GroupResource) -> None:
        """Abort and reopen a resource with the group. Only a weak reference is kept."""
        self.status.resources.add(resource)

    def recover(self, number: int = 0) -> Flight[int]:
        """Continue after a failed call. All ranks call it; messages of earlier calls are never received.

        number: of this rank, at least 0; returns the largest one of all ranks. After an interrupt it is called again on
        this rank, whether or not the others have ended theirs; the same on ranks that raise CommError for it.

        A rank without a failed call, such as one that was interrupted right before its call began, reports that to its
        peers, which may be waiting for it in theirs.

        Raises CommError where connections are gone with a rank that is dead or was late, and UnsupportedError where
        something that is kept open over the group cannot start over: both need a new group.
        """
        if self.size == 1:
            return number
        status = self.status
        while self.lock._is_owned():  # type: ignore[attr-defined]  # by a step that had no frame left to release it
            self.lock.release()
        if status.failure is None or not status.is_reported:
            text = "recover() was called, and no call had failed on this rank"
            self._end_calls(status.failure or Failure(text, self.rank, here=True))
        largest = yield from self._recover(number)
        for resource in list(status.resources):
            resource.reopen()
        status.failure, status.epoch = None, self._epoch()
        return largest

    def fail_recovery(self, error: BaseException) -> None:
        """End the recovery of all ranks that wait for this one in it; they may call it again. Never raises."""
        del error

    def without(self, ranks: Collection[int]) -> Flight[Communicator]:
        """A group of the remaining ranks when some have died, over the same connections.

        ranks: of this view. All others call it with the same ones, which is checked. The new view numbers them in the
        same order and keeps nothing open yet; this view serves no more. Raises CommError if the ranks that are left
        name others, or if connections are gone with a rank that was late; UnsupportedError for groups that cannot.
        """
        raise UnsupportedError(
            f"a {type(self).__name__} cannot go on without ranks {sorted(ranks)}", ["build the layer over a new group"]
        )

    def number_layer(self) -> None:
        """Give this view the next layer number of the group; all ranks number their layers in the same order.

        Numbers begin anew with every recovery. Not needed where all ranks are advanced by one thread.
        """
        self.layer_number = 0

    def check_counts(self, counts: Sequence[int], most: int, phase: str) -> None:
        """Raise CommError naming the first rank whose count is out of range: below zero or above `most`.

        For counts that peers have sent, before anything is allocated by them.
        """
        for peer, count in enumerate(counts):
            if not 0 <= count <= most:
                text = f"announced {count} rows, at most {most} can come from a rank [kernel.max_num_tokens]"
                raise CommError(text, rank=self.rank, phase=phase, layer=self.layer, peer=peer)

    def check_ids(self, ids_RK: Tensor, counts: Sequence[int], limit: int, what: str, phase: str) -> None:
        """Raise CommError naming the first rank that sent a row with an id that does not exist; -1 is no assignment.

        ids_RK: integers, of rows in the order of ranks. counts: rows by rank, over again for each further piece.
        limit: ids are below it. what: they number, such as slots. Checked on the host alone: elsewhere it would wait.
        """
        if ids_RK.device.type != "cpu" or not ids_RK.numel():
            return
        lowest, highest = torch.aminmax(ids_RK)
        if lowest.item() >= -1 and highest.item() < limit:
            return
        row, k = torch.nonzero((ids_RK < -1) | (ids_RK >= limit))[0].tolist()
        value, piece = int(ids_RK[row, k]), 0
        while row >= counts[piece]:
            row, piece = row - counts[piece], piece + 1
        text = f"row {row} is for {what} {value}, out of range (0 <= {what} < {limit}, or -1 for no assignment)"
        raise CommError(text, rank=self.rank, phase=phase, layer=self.layer, peer=piece % self.size)

    def _report(self, failure: Failure) -> None:
        """Send a failure of this rank to all peers. Never raises, never waits. By default it uses the shared status."""
        del failure

    def _recover(self, number: int) -> Flight[int]:
        """Agree with the other ranks to start over; returns the largest number."""
        yield InFlight("recovery")
        return number

    def _epoch(self) -> int:
        """The number of recoveries so far, this one included."""
        return self.status.epoch + 1

    @abstractmethod
    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        """Send the first send[0] rows to rank 0, the next to rank 1, ...; return theirs in rank order."""

    def all_to_others(
        self, received: Tensor, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str
    ) -> Flight[None]:
        """`all_to_all` into existing rows, without the rows that stay on this rank: the caller copies them.

        send and receive are those of `all_to_all`; received and rows are dense and hold what is from and for others
        alone. What stays is counted as traffic with itself, as if it had come this way.
        """
        self._count_stayed(phase, rows, send[self.rank])
        received.copy_((yield from self.all_to_all(rows, self._to_others(send), self._to_others(receive), phase)))

    @abstractmethod
    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """Gather the rows of all ranks in rank order. counts[r]: rows of rank r."""

    @abstractmethod
    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        """Sum over the group; x is left as it was."""

    def library_group(self) -> object:
        """The group that a communication library is given: the process group, or its equivalent for threads.

        Raises ConfigError for ranks of one thread, where a library call would never return.
        """
        raise ConfigError(f"{type(self).__name__} has no group for a communication library")

    def reduce_scatter(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """Sum the rows of all ranks and return this rank's part of counts[rank] rows.

        Peers are added in rank order in f32 and rounded once, so the result does not depend on arrival or dtype.
        """
        mine = counts[self.rank]
        parts = yield from self.all_to_all(rows, counts, [mine] * self.size, phase)
        return sum_in_order(parts.view(self.size, mine, *rows.shape[1:]).unbind())

    def exchange_counts(self, counts: Sequence[int], phase: str) -> Flight[list[int]]:
        """Exchange row counts: counts[r] goes to rank r; returns the number of rows that each rank will send."""
        ones = [1] * self.size
        mine = torch.tensor(counts, dtype=torch.int64, device="cpu").view(self.size, 1)
        theirs = yield from self.all_to_all(mine, ones, ones, phase)
        return [int(count) for count in theirs.flatten().tolist()]

    def swap_eager(
        self, outgoing: Mapping[int, Envelope], awaited: Mapping[int, int], phase: str
    ) -> Flight[dict[int, Arrival]]:
        """Exchange counts and rows with peers in one step; of groups with `eager_bytes` only.

        outgoing: host memory by peer, at most `eager_bytes` of rows each, not to be written to afterwards. awaited:
        the bytes from each, or ANY for as many as it sends. Counts are as announced: check them. The memory of what
        arrives is to be given back with `give_back`, if at all. Nothing is counted as traffic.
        """
        raise NotImplementedError(f"{type(self).__name__} sends counts before rows")

    def swap_now(
        self,
        outgoing: Mapping[int, Envelope],
        awaited: Mapping[int, int],
        phase: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, Arrival]:
        """`swap_eager` from beginning to end. meanwhile: called while messages are on their way."""
        flight = self.swap_eager(outgoing, awaited, phase)
        if meanwhile is not None:
            next(flight)
            meanwhile()
        return wait(flight)

    def give_back(self, arrivals: Iterable[Arrival]) -> None:
        """Use the memory of rows from `swap_eager` again."""
        del arrivals

    def skip(self, phase: str) -> Flight[None]:
        """The step of an exchange in which this rank neither sends nor receives anything, while others may."""
        self.check(phase)
        yield InFlight(phase)

    def gather_count(self, count: int, phase: str) -> Flight[list[int]]:
        """Gather one number of each rank."""
        return (yield from self.exchange_counts([count] * self.size, phase))

    def gather_texts(self, text: str, phase: str) -> Flight[list[str]]:
        """Gather a text of each rank."""
        data = text.encode()
        counts = yield from self.gather_count(len(data), phase)
        column = torch.tensor(list(data), dtype=torch.uint8, device="cpu").view(-1, 1)
        everything = bytes((yield from self.all_gather(column, counts, phase)).flatten().tolist())
        return [everything[start:end].decode() for start, end in pairwise(offsets(counts))]

    def _count_sent(self, phase: str, rows: Tensor, send: Sequence[int]) -> None:
        row = rows.element_size() * prod(rows.shape[1:])
        self.traffic.sent(phase, [row * count for count in send], self.rank)

    def _count_stayed(self, phase: str, rows: Tensor, count: int) -> None:
        self.traffic.stayed(phase, count * rows.element_size() * prod(rows.shape[1:]), self.rank)

    def _to_others(self, counts: Sequence[int]) -> list[int]:
        return [0 if peer == self.rank else count for peer, count in enumerate(counts)]

    def _count_reduced(self, phase: str, x: Tensor) -> None:
        """Count an all-reduce: each rank adds up its part of the tensor and sends it to all, in `summing_dtype`."""
        parts, width = even_parts(x.numel(), self.size), summing_dtype(x.dtype).itemsize
        mine = parts[self.rank]
        sent = [0 if peer == self.rank else (part + mine) * width for peer, part in enumerate(parts)]
        self.traffic.sent(phase, sent, self.rank)


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: f32 for 16-bit floats, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Add the parts of ranks 0, 1, ... in order, with the same result on every device; rounded once at the end."""
    total = parts[0].to(summing_dtype(parts[0].dtype), copy=True)
    return add_in_order(total, ((part, None) for part in parts[1:])).to(parts[0].dtype)


def add_in_order(total: Tensor, parts: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Add parts to `total` in place, one after the other, so that equal inputs give equal bits on every device.

    parts: rows, and for each the row of `total` that it is added to (int64, each at most once); None: all in order.
    """
    for rows, row_X in parts:
        if row_X is None:
            total += rows
        else:
            total[row_X] += rows
    return total


def even_parts(count: int, ranks: int) -> list[int]:
    """`count` divided over ranks, as evenly as possible: parts differ by at most one."""
    return [count * (rank + 1) // ranks - count * rank // ranks for rank in range(ranks)]


def offsets(counts: Sequence[int]) -> list[int]:
    """Where each part starts, and where the last one ends: [0, c0, c0 + c1, ...]."""
    return [0, *accumulate(counts)]
