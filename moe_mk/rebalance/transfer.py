"""Transfer of the experts of one layer to their new ranks: rounds of pairs, chunk by chunk, while the layer serves.

    round 0   rank 0 -> 2, rank 3 -> 1      each rank sends at most one expert and receives at most one
    round 1   rank 2 -> 0                   one chunk a step, posted in one step and completed in the next

Every chunk has a header and a checksum. A rank votes against a chunk that is wrong, and all ranks receive the vote.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import unless_signalled
from moe_mk.flight import Flight
from moe_mk.layer.moe_layer import MoELayer
from moe_mk.rebalance.background import BackgroundJob
from moe_mk.weights.expert_weights import SlotWeights

PHASE = "rebalance weights"
HEADER = 32
"""Bytes before a chunk: plan, number of the link, offset and checksum in int64."""


@dataclass(frozen=True)
class Link:
    """The transfer of one expert between two ranks of the group. Slots are local to their rank."""

    expert: int
    src: int
    dst: int
    from_slot: int
    to_slot: int


@dataclass(frozen=True)
class LayerMoves:
    """The transfers and reads of one layer before its new map can be used. Ranks are those of the group."""

    layer: int
    rounds: tuple[tuple[Link, ...], ...] = ()
    reads: tuple[tuple[int, int, int], ...] = ()
    """(rank, slot, expert) that no rank holds: read from where the layer was loaded."""

    @property
    def links(self) -> int:
        """Experts that travel from rank to rank."""
        return sum(map(len, self.rounds))


@dataclass
class ExpertBytes:
    """Bytes of experts that this rank has received from others and accepted, and that it has read."""

    received: int = 0
    read: int = 0


@dataclass
class ExpertTransfer:
    """One attempt at one layer."""

    comm: Communicator
    layer: MoELayer
    moves: LayerMoves
    plan_id: int
    bytes_per_step: int
    reader: BackgroundJob[dict[int, SlotWeights]]
    counts: ExpertBytes
    arrived: dict[int, SlotWeights] = field(default_factory=dict)
    """By slot of this rank: experts received completely and verified."""
    trouble: str = ""
    """The problem of this rank; empty if there is none."""

    def __post_init__(self) -> None:
        self._round, self._offset = 0, 0
        self._size = self.layer.live.export_slot(0).num_bytes
        self._incoming: ReceivedExpert | None = None
        self._flight: Flight[Tensor] | None = None
        wanted = [(slot, expert) for rank, slot, expert in self.moves.reads if rank == self.comm.rank]
        self._reading = bool(wanted)
        if wanted:
            layer = self.layer
            self.reader.start(lambda: {slot: layer.live.read_expert(expert) for slot, expert in wanted})

    @property
    def all_sent(self) -> bool:
        """Whether every round has landed; the same on all ranks."""
        return self._round == len(self.moves.rounds)

    @property
    def in_flight(self) -> bool:
        """Whether a chunk was posted that has not landed."""
        return self._flight is not None

    def waits_for_reading(self) -> bool:
        """Whether this rank's own reads are not there yet; takes them up, or what went wrong with them."""
        if not self._reading:
            return False
        outcome = self.reader.poll()
        if outcome is None:
            return True
        self._reading = False
        if (error := outcome.error) is not None:
            self.trouble = f"reading {self.layer.name!r} failed: {type(error).__name__}: {error}"
        else:
            self.arrived |= outcome.result()
            self.counts.read += sum(slot.num_bytes for slot in outcome.result().values())
        return False

    def post(self) -> None:
        """Start sending the next chunk of this round; ranks without a pair send and receive nothing."""
        send, receive = [0] * self.comm.size, [0] * self.comm.size
        chunk = torch.empty(0, dtype=torch.uint8, device=self.layer.device)
        for number, link in enumerate(self._links):
            if link.src == self.comm.rank:
                send[link.dst] = HEADER + self._chunk_size
                chunk = self._chunk(number, link)
            if link.dst == self.comm.rank:
                receive[link.src] = HEADER + self._chunk_size
        self._flight = self.comm.all_to_all(chunk.view(-1, 1), send, receive, PHASE)
        next(self._flight)

    def land(self) -> Flight[None]:
        """Receive the chunk that was posted last; `trouble` is set if it is wrong."""
        assert self._flight is not None
        flight, self._flight = self._flight, None
        rows = yield from flight
        for number, link in enumerate(self._links):
            if link.dst == self.comm.rank:
                self._check(rows.flatten(), number, link)

    def accept(self) -> None:
        """Advance to the next chunk: all ranks have accepted theirs."""
        for link in self._links:
            if link.dst == self.comm.rank and self._incoming is not None:
                self.counts.received += self._chunk_size
                if self._incoming.received == self._size:
                    self.arrived[link.to_slot], self._incoming = self._incoming.slot, None
        self._offset += self._chunk_size
        if self._offset == self._size:
            self._round, self._offset = self._round + 1, 0

    @property
    def _links(self) -> tuple[Link, ...]:
        return self.moves.rounds[self._round]

    @property
    def _chunk_size(self) -> int:
        return min(self.bytes_per_step, self._size - self._offset)

    def _chunk(self, number: int, link: Link) -> Tensor:
        """Header and bytes of a chunk; if they cannot be read, zeros with an invalid header."""
        try:
            slot = self.layer.live.export_slot(link.from_slot)
            data = read_bytes(slot, self._offset, self._offset + self._chunk_size).to(self.layer.device)
            head = [self.plan_id, number, self._offset, checksum(data)]
        except unless_signalled(Exception) as problem:
            self.trouble = f"expert {link.expert} cannot be sent: {type(problem).__name__}: {problem}"
            data = torch.zeros(self._chunk_size, dtype=torch.uint8, device=self.layer.device)
            head = [-1, number, self._offset, 0]
        header = torch.tensor(head, dtype=torch.int64, device=data.device).view(torch.uint8)
        return torch.cat((header, data))

    def _check(self, arrived: Tensor, number: int, link: Link) -> None:
        plan, link_number, offset, expected = arrived[:HEADER].clone().view(torch.int64).tolist()
        data = arrived[HEADER:]
        where = f"expert {link.expert} from rank {link.src} at byte {self._offset}"
        if (plan, link_number, offset) != (self.plan_id, number, self._offset):
            self.trouble = f"{where}: rank {link.src} sent chunk {offset} of link {link_number}, plan {plan}"
        elif checksum(data) != expected:
            self.trouble = f"{where}: {len(data)} bytes were damaged on their way"
        else:
            if self._incoming is None:
                self._incoming = ReceivedExpert(self.layer.live.export_slot(0))
            self._incoming.write(data)


