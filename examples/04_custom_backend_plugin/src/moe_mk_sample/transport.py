"""A transport that sends every assignment as a row of its own, even where two experts of a token share a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.config.problem import Problem
from moe_mk.flight import Flight
from moe_mk.prepare_finalize.base import PrepareFinalize, TransportTraits, Volume
from moe_mk.prepare_finalize.packing import pack, unpack
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens


@dataclass(frozen=True)
class DispatchHandle:
    """What `finalize` needs to know of `prepare`."""

    token_X: Tensor
    """Which token each row that was sent belongs to."""
    sent: list[int]
    received: list[int]
    num_tokens: int


class OneByOne(PrepareFinalize):
    """One row an assignment: more bytes than `all_to_all`, and nothing to understand."""

    traits = TransportTraits(
        summary="one row an assignment, to show how a transport is written",
        kinds=frozenset({"cpu"}),  # where it has been tested
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=frozenset({"plain", "fp8"}),
        min_ranks=2,
        graph_safe=False,
        deterministic=False,  # index_add_ may add in any order
    )

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Counts first: a peer must size its buffer before rows arrive."""
        c = self.context
        token_X, k_X = torch.nonzero(routing.ids_TK >= 0, as_tuple=True)
        peer_X = c.tables.rank_of_P[routing.ids_TK[token_X, k_X].long()]
        order_X = torch.argsort(peer_X, stable=True)
        token_X, k_X, peer_X = token_X[order_X], k_X[order_X], peer_X[order_X]
        slot_X1 = c.tables.slot_of_P[routing.ids_TK[token_X, k_X].long()][:, None]
        rows_XB = pack(self.encode(x_TH)[token_X], slot_X1, routing.weights_TK[token_X, k_X][:, None])
        sent = torch.bincount(peer_X, minlength=c.comm.size).tolist()
        received = yield from c.comm.exchange_counts(sent, "dispatch counts")
        arrived_RB = yield from c.comm.all_to_all(rows_XB, sent, received, "dispatch")
        x_RH, ids_R1, weights_R1 = unpack(arrived_RB, c.wire, c.hidden_size, 1)
        handle = DispatchHandle(token_X, sent, received, x_TH.shape[0])
        return RowTokens(x_RH, ids_R1, weights_R1, c.num_slots, handle)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Add each row up at the token it came from, in f32."""
        handle = tokens.handle
        assert isinstance(handle, DispatchHandle)
        back_XH = yield from self.context.comm.all_to_all(output.y, handle.received, handle.sent, "combine")
        shape = (handle.num_tokens, self.context.hidden_size)
        total_TH = torch.zeros(shape, dtype=torch.float32, device=back_XH.device)
        return total_TH.index_add_(0, handle.token_X, back_XH.float()).to(output.y.dtype)

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """Every assignment that leaves its rank, under uniform routing."""
        remote = problem.num_tokens * problem.config.router.top_k * (problem.ranks - 1) / problem.ranks
        return Volume(dispatch_rows=remote, combine_rows=remote, collectives=3)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        """All assignments of all ranks that this rank's slots can take."""
        return problem.num_tokens * problem.ranks * min(problem.config.router.top_k, problem.slots)
