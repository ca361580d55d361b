"""Two-level all-to-all: a token crosses to each node at most once and is relayed there.

The default for many ranks on few nodes.

    dispatch   a row for each distinct remote node goes to its relay, the rank with the same local index in that node
    relay      relays forward rows, and ranks their own tokens, to the ranks of the node that hold an expert of them
    gather     sums return to the relay, which adds those of its node in rank order, in f32
    combine    one row for each token and node returns to the source rank, which adds nodes in their order, in f32

With `kernel.relay_tokens` tokens are sent in pieces of that size, and both levels form a pipeline: piece 1 crosses
while piece 0 is relayed, and the reverse in combine. The pieces do not change any bit of the result.

    between nodes   | piece 0 | piece 1 | piece 2 |                   as many pieces for every number of tokens,
    inside a node             | piece 0 | piece 1 | piece 2 |         since all ranks make the same calls

Ranks of different nodes communicate only if they have the same local index. The scheme is that of CANN's layered
dispatch, of DeepEP's internode kernels and of its hybrid mode; here it runs over any communicator, with nodes as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from moe_mk.comm.communicator import offsets
from moe_mk.comm.traffic import COUNT_BYTES, Nodes
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.traits import DEVICES
from moe_mk.errors import UnsupportedError
from moe_mk.flight import Flight, InFlight
from moe_mk.kernels.native.library import Native
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits, Volume
from moe_mk.prepare_finalize.packing import (
    ID_BYTES,
    SMALL_BYTES,
    WEIGHT_BYTES,
    Rows,
    apart,
    joined,
    opened,
    packed_row_bytes,
    side_by_side,
)
from moe_mk.prepare_finalize.rows.exchange import Borrowed, ReturnedSums, RowExchange, Write, kept_bytes
from moe_mk.prepare_finalize.rows.sums import Part, add_up, cut, total
from moe_mk.quant.wire import from_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens

X = TypeVar("X")


@dataclass(frozen=True)
class Leg:
    """One exchange of rows: which of the held rows went where, and how many came back from where."""

    row_X: Tensor
    """int64. The held row behind each row sent, peer by peer, ascending inside one."""
    sent: Sequence[int]
    received: Sequence[int]
    held: int
    """Rows that were there to choose from."""


@dataclass(frozen=True)
class DispatchHandle:
    """How the sums of one piece find back: the leg between nodes, then the leg inside this one."""

    between: Leg
    within: Leg


@dataclass(frozen=True)
class Held:
    """Rows that a relay has, numbered through: of earlier nodes, of its own tokens, of later nodes. None is moved."""

    pieces: tuple[Rows, ...]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def ids(self, top_k: int) -> Tensor:
        """(X, K) int32: the physical experts of each row."""
        first = self.pieces[0].widths[1] - top_k * (ID_BYTES + WEIGHT_BYTES)
        tails_XB = torch.cat([piece.tails[:, first : first + top_k * ID_BYTES] for piece in self.pieces])
        return from_bytes(tails_XB, torch.int32)

    def writer(self, row_X: Tensor, counts: Sequence[int]) -> Write:
        """Return a writer of held rows of these numbers, ascending inside the rows of each rank. counts: by rank."""
        if sum(map(len, self.pieces)) * sum(self.pieces[0].widths) < SMALL_BYTES:
            whole = joined(self.pieces)
            return lambda to, span: to.put(whole, row_X[span])
        starts = offsets([len(piece) for piece in self.pieces])
        edges = torch.tensor(starts, dtype=row_X.dtype, device=row_X.device)
        at = offsets(counts)

        def write(to: Rows, span: slice) -> None:
            for first, last in pairwise(at):
                if span.start <= first < last <= span.stop:
                    write_rank(to[first - span.start : last - span.start], row_X[first:last])

        def write_rank(to: Rows, chosen_X: Tensor) -> None:
            cuts = torch.searchsorted(chosen_X, edges).tolist()
            for piece, start, (first, last) in zip(self.pieces, starts, pairwise(cuts), strict=False):
                if first < last:
                    to[first:last].put(piece, chosen_X[first:last] - start)

        return write


def handed_on(parts: Sequence[Part], own: slice, going_XH: Tensor, native: Native | None) -> list[Part]:
    """Write what parts add up to for tokens of others to `going_XH`; what they have for those at `own`, to be added.

    Rounded to what travels only where it travels.
    """
    end = going_XH.shape[0] + own.stop - own.start
    if end * going_XH.shape[1] * torch.float32.itemsize < SMALL_BYTES:  # fewer operations count for more
        sums_XH = total([parts], (end, going_XH.shape[1]), going_XH.device)
        torch.cat((sums_XH[: own.start], sums_XH[own.stop :]), out=going_XH)
        numbers_T = torch.arange(own.stop - own.start, dtype=torch.int64, device=going_XH.device)
        return [Part(sums_XH[own], numbers_T)]
    earlier, mine, later = cut([0, own.start, own.stop, end], parts)
    add_up([earlier], going_XH[: own.start], native)
    add_up([later], going_XH[own.start :], native)
    return mine


def wanted(place_XK: Tensor, peer_of: Mapping[int, int]) -> dict[int, Tensor]:
    """For each peer the rows that name its place, the key of `peer_of`."""
    return {peer: torch.nonzero((place_XK == place).any(dim=1)).flatten() for place, peer in peer_of.items()}


@PREPARE_FINALIZE.register("hierarchical")
class Hierarchical(PrepareFinalize):
    """All-to-all between nodes among ranks of equal place, then all-to-all inside each node."""

    relays: ClassVar[bool] = True
    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="one copy of a token per remote node, relayed inside it; where links between nodes are the slow ones",
        kinds=DEVICES,
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=frozenset({"plain", "fp8"}),
        min_ranks=2,
        graph_safe=False,
        deterministic=True,
    )

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        rank, nodes = context.comm.rank, Nodes.of(context.comm.size, context.ranks_per_node)
        if reasons := _reasons_of_sizes(nodes):
            raise UnsupportedError("transport 'hierarchical' cannot serve this group", [str(r) for r in reasons])
        self.nodes, self._node, place = nodes, nodes.node_of_W[rank], nodes.local_index(rank)
        self._relays = [nodes.members(node)[place] for node in range(nodes.num_nodes)]
        """Of each node the rank of this rank's place; this rank itself in its own."""
        self._members = list(nodes.members(self._node))
        self._alone = len(self._members) == 1
        """Whether nodes are single ranks, so that nothing is relayed."""
        self._relay_of = {node: relay for node, relay in enumerate(self._relays) if self._alone or node != self._node}
        node_of_W = torch.tensor(nodes.node_of_W, dtype=torch.int64, device=context.device)
        self._node_of_P = node_of_W[context.tables.rank_of_P.long()]
        self._exchange = RowExchange(context.comm, context.device)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Send each token to the relays of its nodes, and forward received rows to the ranks of their experts."""
        c = self.context
        x_wire = self.encode(x_TH)
        rows = apart(x_wire, routing.ids_TK.to(torch.int32), routing.weights_TK.to(torch.float32))
        with c.spans.span("dispatch"):
            node_TK = torch.where(routing.ids_TK >= 0, self._node_of_P[routing.ids_TK.clamp_min(0).long()], -1)
            # Equally many pieces for any number of tokens, the last ones perhaps empty.
            step = c.relay_tokens or c.max_num_tokens
            ends = range(step, c.max_num_tokens, step)
            cuts = [*(slice(end - step, end) for end in ends), slice(ends[-1] if ends else 0, x_TH.shape[0])]
            pieces = [rows[cut] for cut in cuts]
            lists = [wanted(node_TK[cut], self._relay_of) for cut in cuts]
            legs = yield from self._exchange_counts(lists, self._relays, pieces, "dispatch counts")
            handles, arrived = yield from (self._dispatch_direct if self._alone else self._dispatch_relayed)(
                pieces, legs
            )
            x_RH, physical_RK, weights_RK = opened(joined(arrived), c.wire, c.top_k)
            received = list(chain.from_iterable(handle.within.received for handle in handles))
            c.comm.check_ids(physical_RK, received, len(self._node_of_P), "expert", "relay")
            expected_N = self.expected_of_rows(len(physical_RK))
            return self.local_rows(x_RH, physical_RK, weights_RK, tuple(handles), expected_N)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Return sums to the relays, add up those of this node, return them to their source, and add up the nodes."""
        handles = tokens.handle
        assert isinstance(handles, tuple)
        with self.context.spans.span("combine"):
            parts = torch.split(output.y, [sum(handle.within.received) for handle in handles])
            crossing: Flight[Tensor] | None = None
            totals: list[Tensor] = []
            for handle, part_RH in zip(handles, parts, strict=True):
                if self._alone:
                    leg, exchange = handle.between, self._exchange
                    back = yield from exchange.combine(part_RH, leg.row_X, leg.sent, leg.received, "combine", "gather")
                    totals.append(exchange.summed([back.parts], (leg.held, part_RH.shape[1]), part_RH.dtype))
                    exchange.scratch.give(back.memory)
                    continue
                within = handle.within
                back = yield from self._exchange.combine(part_RH, within.row_X, within.sent, within.received, "gather")
                if crossing is not None:
                    totals.append((yield from crossing))
                crossing = _begun(self._combine_nodes(back, handle.between, output.y))
            if crossing is not None:
                yield InFlight("combine")
                totals.append((yield from crossing))
            return totals[0] if len(totals) == 1 else torch.cat(totals)

    def _dispatch_relayed(
        self, pieces: Sequence[Rows], legs: Sequence[Leg]
    ) -> Flight[tuple[list[DispatchHandle], list[Rows]]]:
        """Dispatch over both levels: while a piece crosses nodes, the one before it is relayed."""
        handles, arrived = [], []
        crossing = _begun(self._cross(pieces[0], legs[0]))
        yield InFlight("dispatch")
        for number, (piece, between) in enumerate(zip(pieces, legs, strict=True)):
            crossed = yield from crossing
            if number + 1 < len(pieces):
                crossing = _begun(self._cross(pieces[number + 1], legs[number + 1]))
            others = side_by_side(crossed.rows, piece.values.shape[1])
            before = sum(between.received[: self.context.comm.rank])
            held = Held((others[:before], piece, others[before:]))
            lists = [wanted(self._rank_of(held, between), {rank: rank for rank in self._members})]
            (within,) = yield from self._exchange_counts(lists, self._members, [held], "relay counts")
            write = held.writer(within.row_X, within.sent)
            arrived.append(
                (yield from self._exchange.dispatch(write, piece.widths, within.sent, within.received, "relay"))
            )
            self._exchange.scratch.give(crossed)
            handles.append(DispatchHandle(between, within))
        return handles, arrived

    def _dispatch_direct(
        self, pieces: Sequence[Rows], legs: Sequence[Leg]
    ) -> Flight[tuple[list[DispatchHandle], list[Rows]]]:
        """Nodes of one rank: what has crossed is where it should be. Counted as if it were relayed to this rank."""
        handles, arrived, comm = [], [], self.context.comm
        for piece, leg in zip(pieces, legs, strict=True):
            write = Held((piece,)).writer(leg.row_X, leg.sent)
            rows = yield from self._exchange.dispatch(write, piece.widths, leg.sent, leg.received, "dispatch", "relay")
            comm.traffic.stayed("relay counts", COUNT_BYTES, comm.rank)
            arrived.append(rows)
            handles.append(DispatchHandle(leg, leg))
        return handles, arrived

    def _cross(self, piece: Rows, leg: Leg) -> Flight[Borrowed]:
        """Send rows to the relays of their nodes: the packed rows of others that this rank relays, by source."""
        exchange, row_bytes = self._exchange, sum(piece.widths)
        going, crossed = (exchange.take((sum(counts), row_bytes), torch.uint8) for counts in (leg.sent, leg.received))
        side_by_side(going.rows, piece.values.shape[1]).put(piece, leg.row_X)
        yield from self.context.comm.all_to_others(crossed.rows, going.rows, leg.sent, leg.received, "dispatch")
        exchange.scratch.give(going)
        return crossed

    def _combine_nodes(self, gathered: ReturnedSums, between: Leg, like_RH: Tensor) -> Flight[Tensor]:
        """Return sums of other ranks' tokens, and add up the nodes of this rank's own, in the dtype of `like_RH`."""
        (hidden, dtype), exchange = (like_RH.shape[1], like_RH.dtype), self._exchange
        before = sum(between.received[: self.context.comm.rank])  # rows of earlier nodes lie before this rank's tokens
        going, coming = (exchange.take((sum(counts), hidden), dtype) for counts in (between.received, between.sent))
        own = handed_on(gathered.parts, slice(before, before + between.held), going.rows, exchange.native)
        yield from self.context.comm.all_to_others(coming.rows, going.rows, between.received, between.sent, "combine")
        # In node order: the sum of this node is never rounded on the way.
        sizes = [between.sent[relay] for node, relay in enumerate(self._relays) if node != self._node]
        parts = map(Part, torch.split(coming.rows, sizes), torch.split(between.row_X, sizes))
        by_node = [own if node == self._node else [next(parts)] for node in range(self.nodes.num_nodes)]
        y_TH = exchange.summed(by_node, (between.held, hidden), dtype)
        exchange.scratch.give(going, coming, gathered.memory)
        return y_TH

    def _exchange_counts(
        self, lists: Sequence[dict[int, Tensor]], talks_to: Sequence[int], held: Sequence[Rows | Held], phase: str
    ) -> Flight[list[Leg]]:
        """Legs of several exchanges, once peers have sent their counts; only ranks in `talks_to` take part."""
        comm = self.context.comm
        sent_XW = [[len(row_of[peer]) if peer in row_of else 0 for peer in range(comm.size)] for row_of in lists]
        ones = [int(peer in talks_to) for peer in range(comm.size)]
        mine = torch.tensor([[sent[peer] for sent in sent_XW] for peer in talks_to], dtype=torch.int64, device="cpu")
        # Counts first: peers must size their buffers before rows arrive.
        theirs = yield from comm.all_to_all(mine, ones, ones, phase)
        counts_by = dict(zip(talks_to, theirs.tolist(), strict=True))
        received_XW = [[counts_by[p][n] if p in counts_by else 0 for p in range(comm.size)] for n in range(len(lists))]
        # A rank of this node forwards the rows of its place in every node.
        most = self.context.max_num_tokens * (1 if talks_to is self._relays else self.nodes.num_nodes)
        for counts_W in received_XW:
            comm.check_counts(counts_W, most, phase)
        none = torch.empty(0, dtype=torch.int64, device=self.context.device)
        row_X = [torch.cat([none, *(rows for _, rows in sorted(row_of.items()))]) for row_of in lists]
        return [Leg(*each) for each in zip(row_X, sent_XW, received_XW, map(len, held), strict=True)]

    def _rank_of(self, held: Held, between: Leg) -> Tensor:
        """(X, K): the rank of each assignment of held rows, -1 for nowhere. Raises CommError for ids of no expert."""
        ids_XK, comm = held.ids(self.context.top_k), self.context.comm
        counts = [between.held if rank == comm.rank else count for rank, count in enumerate(between.received)]
        comm.check_ids(ids_XK, counts, len(self._node_of_P), "expert", "dispatch")
        return self.context.tables.ranks(ids_XK)

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """To each distinct remote node once, then inside it to the ranks of the experts; the same way back.

        Uniform routing: every rank relays as much for others as others do for it.
        """
        kernel = problem.config.kernel
        pieces = -(-kernel.max_num_tokens // (kernel.relay_tokens or kernel.max_num_tokens))
        a_piece = 5 if problem.ranks > problem.nodes else 2  # nodes of one rank relay nothing
        return replace(super().volume(problem), collectives=1 + a_piece * pieces, pipelined=pieces > 1)

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """Rows that a rank relays, worst routing: a token of every rank of its place, packed, and their sums in f32."""
        row = packed_row_bytes(problem.sums, problem.config.model.hidden_size, problem.config.router.top_k)
        relayed = problem.nodes * problem.num_tokens * (2 * row + 4 * problem.config.model.hidden_size)
        return relayed + kept_bytes(problem)

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


def _begun(flight: Flight[X]) -> Flight[X]:
    """Start a flight; its first yield point is consumed, so other flights can overlap with it."""
    next(flight)
    return flight


def _reasons_of_sizes(nodes: Nodes) -> list[Reason]:
    if len(set(nodes.sizes)) <= 1:
        return []
    sizes = ", ".join(map(str, nodes.sizes))
    return [Reason("fabric", f"needs nodes of equal size, these have {sizes} ranks", "parallel.ranks_per_node")]
