"""One lane of the one-sided transport: a window on every rank in which one call at a time is under way.

    window of a rank   [ dispatch flag, one a source | combine flag, one a peer |
                         region of source 0 | region of source 1 | ... | sums of W M rows ]
    region             [ values of M rows | tails of M rows: scales, ids, weights ]

Region s is written by rank s alone and read by the owner. Sums are written by the owner alone, in the order of the
received rows, so that experts may write them where they lie; the combine flag tells rank s where its own begin. So
nobody counts for anybody else, and a single window serves call after call:

    a peer writes rows of call e+1 only after this rank's combine flag e, stored when the rows of call e had been read;
    the owner writes sums of call e+1 only after every dispatch flag e+1, stored when the sums of call e had been read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.symmetric import PAGE_BYTES, aligned
from moe_mk.comm.symmetric_setup import open_heap
from moe_mk.errors import CommError
from moe_mk.trace.clock import now


@dataclass(frozen=True)
class RegionShape:
    """Bytes of a row in each part of a region, and how many rows there are at most."""

    rows: int
    value_bytes: int
    tail_bytes: int
    sum_bytes: int

    @property
    def tails_at(self) -> int:
        """Where tails begin."""
        return aligned(self.rows * self.value_bytes, PAGE_BYTES)

    @property
    def region_bytes(self) -> int:
        """From one source to the next."""
        return self.tails_at + aligned(self.rows * self.tail_bytes, PAGE_BYTES)

    def data_bytes(self, ranks: int) -> int:
        """A region for each source, then sums of the rows of all."""
        return ranks * (self.region_bytes + self.rows * self.sum_bytes)


class Lane:
    """The windows of all ranks for one call at a time, and the number of that call."""

    def __init__(self, comm: Communicator, region: RegionShape) -> None:
        self.region, self.epoch, self.busy = region, 0, False
        self._heap = open_heap(comm, 2 * comm.size, region.data_bytes(comm.size), now)
        # Not the communicator itself: it keeps this lane, and a circle of the two would keep its group from ending.
        self._rank, self._size, self._sums_at = comm.rank, comm.size, comm.size * region.region_bytes
        self.peers = [peer for peer in range(comm.size) if peer != comm.rank]

    def serve(self, layer: str) -> None:
        """Begin the next call."""
        self.busy, self.epoch, self._heap.layer = True, self.epoch + 1, layer

    def send_rows(self, peer: int, values_TB: Tensor, token_X: Tensor, tails_XB: Tensor) -> None:
        """Write rows into this rank's region at a peer. Rows of `values_TB` are gathered on the way."""
        at, everything = self._region(self._rank), token_X.shape[0] == values_TB.shape[0]
        self._heap.put(peer, at, values_TB, None if everything else token_X)  # token_X ascends, each token once
        self._heap.put(peer, at + self.region.tails_at, tails_XB)
        self._heap.signal(peer, self._rank, self.epoch, token_X.shape[0])

    def await_rows(self) -> dict[int, int]:
        """Wait until every peer has written; returns how many rows each did."""
        counts = self._heap.wait_until({peer: peer for peer in self.peers}, self.epoch, "dispatch")
        for peer, count in counts.items():
            if count > self.region.rows:
                text = f"epoch {self.epoch}: sent {count} rows into a region of {self.region.rows}"
                raise CommError(text, rank=self._rank, phase="dispatch", peer=peer)
        return counts

    def rows_from(self, peer: int, count: int) -> tuple[Tensor, Tensor]:
        """Values and tails that a peer has written, as they lie in the window."""
        r, at = self.region, self._region(peer)
        values = self._heap.data(self._rank, at, count * r.value_bytes)
        tails = self._heap.data(self._rank, at + r.tails_at, count * r.tail_bytes)
        return values.view(count, r.value_bytes), tails.view(count, r.tail_bytes)

    def own_sums(self, count: int) -> Tensor:
        """Where this rank's sums of all received rows go, (count, bytes of a sum), with pages of their own."""
        num_bytes = count * self.region.sum_bytes
        self._heap.reserve(self._rank, self._sums_at, num_bytes)
        return self._heap.data(self._rank, self._sums_at, num_bytes).view(count, self.region.sum_bytes)

    def show_sums(self, peer: int, first: int) -> None:
        """Tell a peer that the sums of its rows are there, from number `first` on."""
        self._heap.signal(peer, self._size + self._rank, self.epoch, first)

    def await_sums(self) -> dict[int, int]:
        """Wait until every peer has its sums ready; returns the number of the first one for this rank."""
        return self._heap.wait_until({peer: self._size + peer for peer in self.peers}, self.epoch, "combine")

    def sums_at(self, peer: int, first: int, count: int) -> Tensor:
        """The sums that a peer has for this rank, as they lie in its window."""
        width = self.region.sum_bytes
        return self._heap.read(peer, self._sums_at + first * width, count * width).view(count, width)

    def _region(self, source: int) -> int:
        return source * self.region.region_bytes


class Lanes:
    """As many lanes as calls are under way at once; made when first needed, by every rank at the same call.

    The communicator keeps them (`Communicator.kept`): layers of one model, given the same groups, share one set as long
    as their rows have the same geometry. Each call has a lane of its own until it is finalized, whosesoever it is.
    """

    MOST = 16

    def __init__(self, region: RegionShape) -> None:
        self._region = region
        self._lanes: list[Lane] = []
        self._failure = ""

    @classmethod
    def of(cls, comm: Communicator, region: RegionShape) -> Lanes:
        """Those that are kept over a group for rows of this geometry; new ones if there are none, or none that work."""
        kept = comm.kept.get((cls, region))
        if not isinstance(kept, cls) or kept._failure:
            comm.kept[cls, region] = kept = cls(region)
        return kept

    def take(self, comm: Communicator) -> Lane:
        """The first idle lane, at its next epoch; the layer that `comm` belongs to is named in errors.

        Raises CommError after a failure, or with too many calls open.
        """
        if self._failure:
            text = f"an earlier call failed, so ranks no longer agree on a call: build the layer anew ({self._failure})"
            raise CommError(text, rank=comm.rank, phase="dispatch", layer=comm.layer)
        lane = next((lane for lane in self._lanes if not lane.busy), None) or self._new(comm)
        lane.serve(comm.layer)
        return lane

    def failed(self, error: BaseException) -> None:
        """Refuse every further call."""
        self._failure = self._failure or str(error)

    def _new(self, comm: Communicator) -> Lane:
        if len(self._lanes) == self.MOST:
            text = f"{self.MOST} calls were prepared and not finalized; finalize each before the next"
            raise CommError(text, rank=comm.rank, phase="dispatch", layer=comm.layer)
        self._lanes.append(Lane(comm, self._region))
        return self._lanes[-1]
