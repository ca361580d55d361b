"""Windows of the one-sided transport: their layout, the flags of one call at a time, and the pool that layers share.

A source writes its values, its tails and its flag; the owner of the window reads them. The owner writes sums, in the
order of the received rows, so experts may write them in place; the combine flag contains the position of the first sum
of the peer. No rank counts for another, and one window serves consecutive calls:

    a peer writes rows of call e+1 only after this rank's combine flag e, stored when its experts were done with call e;
    the owner writes sums of call e+1 only after every dispatch flag e+1, stored when the sums of call e had been read.

Rows that experts read stay in the window until their call is finalized. Every rank derives the layout from
`RegionShape`:

    data of a window   [ the rows as experts read them, W M of values | values of W - 2 sources, M each |
                         tails of W sources: scales, ids, weights | sums of W M rows | notes of W ranks ]

Experts read received rows in rank order without gaps, and the number of rows of a source is known only on arrival. The
owner and one neighbour (the next rank; the previous one for the last rank) do not need to know it: the rows of the
lower of the two end at a seam, and those of the higher begin there. Both write where experts read. The rows of other
sources go to a region of their own and are copied next to these; with two ranks nothing is copied.

    owner 1 of 4                      seam
    ... [ rows of 0, copied | own rows | rows of 2 | rows of 3, copied ] ...
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.comm.failure import Failure
from moe_mk.comm.symmetric.heap import NOTE_BYTES, PAGE_BYTES, SymmetricHeap, aligned
from moe_mk.comm.symmetric.setup import PHASE, open_heap
from moe_mk.flight import wait
from moe_mk.kernels.native import exchange
from moe_mk.kernels.native.exchange import Exchange, FaultKind, PeerFault, WindowPlaces
from moe_mk.prepare_finalize.buffer_pool import BufferPool, BufferSlot
from moe_mk.trace.clock import now


@dataclass(frozen=True)
class RegionShape:
    """Bytes of a row in each part of a window, and how many rows a source brings at most."""

    rows: int
    value_bytes: int
    tail_bytes: int
    sum_bytes: int

    def data_bytes(self, ranks: int) -> int:
        return self.notes_at(ranks) + ranks * NOTE_BYTES

    def notes_at(self, ranks: int) -> int:
        """Where a rank that fails writes the cause, in every window."""
        return aligned(self.sums_at(ranks) + ranks * self.rows * self.sum_bytes, NOTE_BYTES)

    def values_at(self, ranks: int, owner: int, source: int, count: int) -> int:
        """Where a source writes the values of `count` rows in the window of `owner`."""
        at, back = self.place(ranks, owner, source)
        return at - count * back

    def place(self, ranks: int, owner: int, source: int) -> tuple[int, int]:
        """Where a source writes in the window of `owner`, and how many bytes it goes back for every row it brings."""
        left = lower_of_pair(ranks, owner)
        if source in (left, left + 1):
            return self.seam_at(ranks, owner), self.value_bytes if source == left else 0
        number = source if source < left else source - 2
        return self._apart_at(ranks) + number * self._region(self.value_bytes), 0

    def tails_at(self, ranks: int, source: int) -> int:
        """Where a source writes the tails of its rows, in every window."""
        apart = max(ranks - 2, 0) * self._region(self.value_bytes)
        return self._apart_at(ranks) + apart + source * self._region(self.tail_bytes)

    def sums_at(self, ranks: int) -> int:
        """Where the owner has its sums, of all received rows one behind the other."""
        return self.tails_at(ranks, ranks)

    def rows_at(self, ranks: int, owner: int, counts: Sequence[int]) -> int:
        """Where the rows of all sources begin in the window of `owner`, once their counts are known."""
        before = sum(counts[: lower_of_pair(ranks, owner) + 1])
        return self.seam_at(ranks, owner) - before * self.value_bytes

    def seam_at(self, ranks: int, owner: int) -> int:
        """Where rows end that were written backwards, and those behind them begin."""
        return (lower_of_pair(ranks, owner) + 1) * self.rows * self.value_bytes

    def _apart_at(self, ranks: int) -> int:
        return aligned(ranks * self.rows * self.value_bytes, PAGE_BYTES)

    def _region(self, row_bytes: int) -> int:
        return aligned(self.rows * row_bytes, PAGE_BYTES)


def lower_of_pair(ranks: int, owner: int) -> int:
    """The lower of the two ranks whose rows meet at the seam of an owner's window; the other is the next rank."""
    return min(owner, ranks - 2)


# The count of a flag: 24 bits of rows, and above them the number of the layer, below what reports a failure.
LAYER_AT, LAYERS = 24, 255
COUNT_MASK = (1 << LAYER_AT) - 1
FLAGS_OF_RANK = 3
"""For rows, for sums, and for a failure: a peer that has not read the flag of a call still finds it there."""
PATIENCE_US = 1000
"""How long a native wait polls flags before the heap's own wait, which checks deadlines and dead peers."""


