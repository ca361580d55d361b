"""The interface of monolithic experts, which take router logits and route internally.

With several ranks they need the tokens of all ranks: `runner/monolithic.py` gathers before and scatters after the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moe_mk.config.moe import RouterConfig
from moe_mk.config.problem import Problem, Reason
from moe_mk.experts.base import ExpertsContext, ExpertsTraits, default_workspace_bytes, reasons_of_traits
from moe_mk.placement.expert_map import PlacementTables
from moe_mk.registry import Registry
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


MONOLITHIC: Registry[type[MonolithicExperts]] = Registry("monolithic experts backend", MonolithicExperts)
MONOLITHIC.builtin({"moe_mk.experts.reference": "reference_monolithic"})
