"""One lane of the one-sided transport: a window on every rank in which one call at a time is under way.

    window of a rank   [ dispatch flag, one a source | combine flag, one a peer |
                         region of source 0 | region of source 1 | ... ]
    region             [ values of M rows | tails of M rows: scales, ids, weights | sums of M rows ]

Values and tails of region s are written by rank s alone and read by the owner; sums are written by the owner alone and
read by rank s. So nobody counts for anybody else, and a single window serves call after call:

    a peer writes rows of call e+1 only after this rank's combine flag e, stored when the rows of call e had been read;
    the owner writes sums of call e+1 only after every dispatch flag e+1, stored when the sums of call e had been read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.symmetric import PAGE_BYTES, aligned
from moe_mk.comm.symmetric_setup import open_heap
from moe_mk.comm.symmetric_words import WORD_BYTES
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
    def sums_at(self) -> int:
        """Where sums begin."""
        return self.tails_at + aligned(self.rows * self.tail_bytes, PAGE_BYTES)

    @property
    def region_bytes(self) -> int:
        """From one source to the next."""
        return self.sums_at + aligned(self.rows * self.sum_bytes, PAGE_BYTES)


class Lane:
    """The windows of all ranks for one call at a time, and the number of that call."""

    def __init__(self, comm: Communicator, region: RegionShape) -> None:
        self.region, self.epoch, self.busy = region, 0, False
        self._heap = open_heap(comm, 2 * comm.size, comm.size * region.region_bytes, now)
        self._comm = comm
        self.peers = [peer for peer in range(comm.size) if peer != comm.rank]

    def send_rows(self, peer: int, values_TB: Tensor, token_X: Tensor, tails_XB: Tensor) -> None:
        """Write rows into this rank's region at a peer. Rows of `values_TB` are gathered on the way."""
        at, everything = self._region(self._comm.rank), token_X.shape[0] == values_TB.shape[0]
        self._heap.put(peer, at, values_TB, None if everything else token_X)  # token_X ascends, each token once
        self._heap.put(peer, at + self.region.tails_at, tails_XB)
        self._heap.signal(peer, self._comm.rank, self.epoch, token_X.shape[0])

    def await_rows(self) -> dict[int, int]:
        """Wait until every peer has written; returns how many rows each did."""
        counts = self._heap.wait_until({peer: peer for peer in self.peers}, self.epoch, "dispatch")
        for peer, count in counts.items():
            if count > self.region.rows:
                text = f"epoch {self.epoch}: sent {count} rows into a region of {self.region.rows}"
                raise CommError(text, rank=self._comm.rank, phase="dispatch", peer=peer)
        return counts

    def rows_from(self, peer: int, count: int) -> tuple[Tensor, Tensor]:
        """Values and tails that a peer has written, as they lie in the window."""
        r, at = self.region, self._region(peer)
        values = self._heap.data(self._comm.rank, at, count * r.value_bytes)
        tails = self._heap.data(self._comm.rank, at + r.tails_at, count * r.tail_bytes)
        return values.view(count, r.value_bytes), tails.view(count, r.tail_bytes)

    def leave_sums(self, peer: int, sums_RB: Tensor) -> None:
        """Put the sums of a peer's rows where it will read them."""
        self._heap.put(self._comm.rank, self._region(peer) + self.region.sums_at, sums_RB)
        self._heap.signal(peer, self._comm.size + self._comm.rank, self.epoch, sums_RB.shape[0])

    def await_sums(self) -> dict[int, int]:
        """Wait until every peer has left its sums; returns how many."""
        return self._heap.wait_until({peer: self._comm.size + peer for peer in self.peers}, self.epoch, "combine")

    def sums_at(self, peer: int, count: int) -> Tensor:
        """The sums that a peer has left for this rank, as they lie in its window."""
        at = self._region(self._comm.rank) + self.region.sums_at
        return self._heap.data(peer, at, count * self.region.sum_bytes).view(count, self.region.sum_bytes)

    def _region(self, source: int) -> int:
        return source * self.region.region_bytes

    def signal_bytes(self) -> int:
        """What one round of flags sends."""
        return WORD_BYTES * len(self.peers)


class Lanes:
    """As many lanes as calls are under way at once; made when first needed, by every rank at the same call."""

    MOST = 16

    def __init__(self, comm: Communicator, region: RegionShape) -> None:
        self._comm, self._region = comm, region
        self._lanes: list[Lane] = []
        self._failure = ""

    def take(self) -> Lane:
        """The first idle lane, at its next epoch. Raises CommError after a failure, or with too many calls open."""
        if self._failure:
            text = f"an earlier call failed, so ranks no longer agree on a call: build the layer anew ({self._failure})"
            raise CommError(text, rank=self._comm.rank, phase="dispatch")
        lane = next((lane for lane in self._lanes if not lane.busy), None) or self._new()
        lane.busy, lane.epoch = True, lane.epoch + 1
        return lane

    def failed(self, error: BaseException) -> None:
        """Refuse every further call."""
        self._failure = self._failure or str(error)

    def _new(self) -> Lane:
        if len(self._lanes) == self.MOST:
            text = f"{self.MOST} calls were prepared and not finalized; finalize each before the next"
            raise CommError(text, rank=self._comm.rank, phase="dispatch")
        self._lanes.append(Lane(self._comm, self._region))
        return self._lanes[-1]
