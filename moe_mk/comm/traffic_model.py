"""What a transport sends for a given routing, counted from the routing alone: to the byte what traffic counts.

Each function takes `ranks_of_W`: for every rank the ranks of its assignments, (T, K) with -1 for nowhere. A row is what
travels to the experts, a sum what comes back. What is expected of a uniform routing is in `visits`.

    all_to_all     a row to each distinct rank of a token, a sum from each
    all_gather     every row to every rank, a partial sum of every row back
    hierarchical   a row to each distinct remote node, there to each distinct rank; sums the same way back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_mk.comm.traffic import LINKS, Nodes

COUNT_BYTES = 8


@dataclass(frozen=True)
class RowBytes:
    """Bytes of what travels."""

    row: int
    """A token with its ids and weights, outward."""
    sum: int
    """One row homeward."""


@dataclass(frozen=True)
class Flow:
    """Bytes from every rank to every rank, int64 [W, W], by phase."""

    phases: dict[str, Tensor] = field(default_factory=dict)

    def by_link(self, nodes: Nodes, rank: int, phases: Sequence[str] | None = None) -> dict[str, int]:
        """What one rank sends over each kind of link."""
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
    visits_of_W = [_visits(ranks_TK, len(ranks_of_W)) for ranks_TK in ranks_of_W]
    between_WW, within_WW = (torch.zeros_like(_rows(ranks_of_W)) for _ in range(2))
    between_counts_WW, within_counts_WW = (torch.zeros_like(between_WW) for _ in range(2))
    for source, visits_TW in enumerate(visits_of_W):
        for node in range(nodes.num_nodes):
            members = list(nodes.members(node))
            relay = members[nodes.local_index(source)]
            if node != nodes.node_of_W[source]:
                between_WW[source, relay] += int(visits_TW[:, members].any(dim=1).sum())
            between_counts_WW[source, relay] = COUNT_BYTES
            within_WW[relay, members] += visits_TW[:, members].sum(dim=0)
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


def _visits(ranks_TK: Tensor, size: int) -> Tensor:
    """(T, W) of 0 and 1: whether a token has an assignment on a rank."""
    ranks_W = torch.arange(size, dtype=ranks_TK.dtype, device=ranks_TK.device)
    return (ranks_TK[:, :, None] == ranks_W).any(dim=1).to(torch.int64).cpu()


def _rows(ranks_of_W: Sequence[Tensor]) -> Tensor:
    """(W, W): tokens of the first rank that visit the second."""
    return torch.stack([_visits(ranks_TK, len(ranks_of_W)).sum(dim=0) for ranks_TK in ranks_of_W])
