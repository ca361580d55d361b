"""Two levels: a token crosses to each remote node once, and is handed on inside that node; sums meet there first.

The choice where links between nodes are much slower than inside one, above all with routing limited to few nodes.

    dispatch   a row for each distinct remote node goes to its relay, the rank of equal place in that node
    relay      relays forward rows, and ranks their own tokens, to the ranks of the node that hold an expert of them
    gather     sums return to the relay, which adds those of its node in rank order, in f32
    combine    one row a token and node goes home, where nodes are added in their order, in f32

With `kernel.relay_tokens` tokens travel in pieces of so many, and both levels are a pipeline: piece 1 crosses while
piece 0 is relayed, and the other way round on the way home. The pieces change no bit of a token.

    between nodes   | piece 0 | piece 1 | piece 2 |                   as many pieces for every number of tokens,
    inside a node             | piece 0 | piece 1 | piece 2 |         since all ranks make the same calls

Ranks of different nodes talk only if they have equal places. The scheme is that of CANN's layered dispatch, of DeepEP's
internode kernels and of its hybrid mode; here it runs over any communicator, with nodes as data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.comm.traffic import Nodes
from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import UnsupportedError
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits, Volume
from moe_mk.prepare_finalize.hierarchical_legs import Leg, WayHome, added, joined
from moe_mk.prepare_finalize.packing import ID_BYTES, WEIGHT_BYTES, pack, packed_row_bytes, unpack
from moe_mk.quant.wire import from_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens


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
        self._relay_of = {node: relay for node, relay in enumerate(self._relays) if node != self._node}
        self._members = list(nodes.members(self._node))
        node_of_W = torch.tensor(nodes.node_of_W, dtype=torch.int64, device=context.device)
        self._node_of_P = node_of_W[context.tables.rank_of_P.long()]

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Send each token to the relays of its nodes, and what lies here on to the ranks of its experts."""
        c = self.context
        rows_TB = pack(self.encode(x_TH), routing.ids_TK.to(torch.int32), routing.weights_TK.to(torch.float32))
        with c.spans.span("dispatch"):
            node_TK = torch.where(routing.ids_TK >= 0, self._node_of_P[routing.ids_TK.clamp_min(0).long()], -1)
            pieces = [rows_TB[cut] for cut in self._cuts(x_TH.shape[0])]
            lists = [self._wanted(node_TK[cut], self._relay_of) for cut in self._cuts(x_TH.shape[0])]
            legs = yield from self._told(lists, self._relays, pieces, "dispatch counts")
            ways, arrived = [], []
            crossing = self._begin(pieces[0][legs[0].row_X], legs[0].sent, legs[0].received, "dispatch")
            yield InFlight("dispatch")
            for number, (piece_TB, between) in enumerate(zip(pieces, legs, strict=True)):
                landed_XB = yield from crossing
                if number + 1 < len(pieces):
                    after = legs[number + 1]
                    crossing = self._begin(pieces[number + 1][after.row_X], after.sent, after.received, "dispatch")
                held_XB = self._in_node_order(piece_TB, landed_XB, between)
                lists = [self._wanted(self._rank_of(held_XB), {rank: rank for rank in self._members})]
                (within,) = yield from self._told(lists, self._members, [held_XB], "relay counts")
                rows_XB = held_XB[within.row_X]
                arrived.append((yield from c.comm.all_to_all(rows_XB, within.sent, within.received, "relay")))
                ways.append(WayHome(between, within))
            x_RH, physical_RK, weights_RK = unpack(joined(arrived), c.wire, c.hidden_size, c.top_k)
            return self.local_rows(x_RH, physical_RK, weights_RK, handle=tuple(ways))

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Return sums to the relays, add up those of this node, send them home, and add up the nodes."""
        comm, ways, dtype = self.context.comm, tokens.handle, output.y.dtype
        assert isinstance(ways, tuple)
        with self.context.spans.span("combine"):
            parts = torch.split(output.y, [sum(home.within.received) for home in ways])
            crossing: Flight[Tensor] | None = None
            totals: list[Tensor] = []
            for home, part_RH in zip(ways, parts, strict=True):
                back_XH = yield from comm.all_to_all(part_RH, home.within.received, home.within.sent, "gather")
                if crossing is not None:
                    totals.append((yield from crossing))
                crossing = self._home(added(back_XH, home.within), home.between, dtype)
                next(crossing)
            assert crossing is not None
            yield InFlight("combine")
            return joined([*totals, (yield from crossing)])

    def _home(self, partial_XH: Tensor, between: Leg, dtype: torch.dtype) -> Flight[Tensor]:
        """Send the sums of foreign tokens home, and add up the nodes of this rank's own."""
        before = sum(between.received[: self.context.comm.rank])  # rows of earlier nodes lie before this rank's tokens
        own = slice(before, before + between.held)
        foreign_XH = torch.cat((partial_XH[: own.start], partial_XH[own.stop :])).to(dtype)
        parts_XH = yield from self.context.comm.all_to_all(foreign_XH, between.received, between.sent, "combine")
        return self._sum_of_nodes(partial_XH[own], parts_XH, between).to(dtype)

    def _begin(self, rows_XB: Tensor, sent: Sequence[int], received: Sequence[int], phase: str) -> Flight[Tensor]:
        """A flight that is in the air already; its first hop is left to whatever flies meanwhile."""
        flight = self.context.comm.all_to_all(rows_XB, sent, received, phase)
        next(flight)
        return flight

    def _cuts(self, num_tokens: int) -> list[slice]:
        """Equally many pieces for any number of tokens, the last ones perhaps empty."""
        step = self.context.relay_tokens or self.context.max_num_tokens
        ends = range(step, self.context.max_num_tokens, step)
        return [slice(end - step, end) for end in ends] + [slice(ends[-1] if ends else 0, num_tokens)]

    def _wanted(self, place_XK: Tensor, peer_of: dict[int, int]) -> dict[int, Tensor]:
        """For each peer the rows that name its place, the key of `peer_of`."""
        return {peer: torch.nonzero((place_XK == place).any(dim=1)).flatten() for place, peer in peer_of.items()}

    def _told(
        self, lists: Sequence[dict[int, Tensor]], talks_to: Sequence[int], held: Sequence[Tensor], phase: str
    ) -> Flight[list[Leg]]:
        """Legs of several exchanges, once peers have told how many rows come; only `talks_to` are spoken to."""
        comm, none = self.context.comm, torch.empty(0, dtype=torch.int64, device=held[0].device)
        sent_XW = [[len(row_of.get(peer, none)) for peer in range(comm.size)] for row_of in lists]
        ones = [int(peer in talks_to) for peer in range(comm.size)]
        mine = torch.tensor([[sent[peer] for sent in sent_XW] for peer in talks_to], dtype=torch.int64, device="cpu")
        # Counts first: peers must size their buffers before rows arrive.
        theirs = yield from comm.all_to_all(mine, ones, ones, phase)
        told_by = dict(zip(talks_to, theirs.tolist(), strict=True))
        received_XW = [[told_by[p][n] if p in told_by else 0 for p in range(comm.size)] for n in range(len(lists))]
        return [
            Leg(torch.cat([row_of[peer] for peer in sorted(row_of)] or [none]), tuple(sent), tuple(received), len(rows))
            for row_of, sent, received, rows in zip(lists, sent_XW, received_XW, held, strict=True)
        ]

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
        far = tokens * problem.nodes_per_token * (nodes - 1) / nodes
        per_node = ranks / nodes
        near = tokens * problem.ranks_per_token * (per_node - 1) / per_node
        kernel = problem.config.kernel
        pieces = -(-kernel.max_num_tokens // (kernel.relay_tokens or kernel.max_num_tokens))
        return Volume(far + near, far + near, 1 + 5 * pieces, far_rows=far, pipelined=pieces > 1)

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
