"""The bytes of one dispatch and combine, as EP benchmarks count them, from the shape and the ranks alone.

    throughput   a row to each distinct node of a token, its own included; inside one node to each distinct rank
    latency      a message for each assignment, with a header

Uniform routing. Where the router keeps `nodes_kept` groups and a group is a node, experts of a token are on no more
nodes than that: exactly E[min(kept, D)], D the distinct nodes of K experts drawn without replacement, because the
kept groups are the first ones that show up among the best scores.

What tensor and expert parallelism send, and how many tokens they hold: the formulas that decide between the two.

    tensor parallel    2 (N - 1) / N x S x D    a ring all-reduce of every rank; 2 S D is the bound for many ranks
    expert parallel    2 x K x S / M x D        dispatch and combine of one rank's share of the tokens

S tokens of the instance, D values a token, K experts a token, N or M ranks.

The functions `*_flow` compute what transports send for one routing, as `comm.traffic` counts it. Each takes
`ranks_of_W`: for every rank the ranks of its assignments, (T, K) with -1 for nowhere. A row is sent to the experts, a
sum is returned.

    all_to_all     a row to each distinct rank of a token, a sum from each
    all_gather     every row to every rank, a partial sum of every row back
    hierarchical   a row to each distinct remote node, there to each distinct rank; sums return the same way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from moe_mk.comm.destinations import expected_groups
from moe_mk.comm.traffic import COUNT_BYTES, LINKS, Nodes
from moe_mk.errors import ConfigError
from moe_mk.lab.plan.links import Direction, Mode
from moe_mk.quant import BF16, INT8_TOKEN, MXFP8, NVFP4_TOKENS, QuantScheme, activation_scheme
from moe_mk.quant.wire import row_bytes
from moe_mk.registry import did_you_mean

MESSAGE_HEADER = 16
"""Bytes before a row of DeepEP's low-latency kernels."""
WIRES: Mapping[str, QuantScheme] = {
    "bf16": BF16,
    "fp8": activation_scheme(128, ue8m0=False),
    "fp8_ue8m0": activation_scheme(128, ue8m0=True),
    "mxfp8": MXFP8,
    "nvfp4": NVFP4_TOKENS,
    "int8": INT8_TOKEN,
}
"""Formats of rows that travel, by the names of `moe-mk plan exchange --wire`."""


@dataclass(frozen=True)
class Exchange:
    """One layer's exchange on one fabric."""

    tokens: int
    """Of each rank."""
    ranks: int
    ranks_per_node: int = 8
    hidden_size: int = 7168
    top_k: int = 8
    num_experts: int = 256
    nodes_kept: int | None = 4
    """The most nodes to which the router sends a token; None is no limit."""
    dropped: int = 0
    """Assignments of a rank's batch that go nowhere."""
    wire: str = "fp8"
    """Format of dispatched rows, one of `WIRES`."""
    combine_wire: str = "bf16"
    """Format of returned rows, one of `WIRES`."""

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
        for name in ("wire", "combine_wire"):
            if (wire := getattr(self, name)) not in WIRES:
                known = did_you_mean(wire, list(WIRES)) or f"; use one of {', '.join(WIRES)}"
                problems.append(f"{name}={wire!r} is unknown{known}")
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
        """Bytes of one row with its scales."""
        if direction == "combine":
            return row_bytes(WIRES[self.combine_wire], self.hidden_size)
        return row_bytes(WIRES[self.wire], self.hidden_size) + MESSAGE_HEADER * (mode == "latency")

    def num_bytes(self, mode: Mode, direction: Direction) -> float:
        """Bytes of one rank, what stays on its node included: what published bandwidths divide by time."""
        rows = self.tokens * self.visits if mode == "throughput" else self.tokens * self.top_k - self.dropped
        return rows * self.row(mode, direction)

    def near_bytes(self, mode: Mode, direction: Direction) -> float:
        """Bytes that one rank moves inside nodes: its rows to ranks of the own node, or what it forwards to them.

        throughput: a row for each distinct rank of a token, wherever it came from; latency: the own node's messages.
        """
        if self.nodes == 1:
            return self.num_bytes(mode, direction)
        if mode == "latency":
            return self.num_bytes(mode, direction) / self.nodes
        ranks = expected_groups(
            self.num_experts, self.top_k, self.ranks, expert_groups=self.nodes, kept=self.nodes_kept
        )
        return self.tokens * ranks * self.row(mode, direction)

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


