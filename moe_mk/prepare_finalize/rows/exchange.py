"""Exchange of rows with other ranks, and of sums back: each row is copied once on the sender and once on the receiver.

Rows that stay on a rank are copied directly to their place while the others are in flight. Traffic counts are those of
a plain all-to-all, the rank's own rows included.

Rows that are sent are kept in host memory that calls reuse (`Scratch`), from when they are packed until they are
unpacked. Large tensors get new pages from the system every time they are made, and the first access to a page takes far
longer than a copy into mapped pages (20 times as long on the machine of `benchmarks/results`). Memory that is needed
within a call only is therefore kept on the host, up to a limit, for the next call of any layer of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator, offsets
from moe_mk.config.problem import Problem
from moe_mk.flight import Flight
from moe_mk.kernels.native.exchange import ready
from moe_mk.kernels.native.library import Native
from moe_mk.prepare_finalize.packing import SMALL_BYTES, Rows, packed_row_bytes, side_by_side
from moe_mk.prepare_finalize.rows.sums import Part, add_up

KEPT_BYTES = 128 << 20
"""What is kept of one group at most, between calls."""
MAPPED_BYTES = 32 << 20
"""From here on the C library asks the system for every piece (`DEFAULT_MMAP_THRESHOLD_MAX` of glibc on 64 bits)."""


@dataclass(frozen=True)
class Borrowed:
    """Rows to write to, and the memory that holds them."""

    rows: Tensor
    memory: Tensor | None
    """None: not reused."""


@dataclass(eq=False)
class Scratch:
    """Unused pieces of host memory. Concurrent calls use different pieces."""

    free: list[Tensor] = field(default_factory=list)
    """uint8, smallest first."""

    @classmethod
    def of(cls, comm: Communicator) -> Scratch:
        """That of a group: layers over the same groups share it."""
        scratch = comm.kept.setdefault((cls,), cls())
        assert isinstance(scratch, Scratch)
        return scratch

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Borrowed:
        """Uninitialised rows: to be given back when nothing reads or writes them any more, and only then.

        Few bytes are made anew: the allocator of the C library has such pieces at hand.
        """
        wanted = prod(shape) * dtype.itemsize
        if device.type != "cpu" or wanted < SMALL_BYTES:
            return Borrowed(torch.empty(tuple(shape), dtype=dtype, device=device), None)
        enough = next((place for place, memory in enumerate(self.free) if len(memory) >= wanted), None)
        if enough is not None:
            memory = self.free.pop(enough)
        else:
            del self.free[-1:]  # the new one takes its place
            with torch.inference_mode(False):  # else it could not be written outside of that mode
                num_bytes = -(-wanted // SMALL_BYTES) * SMALL_BYTES
                memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return Borrowed(memory[:wanted].view(dtype).view(tuple(shape)), memory)

    def give(self, *borrowed: Borrowed) -> None:
        """Let others use it; beyond the limit the smallest pieces go back to the system."""
        self.free += [each.memory for each in borrowed if each.memory is not None]
        self.free.sort(key=len)
        while sum(map(len, self.free)) > KEPT_BYTES:
            self.free.pop(0)


def kept_bytes(problem: Problem) -> int:
    """The most that a transport over it keeps between calls: what all tokens of a rank take, packed, or the limit."""
    model, kernel = problem.config.model, problem.config.kernel
    if problem.device.kind != "cpu" or problem.ranks == 1:
        return 0
    top_k = problem.config.router.top_k
    copies = min(problem.ranks, top_k) * kernel.max_num_tokens
    return min(KEPT_BYTES, 2 * copies * packed_row_bytes(problem.sums, model.hidden_size, top_k))


def new_rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, native: Native | None) -> Tensor:
    """Uninitialised rows that outlive the call: on large pages, where the kernels can ask for some."""
    rows = torch.empty(shape, dtype=dtype, device=device)
    num_bytes = rows.numel() * rows.element_size()
    if native is not None and device.type == "cpu" and num_bytes >= MAPPED_BYTES:
        native.functions["advise_huge"](rows.data_ptr(), num_bytes)
    return rows


Write = Callable[[Rows, slice], None]
"""Write these of the rows to send, by rank, to a place."""
Counts = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Rows by rank: those counted as sent, those sent, and those received."""


@dataclass(frozen=True)
class ReturnedSums:
    """Sums that have come back: a part from each rank, in rank order, and the memory of those that travelled."""

    parts: list[Part]
    memory: Borrowed


