"""Two levels: a token crosses to each remote node once, and is handed on inside that node; sums meet there first.

The choice where links between nodes are much slower than inside one, above all with routing limited to few nodes.

    dispatch   a row for each distinct remote node goes to its relay, the rank of equal place in that node
    relay      relays forward rows, and ranks their own tokens, to the ranks of the node that hold an expert of them
    gather     sums return to the relay, which adds those of its node in rank order, in f32
    combine    one row a token and node goes home, where nodes are added in their order, in f32

Ranks of different nodes talk only if they have equal places. The scheme is that of CANN's layered dispatch, of DeepEP's
internode kernels and of its hybrid mode; here it runs over any communicator, with nodes as data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.comm.traffic import Nodes
from moe_mk.comm.traffic_model import expected_groups
from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import UnsupportedError
from moe_mk.flight import Flight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits, Volume
from moe_mk.prepare_finalize.packing import ID_BYTES, WEIGHT_BYTES, pack, packed_row_bytes, unpack
from moe_mk.quant.wire import from_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens


@dataclass(frozen=True)
class Leg:
    """One exchange of rows: which of the held rows went where, and how many came back from where."""

    row_X: Tensor
    """int64. The held row behind each row sent, peer by peer, ascending inside one."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    held: int
    """Rows that were there to choose from."""


@dataclass(frozen=True)
class WayHome:
    """How sums find back: the leg between nodes, then the leg inside this one."""

    between: Leg
    within: Leg


