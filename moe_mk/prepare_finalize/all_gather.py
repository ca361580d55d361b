"""All-gather + reduce-scatter: every rank sees all tokens, keeps those of its experts, and partial sums are added up.

Always works and moves the most: choose it for few ranks, or when most tokens have experts on most ranks.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from moe_mk.config.problem import Problem
from moe_mk.config.traits import DEVICES
from moe_mk.flight import Flight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportTraits, Volume
from moe_mk.prepare_finalize.packing import pack, unpack
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens


@PREPARE_FINALIZE.register("all_gather")
class AllGather(PrepareFinalize):
    """AG + RS over torch.distributed, uneven ranks included."""

    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="all-gather + reduce-scatter; always works, moves the most",
        kinds=DEVICES,
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=TransportTraits.ANY_WIRE,
        min_ranks=2,
        gathers=True,
        graph_safe=False,
        deterministic=True,
    )

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Gather counts, then rows with their physical ids; ids of other ranks become -1."""
        c = self.context
        rows_TB = pack(self.encode(x_TH), routing.ids_TK, routing.weights_TK)
        with c.spans.span("dispatch"):
            counts = yield from c.comm.gather_count(x_TH.shape[0], "dispatch counts")
            c.comm.check_counts(counts, c.max_num_tokens, "dispatch counts")
            gathered_RB = yield from c.comm.all_gather(rows_TB, counts, "dispatch")
            x_RH, physical_RK, weights_RK = unpack(gathered_RB, c.wire, c.hidden_size, c.top_k)
            c.comm.check_ids(physical_RK, counts, len(c.tables.rank_of_P), "expert", "dispatch")
            return self.local_rows(x_RH, physical_RK, weights_RK, counts, self.expected_of_tokens(sum(counts)))

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Each rank has a partial sum of every token: add them up on its source rank."""
        counts = tokens.handle
        assert isinstance(counts, list)
        with self.context.spans.span("combine"):
            return (yield from self.context.comm.reduce_scatter(output.y, counts, "combine"))

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """Each token goes to every other rank, and a partial sum of it comes from each."""
        others = problem.ranks - 1
        return Volume(problem.num_tokens * others, problem.num_tokens * others, 3)