class OneSidedBufferSlot(BufferSlot):
    """The windows of all ranks for one call at a time, and the number of that call."""

    def __init__(self, comm: Communicator, region: RegionShape) -> None:
        self.region, self.epoch = region, 0
        self.heap = self._open(comm)
        # Not the communicator itself: it keeps this buffer, and a reference cycle would keep its group alive.
        self.rank, self.size, self.sums_at = comm.rank, comm.size, region.sums_at(comm.size)
        self.peers = [peer for peer in range(comm.size) if peer != comm.rank]
        self.sums_RB = self._own_rows(self.sums_at, region.sum_bytes)
        self.values_RB = self._own_rows(0, region.value_bytes)
        """As many as the own window has room for, with and without pages."""
        self.left = lower_of_pair(comm.size, comm.rank)
        self.seam_row = region.seam_at(comm.size, comm.rank) // region.value_bytes
        """The rows up to those of rank `left` end there, the others begin there."""
        self._taken: dict[Hashable, int] = {}
        self.sums_with_pages = 0
        """Sums of this rank's window that have memory, from the first on."""
        ranks = range(comm.size)
        self._out = [region.place(comm.size, owner, comm.rank) for owner in ranks]
        self._in = [region.place(comm.size, comm.rank, source) for source in ranks]
        self.tails_at = [region.tails_at(comm.size, source) for source in ranks]
        """Where each source writes tails in every window."""
        kernels = exchange.ready() if self.heap.is_addressable else None
        self.exchange = None if kernels is None else Exchange(kernels, self._places())
        """Kernels that write into windows themselves; None: rows are put."""
        self.patience_us = PATIENCE_US if self.exchange is not None and self.heap.is_concurrent else 0
        self.is_fusable = self.patience_us > 0
        """Whether one native call may wait for peers: they are other processes, and kernels write into windows."""
        self.heap.notes_at, self.heap.failures_at = region.notes_at(comm.size), 2 * comm.size
        self._layer_bits = 0
        if self.exchange is not None:
            self.exchange.failure_of = self.heap.failure_of

    def _open(self, comm: Communicator) -> SymmetricHeap:
        flags, notes_bytes = FLAGS_OF_RANK * comm.size, comm.size * NOTE_BYTES
        return open_heap(comm, flags, self.region.data_bytes(comm.size), now, notes_bytes=notes_bytes)

    def serve(self, comm: Communicator) -> None:
        """Begin the next call; errors name the layer that `comm` belongs to."""
        layer, number = comm.layer, comm.layer_number % LAYERS
        self.epoch, self.heap.layer = self.epoch + 1, layer
        self._layer_bits = number << LAYER_AT
        if self.exchange is not None:
            self.exchange.layer, self.exchange.block.layer = layer, number  # every flag has the number

    def out_at(self, owner: int, count: int) -> int:
        """Where this rank writes the values of its rows in an owner's window."""
        at, back = self._out[owner]
        return at - count * back

    def show_rows(self, peer: int, count: int) -> None:
        """Signal a peer that its rows are written, with their number."""
        self.heap.signal(peer, self.rank, self.epoch, self._layer_bits | count)

    def await_rows(self) -> dict[int, int]:
        """Wait until every peer has written; returns how many rows each did.

        Raises CommError for more rows than there is room for.
        """
        return self._await(FaultKind.TOO_MANY_ROWS, first_flag=0, phase="dispatch", limit=self.region.rows)

    def check_slots(self, ids_RK: Tensor, received_W: Sequence[int], num_slots: int) -> None:
        """Raise CommError for the first received row of a slot that this rank does not have; -1 is none."""
        out_RK = (ids_RK < -1) | (ids_RK >= num_slots)
        if not out_RK.any():
            return
        row, k = torch.nonzero(out_RK)[0].tolist()
        source, value = 0, int(ids_RK[row, k])
        while row >= received_W[source]:
            row, source = row - received_W[source], source + 1
        fault = PeerFault(FaultKind.NO_SUCH_SLOT, source, value, num_slots, row)
        raise fault.error(self.rank, self.epoch, self.heap.layer)

    def own_values(self, at: int, count: int) -> Tensor:
        """Values in this rank's window, (count, bytes of values), with pages of their own."""
        num_bytes = count * self.region.value_bytes
        self.heap.reserve(self.rank, at, num_bytes)
        return self.heap.data(self.rank, at, num_bytes).view(count, self.region.value_bytes)

    def own_tails(self, source: int, count: int) -> Tensor:
        """Tails in this rank's window as a source wrote them."""
        num_bytes = count * self.region.tail_bytes
        return self.heap.data(self.rank, self.tails_at[source], num_bytes).view(count, self.region.tail_bytes)

    def show_sums(self, peer: int, first: int) -> None:
        """Signal a peer that the sums of its rows are written, from number `first` on."""
        self.heap.signal(peer, self.size + self.rank, self.epoch, self._layer_bits | first)

    def await_sums(self) -> dict[int, int]:
        """Wait until every peer has its sums ready; returns the number of the first one for this rank.

        Raises CommError for a number beyond the sums that ranks before this one can have there.
        """
        limit = self.rank * self.region.rows
        return self._await(FaultKind.SUMS_BEYOND, first_flag=self.size, phase="combine", limit=limit)

    def sums_of(self, peer: int, first: int, count: int) -> Tensor:
        """The sums that a peer has for this rank, a view of its window."""
        width = self.region.sum_bytes
        return self.heap.read(peer, self.sums_at + first * width, count * width).view(count, width)

    def take_pages(self, what: Hashable, owner: int, at: int, num_bytes: int) -> None:
        """Reserve a range that grows with its calls; nothing to do where an earlier call needed as much."""
        if num_bytes > self._taken.get(what, 0):
            self.heap.reserve(owner, at, num_bytes)
            self._taken[what] = num_bytes

    def take_pages_of_sums(self, count: int) -> None:
        """Reserve memory for this many sums in this rank's window."""
        self.take_pages("sums", self.rank, self.sums_at, count * self.region.sum_bytes)
        self.sums_with_pages = max(self.sums_with_pages, count)

    def take_pages_around_seam(self, first: int, end: int) -> None:
        """Reserve the rows from one number to before another in this rank's window."""
        width, seam = self.region.value_bytes, self.seam_row
        self.take_pages("below", self.rank, first * width, (seam - first) * width)
        self.take_pages("above", self.rank, seam * width, (end - seam) * width)

    def make_room(self, counts: Sequence[int]) -> None:
        """Take the pages of so many rows of this rank at each rank, for kernels."""
        assert self.exchange is not None
        region, tails_at = self.region, self.tails_at[self.rank]
        for rank, count in enumerate(counts):
            if count > self.exchange.room[rank]:
                self.heap.reserve(rank, self.out_at(rank, count), count * region.value_bytes)
                self.heap.reserve(rank, tails_at, count * region.tail_bytes)
                self.exchange.room[rank] = count

    def _await(self, kind: FaultKind, *, first_flag: int, phase: str, limit: int) -> dict[int, int]:
        found = self.heap.wait_until({peer: first_flag + peer for peer in self.peers}, self.epoch, phase)
        for peer, word in found.items():
            if word & ~COUNT_MASK != self._layer_bits:
                fault = PeerFault(FaultKind.OTHER_LAYER, peer, word >> LAYER_AT, self._layer_bits >> LAYER_AT)
                raise fault.error(self.rank, self.epoch, self.heap.layer, phase)
            if (value := word & COUNT_MASK) > limit:
                raise PeerFault(kind, peer, value, limit).error(self.rank, self.epoch, self.heap.layer)
        return {peer: word & COUNT_MASK for peer, word in found.items()}

    def _own_rows(self, at: int, width: int) -> Tensor:
        rows = self.size * self.region.rows
        return self.heap.data(self.rank, at, rows * width).view(rows, width)

    def _places(self) -> WindowPlaces:
        heap, ranks, me = self.heap, range(self.size), self.rank
        flags_to = [0 if r == me else heap.flag_address(r, first + me) for first in (0, self.size) for r in ranks]
        flags_from = [0 if r == me else heap.flag_address(me, first + r) for first in (0, self.size) for r in ranks]
        return WindowPlaces(
            rank=me,
            values_to=[heap.address(rank, at) for rank, (at, _) in zip(ranks, self._out, strict=True)],
            back_to=[back for _, back in self._out],
            tails_to=[heap.address(rank, self.tails_at[me]) for rank in ranks],
            flags_to=flags_to,
            values_from=[heap.address(me, at) for at, _ in self._in],
            back_from=[back for _, back in self._in],
            tails_from=[heap.address(me, at) for at in self.tails_at],
            flags_from=flags_from,
            sums=[heap.address(rank, self.sums_at) for rank in ranks],
            most_rows=self.region.rows,
            failed_from=[0 if r == me else heap.flag_address(me, 2 * self.size + r) for r in ranks],
        )


class OneSidedBufferPool(BufferPool[OneSidedBufferSlot]):
    """The windows that layers of a group share. geometry: `RegionShape`."""

    MAX_OPEN_CALLS = 16
    slot: ClassVar[type[OneSidedBufferSlot]] = OneSidedBufferSlot
    geometry: RegionShape

    def abort(self, failure: Failure) -> None:
        """Report the failure to peers in every slot, whichever call they are in."""
        for buffer in self.slots:
            buffer.heap.report(failure, [2 * buffer.size + buffer.rank])

    def add(
        self, comm: Communicator, phase: str, make: Callable[[], OneSidedBufferSlot] | None = None
    ) -> OneSidedBufferSlot:
        """As `BufferPool.add`; no rank uses the slot before all have it, since `abort` reports in those it has."""
        slot = super().add(comm, phase, make)
        if isinstance(comm, DistributedCommunicator):
            wait(comm.gather_count(0, PHASE))
        return slot

    def _make(self, comm: Communicator) -> OneSidedBufferSlot:
        with torch.inference_mode(False):  # else experts could not write sums there outside of that mode
            return self.slot(comm, self.geometry)
