"""Monolithic experts, which take router logits and route internally, and the kernel that runs them on several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.router import RouterConfig
from moe_mk.experts.base import ExpertsContext, ExpertsTraits, default_workspace_bytes, reasons_of_traits
from moe_mk.flight import Flight, InFlight
from moe_mk.placement.expert_map import PlacementTables
from moe_mk.registry import Registry
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Spans
from moe_mk.weights.expert_weights import Weights, on_device
from moe_mk.weights.scan import Progress


@dataclass(frozen=True)
class MonolithicContext:
    """The arguments of monolithic experts: those of experts, and those of routing."""

    experts: ExpertsContext
    router: RouterConfig
    tables: PlacementTables
    rank: int


class MonolithicExperts(ABC):
    """Experts that route internally."""

    traits: ClassVar[ExpertsTraits]
    dispatches_itself: ClassVar[bool] = False
    """Whether the kernel also moves tokens between ranks (a mega-kernel); no gather is added then."""

    def __init__(self, context: MonolithicContext) -> None:
        self.context = context

    @abstractmethod
    def run(self, x_RH: Tensor, router_logits_RE: Tensor, bias_E: Tensor | None, weights: Weights) -> Tensor:
        """Route and apply this rank's experts: (R, H) partial sums in the layer's dtype."""

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """Convert weights to the layout that `run` reads. Never mutates them. on_progress: as of `FusedExperts`."""
        return on_device(weights, self.context.experts.device)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """All reasons why these experts cannot run the problem."""
        model, router = problem.config.model, problem.config.router
        held = {
            f", and router.kind = {router.kind} is another distribution's": router.kind != "topk",
            ", by scores alone; this layer chooses experts by token id":
                router.hash_vocabulary is not None or router.first_image_token is not None,
            ", and this layer multiplies the input of experts by routing weights": router.weight_on_input,
            ", and this layer scales routing weights or normalises its input":
                router.has_expert_scale or model.input_norm is not None,
            ", and this layer has experts without weights": model.num_zero_experts > 0,
            ", and this layer has shared experts that the router scores": model.num_fused_shared_experts > 0,
        }  # fmt: skip
        inside = [Reason("routing", f"routes inside{what}") for what, holds in held.items() if holds]
        return [*reasons_of_traits(cls.traits, problem), *inside]

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Upper bound of the bytes one run allocates for `rows` rows, beyond its inputs and weights."""
        return default_workspace_bytes(problem, rows)


@dataclass(frozen=True)
class MonolithicKernel:
    """Experts that route inside, and around them the naive data-parallel path: gather tokens and logits, scatter sums.

    That is needed where several ranks have tokens of their own and the kernel does not dispatch by itself.
    Source of the rule: vLLM 0.33, `do_naive_dispatch_combine` of its MoE runner (sequence parallel included).
    """

    comm: Communicator
    experts: MonolithicExperts
    gathers: bool
    spans: Spans

    routes_inside: ClassVar[bool] = True
    is_partial: ClassVar[bool] = False
    can_be_prepared: ClassVar[bool] = False

    @classmethod
    def build(cls, name: str, context: MonolithicContext, comm: Communicator, spans: Spans) -> Self:
        """Build the kernel of the experts of a name."""
        backend = MONOLITHIC[name]
        return cls(comm, backend(context), comm.size > 1 and not backend.dispatches_itself, spans)

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


MONOLITHIC: Registry[type[MonolithicExperts]] = Registry("monolithic experts backend", MonolithicExperts)
MONOLITHIC.builtin({"moe_mk.experts.reference": "reference_monolithic"})