@PREPARE_FINALIZE.register("hierarchical")
class Hierarchical(PrepareFinalize):
    """All-to-all between nodes among ranks of equal place, then all-to-all inside each node."""

    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="one copy of a token per remote node, relayed inside it; where links between nodes are the slow ones",
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=frozenset({"plain", "fp8"}),
        min_ranks=2,
        graph_safe=False,
    )

    def __init__(self, context: TransportContext) -> None:
        """Find the relays. Raises UnsupportedError for nodes of different sizes."""
        super().__init__(context)
        rank, nodes = context.comm.rank, Nodes.of(context.comm.size, context.ranks_per_node)
        if reasons := _reasons_of_sizes(nodes):
            raise UnsupportedError("transport 'hierarchical' cannot serve this group", [str(r) for r in reasons])
        self.nodes, self._node, place = nodes, nodes.node_of_W[rank], nodes.local_index(rank)
        self._relays = [nodes.members(node)[place] for node in range(nodes.num_nodes)]
        """Of each node the rank of this rank's place; this rank itself in its own."""
        self._members = list(nodes.members(self._node))
        node_of_W = torch.tensor(nodes.node_of_W, dtype=torch.int64, device=context.device)
        self._node_of_P = node_of_W[context.tables.rank_of_P.long()]

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Send each token to the relays of its nodes, and what lies here on to the ranks of its experts."""
        c = self.context
        rows_TB = pack(self.encode(x_TH), routing.ids_TK.to(torch.int32), routing.weights_TK.to(torch.float32))
        with c.spans.span("dispatch"):
            node_TK = torch.where(routing.ids_TK >= 0, self._node_of_P[routing.ids_TK.clamp_min(0).long()], -1)
            remote = [node for node in range(self.nodes.num_nodes) if node != self._node]
            between, arrived_XB = yield from self._exchange(
                rows_TB, node_TK, dict(zip(remote, self._others(self._relays), strict=True)), self._relays, "dispatch"
            )
            held_XB = self._in_node_order(rows_TB, arrived_XB, between)
            within, arrived_RB = yield from self._exchange(
                held_XB, self._rank_of(held_XB), dict(zip(self._members, self._members, strict=True)), self._members,
                "relay",
            )  # fmt: skip
            x_RH, physical_RK, weights_RK = unpack(arrived_RB, c.wire, c.hidden_size, c.top_k)
            return self.local_rows(x_RH, physical_RK, weights_RK, handle=WayHome(between, within))

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Return sums to the relays, add up those of this node, send them home, and add up the nodes."""
        home, comm = tokens.handle, self.context.comm
        assert isinstance(home, WayHome)
        with self.context.spans.span("combine"):
            back_XH = yield from comm.all_to_all(output.y, home.within.received, home.within.sent, "gather")
            partial_XH = _added(back_XH, home.within)
            before = sum(home.between.received[: comm.rank])  # rows of earlier nodes lie before this rank's tokens
            own = slice(before, before + home.between.held)
            foreign_XH = torch.cat((partial_XH[: own.start], partial_XH[own.stop :])).to(output.y.dtype)
            parts_XH = yield from comm.all_to_all(foreign_XH, home.between.received, home.between.sent, "combine")
            return self._sum_of_nodes(partial_XH[own], parts_XH, home.between).to(output.y.dtype)

    def _exchange(
        self, rows_XB: Tensor, place_XK: Tensor, peer_of: dict[int, int], talks_to: Sequence[int], phase: str
    ) -> Flight[tuple[Leg, Tensor]]:
        """Send each row to every peer whose place (key of peer_of) it names; only ranks of `talks_to` are spoken to."""
        comm = self.context.comm
        wanted = [torch.nonzero((place_XK == place).any(dim=1)).flatten() for place in peer_of]
        row_of = dict(zip(peer_of.values(), wanted, strict=True))
        sent = [len(row_of[peer]) if peer in row_of else 0 for peer in range(comm.size)]
        ones = [int(peer in talks_to) for peer in range(comm.size)]
        counts = torch.tensor([[sent[peer]] for peer in talks_to], dtype=torch.int64, device="cpu")
        # Counts first: peers must size their buffers before rows arrive.
        told = yield from comm.all_to_all(counts, ones, ones, f"{phase} counts")
        told_by = dict(zip(talks_to, told.flatten().tolist(), strict=True))
        received = [told_by.get(peer, 0) for peer in range(comm.size)]
        row_X = torch.cat([row_of[peer] for peer in sorted(row_of)]) if row_of else _no_rows(rows_XB)
        arrived_XB = yield from comm.all_to_all(rows_XB[row_X], sent, received, phase)
        return Leg(row_X, tuple(sent), tuple(received), rows_XB.shape[0]), arrived_XB

    def _in_node_order(self, own_TB: Tensor, arrived_XB: Tensor, between: Leg) -> Tensor:
        """Rows that this rank relays: by node they come from, its own tokens at the place of its node."""
        before = sum(between.received[: self.context.comm.rank])
        return torch.cat((arrived_XB[:before], own_TB, arrived_XB[before:]))

    def _rank_of(self, rows_XB: Tensor) -> Tensor:
        """(X, K): the rank of each assignment of packed rows, -1 for nowhere."""
        ids_at = rows_XB.shape[1] - self.context.top_k * (ID_BYTES + WEIGHT_BYTES)
        ids_XK = from_bytes(rows_XB[:, ids_at : ids_at + self.context.top_k * ID_BYTES], torch.int32)
        return torch.where(ids_XK >= 0, self.context.tables.rank_of_P[ids_XK.clamp_min(0).long()], -1)

    def _sum_of_nodes(self, own_TH: Tensor, parts_XH: Tensor, between: Leg) -> Tensor:
        """Add the partial sums of nodes to their tokens in node order, in f32; this node's own was never rounded."""
        total_TH = torch.zeros((between.held, own_TH.shape[1]), dtype=torch.float32, device=own_TH.device)
        sizes = [between.sent[relay] for relay in self._others(self._relays)]
        parts = zip(torch.split(between.row_X, sizes), torch.split(parts_XH, sizes), strict=True)
        for node in range(self.nodes.num_nodes):
            if node == self._node:
                total_TH += own_TH
            else:
                token_X, part_XH = next(parts)
                total_TH[token_X] += part_XH  # a token is at most once in each part, so nothing is lost
        return total_TH

    def _others(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self.context.comm.rank]

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """To each distinct remote node once, then inside it to the ranks of the experts; the same way back.

        Uniform routing: every rank relays as much for others as others do for it.
        """
        tokens, ranks, nodes = problem.num_tokens, problem.ranks, min(problem.nodes, problem.ranks)
        model, top_k = problem.config.model, problem.config.router.top_k
        far = tokens * expected_groups(model.num_experts, top_k, nodes) * (nodes - 1) / nodes
        per_node = ranks / nodes
        near = tokens * problem.ranks_per_token * (per_node - 1) / per_node
        return Volume(far + near, far + near, 6, far_rows=far)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        """All tokens of all ranks may want an expert of this one."""
        return problem.num_tokens * problem.ranks

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """Rows that a rank relays, worst routing: a token of every rank of its place, packed, and their sums in f32."""
        row = packed_row_bytes(problem.dtype, problem.config.model.hidden_size, problem.config.router.top_k)
        return problem.nodes * problem.num_tokens * (2 * row + 4 * problem.config.model.hidden_size)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Needs several nodes, all of one size."""
        reasons = super().reasons_against(problem)
        if problem.ranks > 1 and problem.nodes == 1:
            fix = "parallel.ranks_per_node, or kernel.prepare_finalize = all_to_all"
            reasons.append(Reason("fabric", f"relays between nodes, all {problem.ranks} ranks share one", fix))
        elif problem.nodes > 1:
            reasons += _reasons_of_sizes(Nodes.of(problem.ranks, problem.ep_ranks_per_node))
        return reasons


def _reasons_of_sizes(nodes: Nodes) -> list[Reason]:
    if len(set(nodes.sizes)) <= 1:
        return []
    sizes = ", ".join(map(str, nodes.sizes))
    return [Reason("fabric", f"needs nodes of equal size, these have {sizes} ranks", "parallel.ranks_per_node")]


def _added(back_XH: Tensor, within: Leg) -> Tensor:
    """Sums of each held row over the ranks of this node, in rank order, in f32."""
    total_XH = torch.zeros((within.held, back_XH.shape[1]), dtype=torch.float32, device=back_XH.device)
    sizes = list(within.sent)
    for row_X, part_XH in zip(torch.split(within.row_X, sizes), torch.split(back_XH, sizes), strict=True):
        total_XH[row_X] += part_XH  # a row is at most once in each part
    return total_XH


def _no_rows(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=like.device)
