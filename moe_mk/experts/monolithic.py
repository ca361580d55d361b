"""The interface of monolithic experts, which take router logits and route internally.

With several ranks they need the tokens of all ranks: `runner/monolithic.py` gathers before and scatters after the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.config.moe import RouterConfig
from moe_mk.config.problem import Problem, Reason
from moe_mk.experts.base import ExpertsContext, ExpertsTraits, default_workspace_bytes, reasons_of_traits
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.kernels.reference.grouped_topk import grouped_topk
from moe_mk.placement.expert_map import PlacementTables
from moe_mk.registry import Registry
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import Weights, on_device


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

    def relayout(self, weights: Weights) -> Weights:
        """Convert weights to the layout that `run` reads. Never mutates them."""
        return on_device(weights, self.context.experts.device)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """All reasons why these experts cannot run the problem."""
        text = "routes inside, by scores alone; this layer chooses experts by token id"
        by_id = [] if problem.config.router.hash_vocabulary is None else [Reason("routing", text)]
        return [*reasons_of_traits(cls.traits, problem), *by_id]

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Upper bound of the bytes one run allocates for `rows` rows, beyond its inputs and weights."""
        return default_workspace_bytes(problem, rows)


MONOLITHIC: Registry[type[MonolithicExperts]] = Registry("monolithic experts backend", MonolithicExperts)


@MONOLITHIC.register("reference_monolithic")
class ReferenceMonolithic(MonolithicExperts):
    """The reference router kernel and the reference experts in one call."""

    traits = ReferenceExperts.traits

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Logits, ids and weights of all rows, and the workspace of the reference experts."""
        logits = rows * (problem.config.model.num_experts + 2 * problem.config.router.top_k) * 4
        return logits + ReferenceExperts.workspace_bytes(problem, rows)

    def run(self, x_RH: Tensor, router_logits_RE: Tensor, bias_E: Tensor | None, weights: Weights) -> Tensor:
        """Route, keep the assignments of this rank, multiply."""
        r, tables = self.context.router, self.context.tables
        score_dtype = router_logits_RE.dtype if r.router_dtype == "model" else torch.float32
        weights_RK, ids_RK = grouped_topk(
            router_logits_RE, r.top_k, r.num_expert_group, r.topk_group, r.scoring_func, bias_E,
            r.renormalize, r.routed_scaling_factor, score_dtype,
        )  # fmt: skip
        slots_RK = tables.local_slots(tables.to_physical(ids_RK, salt=0), self.context.rank)
        x = self.context.experts.dtype.quantize(x_RH)
        tokens = RowTokens(x, slots_RK, weights_RK, self.context.experts.num_slots)
        return ReferenceExperts(self.context.experts).run(tokens, weights).y
