"""Bytes on the links: how much a rank has sent to whom, and over which kind of link that went.

Counting knows ranks alone. Which node a rank lies on is data (`Nodes`), so the same counts can be read for any cluster:

    traffic.by_link(Nodes.of(4, ranks_per_node=2), rank=0)     {"self": 96, "intra_node": 64, "inter_node": 128}
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from moe_mk.errors import ConfigError

SELF, INTRA_NODE, INTER_NODE = "self", "intra_node", "inter_node"
LINKS = (SELF, INTRA_NODE, INTER_NODE)


@dataclass(frozen=True)
class Nodes:
    """Which node each rank of a group lies on."""

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
        """How many there are."""
        return len(set(self.node_of_W))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return tuple(len(self.members(node)) for node in range(self.num_nodes))

    def members(self, node: int) -> tuple[int, ...]:
        """The ranks of a node, ascending."""
        return tuple(rank for rank, other in enumerate(self.node_of_W) if other == node)

    def local_index(self, rank: int) -> int:
        """The place of a rank among the members of its node."""
        return self.members(self.node_of_W[rank]).index(rank)

    def link(self, source: int, peer: int) -> str:
        """The kind of link between two ranks, one of LINKS."""
        if source == peer:
            return SELF
        return INTRA_NODE if self.node_of_W[source] == self.node_of_W[peer] else INTER_NODE


@dataclass
class Traffic:
    """Bytes one rank has sent. What stays on the rank is known by link, but is not traffic: no phase counts it."""

    bytes_by_phase: Counter[str] = field(default_factory=Counter)
    calls_by_phase: Counter[str] = field(default_factory=Counter)
    bytes_by_peer: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """Of each phase, to each rank, the sender included."""

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
        """Start over."""
        for counts in (self.bytes_by_phase, self.calls_by_phase, self.bytes_by_peer):
            counts.clear()
