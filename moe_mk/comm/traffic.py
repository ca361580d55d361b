"""Bytes on the links: how much a rank has sent to whom, over which kind of link.

Counting uses ranks alone. The node of each rank is data (`Nodes`), so the same counts can be read for any cluster:

    traffic.by_link(Nodes.of(4, ranks_per_node=2), rank=0)     {"self": 96, "intra_node": 64, "inter_node": 128}

For expected values under uniform routing see `moe_mk.comm.destinations`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from ctypes import Array, c_int64
from dataclasses import dataclass
from functools import cached_property

from moe_mk.errors import ConfigError

SELF, INTRA_NODE, INTER_NODE = "self", "intra_node", "inter_node"
LINKS = (SELF, INTRA_NODE, INTER_NODE)
COUNT_BYTES = 8
"""A count; headers are not counted."""


@dataclass(frozen=True)
class Nodes:
    """The node of each rank of a group."""

    node_of_W: tuple[int, ...]
    """Numbers from 0 without a gap."""

    def __post_init__(self) -> None:
        if sorted(set(self.node_of_W)) != list(range(len(set(self.node_of_W)))):
            raise ConfigError(f"nodes {self.node_of_W} of ranks must be numbered from 0 without a gap")

    @classmethod
    def of(cls, ranks: int, ranks_per_node: int | None = None) -> Nodes:
        """Neighbouring ranks share a node; None: all of them one. The last node may have fewer."""
        return cls(tuple(rank // (ranks_per_node or max(ranks, 1)) for rank in range(ranks)))

    @property
    def num_nodes(self) -> int:
        return len(set(self.node_of_W))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(self.members(node)) for node in range(self.num_nodes))

    def members(self, node: int) -> tuple[int, ...]:
        return tuple(rank for rank, other in enumerate(self.node_of_W) if other == node)

    def local_index(self, rank: int) -> int:
        """The place of a rank among the members of its node."""
        return self.members(self.node_of_W[rank]).index(rank)

    def link(self, source: int, peer: int) -> str:
        """The kind of link between two ranks, one of LINKS."""
        if source == peer:
            return SELF
        return INTRA_NODE if self.node_of_W[source] == self.node_of_W[peer] else INTER_NODE


class Traffic:
    """Bytes one rank has sent. What stays on the rank is known by link, but is not traffic: no phase counts it."""

    def __init__(self) -> None:
        self._bytes_by_phase: Counter[str] = Counter()
        self._calls_by_phase: Counter[str] = Counter()
        self._bytes_by_peer: dict[str, Counter[int]] = defaultdict(Counter)
        self._meters: dict[RowMeter, RowMeter] = {}

    @property
    def bytes_by_phase(self) -> Counter[str]:
        self._read_meters()
        return self._bytes_by_phase

    @property
    def calls_by_phase(self) -> Counter[str]:
        """How often each phase was run."""
        self._read_meters()
        return self._calls_by_phase

    @property
    def bytes_by_peer(self) -> dict[str, Counter[int]]:
        """Of each phase, to each rank, the sender included."""
        self._read_meters()
        return self._bytes_by_peer

    def meter(self, ranks: int, rank: int, row_bytes: int, sum_bytes: int, *, messages: bool = False) -> RowMeter:
        """The meter of native calls with rows and sums of these sizes; read when traffic is. See `RowMeter`."""
        made = RowMeter(ranks, rank, row_bytes, sum_bytes, messages)
        return self._meters.setdefault(made, made)

    def _read_meters(self) -> None:
        for meter in self._meters:
            for phase, bytes_W, calls in meter.read():
                for peer, num_bytes in enumerate(bytes_W):
                    self._bytes_by_peer[phase][peer] += num_bytes
                self._bytes_by_phase[phase] += sum(bytes_W) - bytes_W[meter.rank]
                self._calls_by_phase[phase] += calls

    def sent(self, phase: str, bytes_W: Sequence[int], rank: int) -> None:
        """Note one collective of a rank: what it sends to each rank of the group, itself included."""
        peers = self.bytes_by_peer[phase]
        for peer, num_bytes in enumerate(bytes_W):
            peers[peer] += num_bytes
        self.bytes_by_phase[phase] += sum(bytes_W) - bytes_W[rank]
        self.calls_by_phase[phase] += 1

    def moved(self, phase: str, peer: int, num_bytes: int, rank: int) -> None:
        """Note one operation with one peer: a put, a flag, a read."""
        self.bytes_by_peer[phase][peer] += num_bytes
        self.bytes_by_phase[phase] += num_bytes if peer != rank else 0
        self.calls_by_phase[phase] += 1

    def stayed(self, phase: str, num_bytes: int, rank: int) -> None:
        """Note rows that a rank keeps: a part of some operation that is counted with its peers, or of none."""
        self.bytes_by_peer[phase][rank] += num_bytes

    def by_link(self, nodes: Nodes, rank: int, phases: Collection[str] | None = None) -> dict[str, int]:
        """Bytes over each kind of link, of all phases or of some."""
        total = dict.fromkeys(LINKS, 0)
        for phase, peers in self.bytes_by_peer.items():
            if phases is None or phase in phases:
                for peer, num_bytes in peers.items():
                    total[nodes.link(rank, peer)] += num_bytes
        return total

    def reset(self) -> None:
        for counts in (self.bytes_by_phase, self.calls_by_phase, self.bytes_by_peer):
            counts.clear()


@dataclass(frozen=True)
class RowMeter:
    """Rows that native calls count themselves, see `PreparedExchangeCall`: of one-sided transfers, or of messages."""

    ranks: int
    rank: int
    row_bytes: int
    sum_bytes: int
    messages: bool = False
    """Whether counts precede rows, and rows that stay count as sent to this rank; else flags follow rows and sums."""

    @cached_property
    def words(self) -> Array[c_int64]:
        """int64 [2 W + 2]: rows sent to each rank, rows received from each, dispatches, combines; they only grow."""
        return (c_int64 * (2 * self.ranks + 2))()

    @cached_property
    def _before(self) -> list[int]:
        """Counts that were read before: calls of another thread may count meanwhile, so nothing is set back."""
        return [0] * (2 * self.ranks + 2)

    def read(self) -> list[tuple[str, list[int], int]]:
        """Traffic since the last read: phase, bytes to each rank, calls."""
        before, after, ranks = self._before, self.words[:], self.ranks
        new, found = [a - b for a, b in zip(after, before, strict=True)], []
        before[:] = after
        for half, (phase, num_bytes) in enumerate((("dispatch", self.row_bytes), ("combine", self.sum_bytes))):
            if not (calls := new[2 * ranks + half]):
                continue
            rows = [count * num_bytes for count in new[half * ranks : (half + 1) * ranks]]
            words = [calls * COUNT_BYTES] * ranks
            if self.messages and half == 0:
                found.append(("dispatch counts", words, calls))
            elif not self.messages:
                rows[self.rank] = words[self.rank] = 0
                found.append((f"{phase} flags", words, calls))
            found.append((phase, rows, calls))
        return found
