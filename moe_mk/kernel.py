"""One expert-parallel MoE forward: dispatch, experts, combine.

This is the file to read first. A transport and an experts backend meet here and nowhere else; an oracle chose them
because every step below is legal for the pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from moe_mk.experts.base import FusedExperts
from moe_mk.flight import Flight
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.tokens import ExpertOutput, Routing, Tokens
from moe_mk.trace.recorder import Spans
from moe_mk.weights.expert_weights import Weights


@dataclass(frozen=True)
class FusedMoEKernel:
    """A transport and an experts backend, put together."""

    prepare_finalize: PrepareFinalize
    experts: FusedExperts
    spans: Spans = field(default_factory=Spans)
    routes_inside: ClassVar[bool] = False
    can_be_prepared: ClassVar[bool] = True
    """Whether one native call may stand for its steps; a class that changes these sets it to False."""

    @property
    def is_partial(self) -> bool:
        """Whether each rank computes only its experts' share of tokens that all ranks have."""
        return self.prepare_finalize.traits.partial

    def steps(self, x_TH: Tensor, routing: Routing, weights: Weights) -> Flight[Tensor]:
        """Run the layer's routed experts on the tokens of this rank: (T, H) to (T, H).

        routing.ids_TK are physical experts. weights are those of this rank, in the layout of the experts backend.
        Whatever is raised here ends the call on every rank of the group, see `Communicator.fail`.
        """
        transport, ran = type(self.prepare_finalize), self.spans.ledger.ran
        with self.prepare_finalize.context.comm.abort_on_error():
            tokens = yield from self.prepare_finalize.prepare(x_TH, routing)
            ran("dispatch", transport, x_TH.nbytes)
            output = self.multiply(tokens, weights)
            y_TH = yield from self.prepare_finalize.finalize(output, tokens)
            ran("combine", transport, y_TH.nbytes)
            return y_TH

    def multiply(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """The part between dispatch and combine: permute, multiply, weight and sum as far as the transport requires."""
        with self.spans.span("permute"):
            local = permute(tokens, into=self.experts.traits.consumes)
        with self.spans.span("experts"):
            output = self.experts(local, weights)
        with self.spans.span("reduce"):
            return weight_and_reduce(output, local, until=self.prepare_finalize.traits.wants)