@dataclass(frozen=True)
class Volumes:
    """One instance's batch on so many ranks; all numbers are of one rank."""

    tokens: int
    hidden_size: int
    top_k: int
    ranks: int

    def __post_init__(self) -> None:
        if min(self.tokens, self.hidden_size, self.top_k, self.ranks) < 1:
            raise ConfigError(f"sizes must be at least 1: {self}")

    @property
    def tp_elements(self) -> int:
        """The bound of an all-reduce, 2 S D."""
        return 2 * self.tokens * self.hidden_size

    @property
    def ep_elements(self) -> Fraction:
        """Dispatch and combine without merging copies, 2 K S / M D."""
        return Fraction(self.top_k * self.tp_elements, self.ranks)

    @property
    def ep_over_tp(self) -> Fraction:
        """K / M: expert parallelism sends less from K ranks on."""
        return self.ep_elements / self.tp_elements

    @property
    def tp_resident_tokens(self) -> int:
        """Tokens a rank holds under tensor parallelism: all of them."""
        return self.tokens

    @property
    def ep_resident_tokens(self) -> int:
        """Tokens the fullest rank holds under expert parallelism."""
        return -(-self.tokens // self.ranks)


def break_even_ranks(top_k: int) -> int:
    """The ranks from which on expert parallelism sends no more than tensor parallelism: K."""
    return top_k


@dataclass(frozen=True)
class RowBytes:
    """Bytes of what travels."""

    row: int
    """A token with its ids and weights, outward."""
    sum: int
    """One sum in combine."""


@dataclass(frozen=True)
class Flow:
    """Bytes from every rank to every rank, int64 [W, W], by phase."""

    phases: dict[str, Tensor] = field(default_factory=dict)

    def by_link(self, nodes: Nodes, rank: int, phases: Sequence[str] | None = None) -> dict[str, int]:
        """Return the bytes that one rank sends over each kind of link."""
        total = dict.fromkeys(LINKS, 0)
        for phase, sent_WW in self.phases.items():
            if phases is None or phase in phases:
                for peer, num_bytes in enumerate(sent_WW[rank].tolist()):
                    total[nodes.link(rank, peer)] += num_bytes
        return total


def all_to_all_flow(ranks_of_W: Sequence[Tensor], size: RowBytes) -> Flow:
    """One copy of a token for each distinct rank, counts before them."""
    rows_WW = _rows(ranks_of_W)
    phases = {"dispatch counts": torch.full_like(rows_WW, COUNT_BYTES), "dispatch": rows_WW * size.row}
    return Flow({**phases, "combine": rows_WW.T * size.sum})


def one_sided_flow(ranks_of_W: Sequence[Tensor], size: RowBytes) -> Flow:
    """The rows of all-to-all without what stays on a rank, and a flag a peer each way in place of counts."""
    rows_WW = _rows(ranks_of_W).fill_diagonal_(0)
    flags_WW = torch.full_like(rows_WW, COUNT_BYTES).fill_diagonal_(0)
    phases = {"dispatch": rows_WW * size.row, "combine": rows_WW.T * size.sum}
    return Flow({**phases, "dispatch flags": flags_WW, "combine flags": flags_WW})


def all_gather_flow(ranks_of_W: Sequence[Tensor], size: RowBytes) -> Flow:
    """Every rank sends its rows to all, and gets a partial sum of each of its tokens from each."""
    tokens_W = torch.tensor([len(ranks_TK) for ranks_TK in ranks_of_W], dtype=torch.int64, device="cpu")
    square_WW = torch.ones((len(tokens_W), len(tokens_W)), dtype=torch.int64, device="cpu")
    return Flow(
        {
            "dispatch counts": square_WW * COUNT_BYTES,
            "dispatch": square_WW * tokens_W[:, None] * size.row,
            "combine": square_WW * tokens_W * size.sum,
        }
    )


def hierarchical_flow(ranks_of_W: Sequence[Tensor], size: RowBytes, nodes: Nodes) -> Flow:
    """One copy for each remote node to the rank of equal place there, which forwards it inside and adds up the sums."""
    sent_of_W = [_sent_to(ranks_TK, len(ranks_of_W)) for ranks_TK in ranks_of_W]
    between_WW, within_WW = (torch.zeros_like(_rows(ranks_of_W)) for _ in range(2))
    between_counts_WW, within_counts_WW = (torch.zeros_like(between_WW) for _ in range(2))
    for source, sent_TW in enumerate(sent_of_W):
        for node in range(nodes.num_nodes):
            members = list(nodes.members(node))
            relay = members[nodes.local_index(source)]
            if node != nodes.node_of_W[source]:
                between_WW[source, relay] += int(sent_TW[:, members].any(dim=1).sum())
            between_counts_WW[source, relay] = COUNT_BYTES
            within_WW[relay, members] += sent_TW[:, members].sum(dim=0)
            within_counts_WW[relay, members] = COUNT_BYTES
    return Flow(
        {
            "dispatch counts": between_counts_WW,
            "dispatch": between_WW * size.row,
            "relay counts": within_counts_WW,
            "relay": within_WW * size.row,
            "gather": within_WW.T * size.sum,
            "combine": between_WW.T * size.sum,
        }
    )


def _sent_to(ranks_TK: Tensor, size: int) -> Tensor:
    """(T, W) of 0 and 1: whether a token has an assignment on a rank."""
    ranks_W = torch.arange(size, dtype=ranks_TK.dtype, device=ranks_TK.device)
    return (ranks_TK[:, :, None] == ranks_W).any(dim=1).to(torch.int64).cpu()


def _rows(ranks_of_W: Sequence[Tensor]) -> Tensor:
    """(W, W): tokens of the first rank that are sent to the second."""
    return torch.stack([_sent_to(ranks_TK, len(ranks_of_W)).sum(dim=0) for ranks_TK in ranks_of_W])