# One expert as bytes and back: every tensor it has, values and scales, in one fixed order. A backend's own layout is
# made anew from what arrives, so that nothing derived from old weights can be left behind.


def read_bytes(slot: SlotWeights, start: int, stop: int) -> Tensor:
    """Bytes [start, stop) of an expert, copied."""
    pieces = []
    for tensor in slot.tensors:
        size = tensor.nbytes
        if start < size and stop > 0:
            pieces.append(flat_bytes(tensor)[max(start, 0) : stop])
        start, stop = start - size, stop - size
    return torch.cat(pieces)


def flat_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as uint8, a view where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


class ReceivedExpert:
    """Memory of its own for an expert that is arriving piece by piece."""

    def __init__(self, like: SlotWeights) -> None:
        """like: any expert of the layer; gives shapes and formats."""
        self.slot = like.changed(lambda part: torch.empty(part.shape, dtype=part.dtype, device=part.device))
        self.received = 0

    def write(self, piece: Tensor) -> None:
        start = self.received
        stop = start + len(piece)
        for tensor in self.slot.tensors:
            target = flat_bytes(tensor)
            low, high = max(start, 0), min(stop, len(target))
            if low < high:
                target[low:high] = piece[low - start : high - start].to(target.device)
            start, stop = start - len(target), stop - len(target)
        self.received += len(piece)


def checksum(data: Tensor) -> int:
    """64 bits that change when any byte does, or when two words trade places. Reads the result on the host."""
    padded = torch.zeros(-(-len(data) // 8) * 8, dtype=torch.uint8, device=data.device)
    padded[: len(data)] = data
    words = padded.view(torch.int64)
    odd = 2 * torch.arange(len(words), dtype=torch.int64, device=data.device) + 1
    # Odd factors can be undone modulo 2^64, so that no single change cancels; the constant distinguishes lengths.
    return int((words * odd * 0x5851F42D4C957F2D).sum()) ^ len(data)
