"""A full mesh against a relay in two levels, which crosses to each node once and fans out inside it.

    mesh           K rows a token over the slow links                       x (W - 1) / W are not for this rank
    between nodes  n rows a token over the slow links, n nodes a token      x (nodes - 1) / nodes
    inside         K rows a token over the fast links                       x (ranks a node - 1) / ranks a node

Bytes at the profile's rates and no fixed costs. One level after the other is the sum, a relay token by token is
between the longer level and the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_mk.config.device import BYTES_PER_US
from moe_mk.errors import ConfigError
from moe_mk.lab.plan.exchange import distinct_groups
from moe_mk.lab.plan.links import LinkProfile


@dataclass(frozen=True)
class Relay:
    """A batch of one rank on some nodes."""

    profile: LinkProfile
    tokens: int
    nodes: int
    hidden_size: int = 7168
    top_k: int = 8
    num_experts: int = 256
    nodes_kept: int | None = None
    """Exactly so many nodes a token; None is what uniform routing gives."""
    element_bytes: int = 2

    def __post_init__(self) -> None:
        if min(self.tokens, self.nodes, self.hidden_size, self.top_k, self.element_bytes) < 1:
            raise ConfigError(f"sizes must be at least 1: {self}")
        if self.nodes_kept is not None and not 1 <= self.nodes_kept <= self.nodes:
            raise ConfigError(f"nodes_kept={self.nodes_kept} is not in [1, {self.nodes}]")

    @property
    def ranks(self) -> int:
        """Return W, the number of ranks."""
        return self.nodes * self.profile.ranks_per_node

    @property
    def mesh_bytes(self) -> float:
        """Over slow links, a row an assignment."""
        return self._rows(self.top_k) * (self.ranks - 1) / self.ranks

    @property
    def between_bytes(self) -> float:
        """Over slow links, a row a node."""
        nodes_of_token = self.nodes_kept or distinct_groups(self.num_experts, self.top_k, self.nodes)
        return self._rows(nodes_of_token) * (self.nodes - 1) / self.nodes

    @property
    def inside_bytes(self) -> float:
        """Over fast links, a row an assignment."""
        return self._rows(self.top_k) * (self.profile.ranks_per_node - 1) / self.profile.ranks_per_node

    @property
    def mesh_us(self) -> float:
        """Return the time of a full mesh, in us."""
        return self.mesh_bytes / (self.profile.inter_gbs * BYTES_PER_US)

    @property
    def legs_us(self) -> tuple[float, float]:
        """Between nodes, inside a node."""
        return self.between_bytes / (self.profile.inter_gbs * BYTES_PER_US), self.inside_bytes / (
            self.profile.intra_gbs * BYTES_PER_US
        )

    @property
    def relayed_us(self) -> float:
        """One level after the other."""
        return sum(self.legs_us)

    @property
    def pipelined_us(self) -> float:
        """Return the time of the slower level, in us: both run at once, at best."""
        return max(self.legs_us)

    @property
    def gain(self) -> float:
        """Mesh over relay: above 1 the relay is faster."""
        return self.mesh_us / self.relayed_us

    def _rows(self, rows_a_token: float) -> float:
        return self.tokens * rows_a_token * self.hidden_size * self.element_bytes
