"""No expert parallelism: all experts are here, nothing moves. Choose it on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from moe_mk.config.problem import Problem
from moe_mk.config.traits import DEVICES
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, LayerParts, PrepareFinalize, TransportTraits, Volume
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens

if TYPE_CHECKING:
    from moe_mk.kernels.native.layer import LayerCall


@PREPARE_FINALIZE.register("no_ep")
class NoEP(PrepareFinalize):
    """Hand tokens to the experts of this rank as they are."""

    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="one rank holds all experts, nothing moves",
        kinds=DEVICES,
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        max_ranks=1,
        tokens=frozenset({"sharded", "replicated"}),
        graph_safe=True,
        deterministic=True,
    )

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """One yield point, so that shared experts and micro-batches run in the same order as on many ranks."""
        yield InFlight("dispatch")
        # On one rank the number of a physical expert is its slot.
        return RowTokens(self.encode(x_TH), routing.ids_TK, routing.weights_TK, self.context.num_slots)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """The reduced rows are the tokens."""
        yield InFlight("combine")
        return output.y

    def fuse_layer(self, parts: LayerParts) -> LayerCall | None:
        """The call of the experts: nothing is exchanged."""
        return parts.experts.alone(parts.shared, parts.gating, parts.tables, parts.ran)

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """Return an empty volume: nothing is sent."""
        return Volume(0, 0, 0)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        return problem.num_tokens