class RowExchange:
    """The exchanges of one rank over one group."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm, self.device, self.scratch = comm, device, Scratch.of(comm)
        self.native: Native | None = ready() if device.type == "cpu" else None

    def dispatch(
        self,
        write: Write,
        widths: tuple[int, int],
        sent: Sequence[int],
        received: Sequence[int],
        phase: str,
        here: str = "",
    ) -> Flight[Rows]:
        """Send the first sent[0] rows to rank 0, ...; return those of all ranks in rank order.

        widths: bytes of the two parts of a row. here: the phase, if it is another one, in which all rows that have
        arrived are counted as traffic of this rank with itself.
        """
        self._count(here, sum(received) * sum(widths))
        if here or not _are_few(sent, received, sum(widths)):
            return (yield from self._dispatch_apart(write, widths, (self._counted(sent, here), sent, received), phase))
        packed_XB = torch.empty((sum(sent), sum(widths)), dtype=torch.uint8, device=self.device)
        write(side_by_side(packed_XB, widths[0]), slice(0, len(packed_XB)))
        arrived_RB = yield from self.comm.all_to_all(packed_XB, sent, received, phase)
        return side_by_side(arrived_RB, widths[0])

    def combine(
        self, y_RH: Tensor, row_X: Tensor, sent: Sequence[int], received: Sequence[int], phase: str, here: str = ""
    ) -> Flight[ReturnedSums]:
        """Send sums back the way their rows came; sent, received: of those rows. row_X: what was sent, rank by rank.

        here: as of `dispatch`. The memory is to be given back when the parts are added up.
        """
        if not here and _are_few(sent, received, y_RH.shape[1] * y_RH.element_size()):
            back_XH = yield from self.comm.all_to_all(y_RH, received, sent, phase)
            parts = zip(torch.split(back_XH, list(sent)), torch.split(row_X, list(sent)), strict=True)
            return ReturnedSums([Part(*each) for each in parts], Borrowed(back_XH, None))
        going, lent = self._for_others(y_RH, received)
        coming = self.take((self._others(sent), y_RH.shape[1]), y_RH.dtype)
        self._count(here, y_RH.numel() * y_RH.element_size())
        yield from self.comm.all_to_others(coming.rows, going, self._counted(received, here), sent, phase)
        self.scratch.give(*lent)
        here_at, me = offsets(received), self.comm.rank
        came = iter(torch.split(coming.rows, [count for rank, count in enumerate(sent) if rank != me]))
        own_XH = y_RH[here_at[me] : here_at[me + 1]]
        rows = [own_XH if rank == me else next(came) for rank in range(len(sent))]
        parts = zip(rows, torch.split(row_X, list(sent)), strict=True)
        return ReturnedSums([Part(*each) for each in parts if len(each[0])], coming)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> Borrowed:
        """Rows to write to, see `Scratch`."""
        return self.scratch.take(shape, dtype, self.device)

    def summed(self, groups: Sequence[Sequence[Part]], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """New rows: see `row_sums.add_up`."""
        return add_up(groups, new_rows(shape, dtype, self.device, self.native), self.native)

    def _dispatch_apart(self, write: Write, widths: tuple[int, int], counts: Counts, phase: str) -> Flight[Rows]:
        """Many bytes: each is copied once on either side, and memory is used again."""
        counted, sent, received = counts
        at, received_at, me = offsets(sent), offsets(received), self.comm.rank
        going, coming = (self.take((self._others(each), sum(widths)), torch.uint8) for each in (sent, received))
        to = side_by_side(going.rows, widths[0])
        write(to[: at[me]], slice(0, at[me]))
        write(to[at[me] :], slice(at[me + 1], at[-1]))
        flight = self.comm.all_to_others(coming.rows, going.rows, counted, received, phase)
        step = next(flight)
        shapes = ((received_at[-1], width) for width in widths)
        arrived = Rows(*(new_rows(shape, torch.uint8, self.device, self.native) for shape in shapes))
        write(arrived[received_at[me] : received_at[me + 1]], slice(at[me], at[me + 1]))
        yield step
        yield from flight
        others = side_by_side(coming.rows, widths[0])
        arrived[: received_at[me]].put(others[: received_at[me]])
        arrived[received_at[me + 1] :].put(others[received_at[me] :])
        self.scratch.give(going, coming)
        return arrived

    def _for_others(self, y_RH: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[Borrowed]]:
        """The rows that are not this rank's own, one behind the other: a view, where it has no others on both sides."""
        at, me = offsets(counts), self.comm.rank
        before, after = y_RH[: at[me]], y_RH[at[me + 1] :]
        if at[me] == 0 or at[me + 1] == at[-1]:
            return (before if at[me] else after).contiguous(), []
        going = self.take((self._others(counts), y_RH.shape[1]), y_RH.dtype)
        torch.cat((before, after), out=going.rows)
        return going.rows, [going]

    def _counted(self, counts: Sequence[int], here: str) -> list[int]:
        """Return the counts of `all_to_others`: without this rank's own rows where those belong to another phase."""
        return [0 if here and rank == self.comm.rank else count for rank, count in enumerate(counts)]

    def _count(self, here: str, num_bytes: int) -> None:
        if here:
            self.comm.traffic.stayed(here, num_bytes, self.comm.rank)

    def _others(self, counts: Sequence[int]) -> int:
        return sum(counts) - counts[self.comm.rank]


def _are_few(sent: Sequence[int], received: Sequence[int], row_bytes: int) -> bool:
    """Whether operations cost more than the bytes of these rows."""
    return (sum(sent) + sum(received)) * row_bytes < SMALL_BYTES
