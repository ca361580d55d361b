"""Every EP rank already has every token: no dispatch at all, each rank computes its experts' share, one late sum.

Choose it when tensor-parallel attention leaves the same tokens on all ranks; sending them would compute them W times.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from moe_mk.config.problem import Problem
from moe_mk.config.traits import DEVICES
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportTraits, Volume
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens


@PREPARE_FINALIZE.register("replicated")
class Replicated(PrepareFinalize):
    """Local routing mask and a late all-reduce: EP + TP without all-to-all."""

    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="same tokens on all ranks: local mask, one late all-reduce",
        kinds=DEVICES,
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        min_ranks=2,
        tokens=frozenset({"replicated"}),
        partial=True,
        graph_safe=True,
        deterministic=True,
    )

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Keep the assignments of this rank's experts."""
        yield InFlight("dispatch")
        expected_N = self.expected_of_tokens(x_TH.shape[0])
        return self.local_rows(self.encode(x_TH), routing.ids_TK, routing.weights_TK, None, expected_N)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Leave the partial sum to the layer, which adds shared experts and tensor-parallel slices in the same pass."""
        yield InFlight("combine")
        return output.y

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """A ring all-reduce sends each row 2 (W - 1) / W times."""
        return Volume(0, problem.num_tokens * 2 * (problem.ranks - 1) / problem.ranks, 1)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        return problem.num_tokens
