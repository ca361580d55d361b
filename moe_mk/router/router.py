"""The router of one layer: its settings as plain values, logits in, `Routing` out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from moe_mk.errors import ShapeError, expect_kind
from moe_mk.registry import Registry, did_you_mean
from moe_mk.router.gate import RouterDtype, check_router_dtype
from moe_mk.router.topk import (
    IDS,
    check_tensors,
    fused_kernels,
    group_problems,
    grouped_topk,
    ids_problems,
    raise_all,
    scoring_problems,
)
from moe_mk.shapes import expect
from moe_mk.tokens import Routing

if TYPE_CHECKING:
    from moe_mk.config.router import RouterConfig

Simulation = Literal["balanced", "random"]


@dataclass(frozen=True)
class Router:
    """Choose experts for tokens from their logits; a value without state, so equal routers route equally.

    simulate: for benchmarks, ignore the values of the logits. "balanced": every expert gets as many assignments as any
    other, give or take one. "random": experts drawn uniformly without repetition, the same draw at every call.
    ids_dtype: of the ids that a call returns, int32 or int64; layers take either.
    """

    top_k: int
    num_expert_group: int = 1
    topk_group: int = 1
    scoring_func: str = "softmax"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    router_dtype: RouterDtype = "float32"
    simulate: Simulation | None = None
    ids_dtype: torch.dtype = torch.int32

    def __post_init__(self) -> None:
        for name in ("top_k", "num_expert_group", "topk_group"):
            expect_kind(f"Router.{name}", getattr(self, name), int)
        expect_kind("Router.routed_scaling_factor", self.routed_scaling_factor, int, float)
        expect_kind("Router.scoring_func", self.scoring_func, str)
        expect_kind("Router.renormalize", self.renormalize, bool)
        expect_kind("Router.simulate", self.simulate, str, type(None))
        check_router_dtype(self.router_dtype)
        problems = scoring_problems(self.scoring_func, self.routed_scaling_factor, torch.float32)
        if self.top_k < 1:
            problems.append(f"top_k={self.top_k} is below 1")
        if not 1 <= self.topk_group <= self.num_expert_group:
            problems.append(f"topk_group={self.topk_group} is not in [1, num_expert_group={self.num_expert_group}]")
        if self.simulate is not None and self.simulate not in get_args(Simulation):
            problems.append(f"simulate={self.simulate!r} is unknown{did_you_mean(self.simulate, get_args(Simulation))}")
        raise_all("Router", problems + ids_problems(self.ids_dtype))

    def __call__(self, router_logits: Tensor, e_score_correction_bias: Tensor | None = None) -> Routing:
        """Route: logits [T, E] and an optional bias [E] to ids [T, K] and weights f32 [T, K].

        router_dtype "model" keeps sigmoid scores in the dtype of the logits; "float32" scores in f32 whatever they are.
        """
        if self.simulate is not None:
            return self._simulated(router_logits, e_score_correction_bias)
        bias, score_dtype, ids_dtype = e_score_correction_bias, self._score_dtype(router_logits), self.ids_dtype
        weighed, groups = (self.renormalize, self.routed_scaling_factor), (self.num_expert_group, self.topk_group)
        weights_TK, ids_TK = grouped_topk(
            router_logits, self.top_k, *groups, self.scoring_func, bias, *weighed, score_dtype=score_dtype,
            ids_dtype=ids_dtype,
        )  # fmt: skip
        return Routing(ids_TK, weights_TK)

    def placed(
        self, router_logits: Tensor, e_score_correction_bias: Tensor | None, load_E: Tensor, physical_of_E: Tensor
    ) -> tuple[Routing, Routing] | None:
        """Logical and physical routing of a layer with one copy of each expert, counted, in one launch.

        load_E: int64, to which the choices are added. physical_of_E: int32. None where no kernel computes it; nothing
        is counted then. The same results as `__call__`, a count and a table look-up. Raises as `__call__`.
        """
        bias, (groups, kept) = e_score_correction_bias, (self.num_expert_group, self.topk_group)
        score_dtype = self._score_dtype(router_logits)
        check_tensors(router_logits, bias)
        raise_all("Router", group_problems(router_logits.shape[1], self.top_k, groups, kept))
        fused = fused_kernels(router_logits, self.top_k, groups, self.scoring_func, bias, score_dtype)
        if fused is None or self.simulate is not None or not load_E.is_contiguous():
            return None
        weights_TK, ids_TK, physical_TK = fused.grouped_topk(
            router_logits, self.top_k, groups, kept, self.scoring_func, bias, self.renormalize,
            self.routed_scaling_factor, score_dtype, (load_E, physical_of_E),
        )  # fmt: skip
        return Routing(ids_TK, weights_TK), Routing(physical_TK, weights_TK)

    def _score_dtype(self, router_logits: Tensor) -> torch.dtype:
        return router_logits.dtype if self.router_dtype == "model" else torch.float32

    def _simulated(self, router_logits: Tensor, e_score_correction_bias: Tensor | None) -> Routing:
        check_tensors(router_logits, e_score_correction_bias)
        (num_tokens, num_experts), device = router_logits.shape, router_logits.device
        # Groups do not bind a simulation, but what could not be routed must not be simulated either.
        raise_all("Router", group_problems(num_experts, self.top_k, self.num_expert_group, self.topk_group))
        if self.simulate == "balanced":
            ids_X = torch.arange(num_tokens * self.top_k, dtype=torch.int64, device=device) % num_experts
            ids_TK = ids_X.view(num_tokens, self.top_k)
        else:
            generator = torch.Generator(device).manual_seed(0)
            draw_TE = torch.rand(num_tokens, num_experts, dtype=torch.float32, device=device, generator=generator)
            ids_TK = draw_TE.topk(self.top_k, -1).indices
        weight = self.routed_scaling_factor / self.top_k
        weights_TK = torch.full(ids_TK.shape, weight, dtype=torch.float32, device=device)
        return Routing(ids_TK.to(self.ids_dtype), weights_TK)


class RouterKind(ABC):
    """A router of another distribution, which `router.kind` names. One object serves one layer.

    Objects of one class with the same settings are equal: copies of a layer have copies of its router.
    """

    def __init__(self, config: RouterConfig, num_experts: int) -> None:
        """num_experts: those that the gate scores."""
        self.config, self.num_experts = config, num_experts

    @abstractmethod
    def __call__(self, router_logits: Tensor, e_score_correction_bias: Tensor | None = None) -> Routing:
        """Route: logits [T, E] and an optional bias f32 [E] to ids [T, K] and weights f32 [T, K].

        Logits are f32, or of the layer's dtype with router_dtype = model. Weights are renormalised and scaled as the
        settings ask; an id of -1 is none.
        """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RouterKind) or type(other) is not type(self):
            return False
        return (other.config, other.num_experts) == (self.config, self.num_experts)

    def __hash__(self) -> int:
        return hash((type(self), self.config, self.num_experts))


ROUTERS: Registry[type[RouterKind]] = Registry("router", RouterKind, "moe_mk.routers")


@dataclass(frozen=True)
class OwnRouter:
    """A router of the program or of another distribution. Checks what it returns."""

    choose: Callable[[Tensor, Tensor | None], Routing]
    top_k: int
    num_experts: int

    def __call__(self, router_logits: Tensor, e_score_correction_bias: Tensor | None = None) -> Routing:
        """Route [T, E] logits. Raises ShapeError for a routing that a layer cannot use; ids are read on a CPU only."""
        routing, (num_tokens, _) = self.choose(router_logits, e_score_correction_bias), router_logits.shape
        if not isinstance(routing, Routing):
            raise ShapeError(f"router {self.name} returned {type(routing).__name__}, not moe_mk.tokens.Routing")
        sizes, where = {"T": num_tokens, "K": self.top_k}, router_logits.device
        expect(f"ids_TK of router {self.name}", routing.ids_TK, "T K", IDS, where, **sizes)
        expect(f"weights_TK of router {self.name}", routing.weights_TK, "T K", torch.float32, where, **sizes)
        if where.type == "cpu" and routing.ids_TK.numel():
            lowest, highest = (int(each) for each in torch.aminmax(routing.ids_TK))
            if lowest < -1 or highest >= self.num_experts:
                stated = f"ids from {lowest} to {highest}, the layer has experts 0 to {self.num_experts - 1}"
                raise ShapeError(f"router {self.name} returned {stated}, and -1 for none")
        return routing

    @property
    def name(self) -> str:
        """Module and name of the function, or of the class."""
        named = self.choose if hasattr(self.choose, "__qualname__") else type(self.choose)
        return f"{named.__module__}.{named.__qualname__}"
