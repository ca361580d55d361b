"""The naive data-parallel path around kernels that route inside: gather hidden states and logits, scatter sums.

It is taken where several ranks have tokens of their own and the kernel does not dispatch by itself.
Source of the rule: vLLM 0.33, `do_naive_dispatch_combine` of its MoE runner (sequence parallel included).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.experts.monolithic import MonolithicExperts
from moe_mk.flight import Flight, InFlight
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Spans
from moe_mk.weights.expert_weights import Weights


@dataclass(frozen=True)
class MonolithicKernel:
    """Experts that route inside, with the naive path around them where it is needed."""

    comm: Communicator
    experts: MonolithicExperts
    gathers: bool
    spans: Spans

    routes_inside: ClassVar[bool] = True
    is_partial: ClassVar[bool] = False
    can_be_prepared: ClassVar[bool] = False

    def steps(self, x_TH: Tensor, routing: Routing, weights: Weights) -> Flight[Tensor]:
        """Run the layer's routed experts: (T, H) to (T, H). Of the routing, logits and bias of the gate are read."""
        logits_TE, bias_E = routing.logits_TE, routing.bias_E
        assert logits_TE is not None, "it routes inside"
        if not self.gathers:
            yield InFlight("dispatch")
            return self.experts.run(x_TH, logits_TE, bias_E, weights)
        with self.comm.abort_on_error():
            with self.spans.span("dispatch"):
                counts = yield from self.comm.gather_count(x_TH.shape[0], "dispatch counts")
                x_RH = yield from self.comm.all_gather(x_TH, counts, "dispatch")
                logits_RE = yield from self.comm.all_gather(logits_TE, counts, "dispatch logits")
            with self.spans.span("experts"):
                y_RH = self.experts.run(x_RH, logits_RE, bias_E, weights)
            with self.spans.span("combine"):
                return (yield from self.comm.reduce_scatter(y_RH, counts, "combine"))
