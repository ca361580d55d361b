"""The bytes of one dispatch and combine, as EP benchmarks count them, from the shape and the ranks alone.

    throughput   a row to each distinct node of a token, its own included; inside one node to each distinct rank
    latency      a message for each assignment, with a header

Uniform routing. Where the router keeps `nodes_kept` groups and a group is a node, experts of a token lie on no more
nodes than that: exactly E[min(kept, D)], D the distinct nodes of K experts drawn without replacement, because the
kept groups are the first ones that show up among the best scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_mk.comm.visits import expected_groups
from moe_mk.errors import ConfigError
from moe_mk.plan.links import Direction, Mode
from moe_mk.quant.fp8_block import activation_scheme
from moe_mk.quant.plain import BF16
from moe_mk.quant.wire import row_bytes

MESSAGE_HEADER = 16
"""Bytes before a row of DeepEP's low-latency kernels."""


@dataclass(frozen=True)
class Exchange:
    """One layer's exchange on one fabric; FP8 with f32 scales outward, bf16 homeward."""

    tokens: int
    """Of each rank."""
    ranks: int
    ranks_per_node: int = 8
    hidden_size: int = 7168
    top_k: int = 8
    num_experts: int = 256
    nodes_kept: int | None = 4
    """The most nodes that the router lets a token visit; None is no limit."""
    dropped: int = 0
    """Assignments of a rank's batch that go nowhere."""

    def __post_init__(self) -> None:
        sizes = (self.tokens, self.ranks, self.ranks_per_node, self.hidden_size, self.top_k, self.num_experts)
        problems = [] if min(sizes) > 0 else [f"sizes must be at least 1: {self}"]
        if self.ranks > self.ranks_per_node and self.ranks % max(self.ranks_per_node, 1):
            problems.append(f"{self.ranks} ranks do not fill nodes of {self.ranks_per_node}")
        if self.ranks > 0 and self.num_experts % self.ranks:
            problems.append(f"{self.num_experts} experts do not divide over {self.ranks} ranks")
        if not 0 <= self.dropped <= self.tokens * self.top_k:
            problems.append(f"dropped={self.dropped} is not in [0, {self.tokens * self.top_k}]")
        if self.nodes_kept is not None and self.nodes_kept < 1:
            problems.append(f"nodes_kept={self.nodes_kept} must be at least 1")
        if problems:
            raise ConfigError("exchange: " + "; ".join(problems))

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def visits(self) -> float:
        """Distinct nodes of a token; inside one node, distinct ranks."""
        if self.nodes == 1:
            return distinct_groups(self.num_experts, self.top_k, self.ranks)
        return distinct_groups(self.num_experts, self.top_k, self.nodes, self.nodes_kept)

    def row(self, mode: Mode, direction: Direction) -> int:
        """Bytes of one row."""
        if direction == "combine":
            return row_bytes(BF16, self.hidden_size)
        return row_bytes(activation_scheme(128, ue8m0=False), self.hidden_size) + MESSAGE_HEADER * (mode == "latency")

    def num_bytes(self, mode: Mode, direction: Direction) -> float:
        """Bytes of one rank, what stays on its node included: what published bandwidths divide by time."""
        rows = self.tokens * self.visits if mode == "throughput" else self.tokens * self.top_k - self.dropped
        return rows * self.row(mode, direction)

    def remote_bytes(self, mode: Mode, direction: Direction) -> float:
        """Of these, the bytes that cross nodes: all but the own node's part."""
        return self.num_bytes(mode, direction) * (1.0 - 1.0 / self.nodes)


def distinct_groups(num_experts: int, top_k: int, groups: int, kept: int | None = None) -> float:
    """Expected distinct groups among K of E experts, at most `kept` of them: 3.983 of 8 groups, 4 kept, for 8 of 256.

    Raises ConfigError where groups do not divide the experts, or too few experts are left to choose from.
    """
    per_group, rest = divmod(num_experts, groups)
    most = min(kept or groups, groups)
    if rest or most * per_group < top_k:
        raise ConfigError(
            f"{num_experts} experts in {groups} groups of which {most} are kept do not give {top_k} choices"
        )
    return expected_groups(num_experts, top_k, groups, expert_groups=groups, kept=most)
