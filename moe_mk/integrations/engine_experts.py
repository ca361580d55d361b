"""Routed experts over weights of an engine: the common part of the adapters.

The engine computes routing, communication and shared experts; this module computes the experts of one rank, with
the backend that the oracle selects. Inference only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem
from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.external.device import profile_here
from moe_mk.external.library import installed
from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.layer.custom_op import Operator
from moe_mk.layer.fused_forward import can_be_called, record_as_stages
from moe_mk.layer.moe_layer import is_untraced
from moe_mk.oracle import Decision, select
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.no_ep import NoEP
from moe_mk.quant.plain import BF16, plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.shapes import expect
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import ExpertWeights, Weights

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
IDS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class EngineWeights:
    """Unquantised experts of one rank as engines keep them."""

    w13: Tensor
    """(E, 2I, H): gate rows, then up rows; (E, I, H) if not gated."""
    w2: Tensor
    """(E, H, I)."""
    activation: str = "silu"
    gated: bool = True


class EngineExperts:
    """The experts of one layer on one rank, with a selected backend and converted weights.

    name: for messages. settings: bare keys of `MoEConfig.kernel`, for instance experts="torch_cpu".
    Raises ShapeError for inconsistent weights, UnsupportedError with every reason if no backend is eligible.
    """

    def __init__(
        self, name: str, weights: EngineWeights, *, top_k: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        experts, hidden, inner = weights.w2.shape
        rows = 2 * inner if weights.gated else inner
        expect(f"{name}.w2", weights.w2, "E H I", FLOATS)
        expect(f"{name}.w13", weights.w13, "E R H", weights.w2.dtype, weights.w2.device, E=experts, R=rows, H=hidden)
        self.name, self.num_experts, self.hidden_size = name, int(experts), int(hidden)
        self.decision: Decision = select(_problem(name, weights, min(top_k, int(experts)), dict(settings or {})))
        kernel = assemble(self.decision, Parts(ExpertMap.linear(self.num_experts, 1), weights.w2.device))
        assert isinstance(kernel, FusedMoEKernel)
        self.kernel, self.dtype = kernel, self.decision.problem.dtype.dtype
        self.weights = self._laid_out(weights)
        direct = type(kernel.prepare_finalize) is NoEP and kernel.prepare_finalize.context.wire == BF16
        tables = kernel.prepare_finalize.context.tables
        self._routed = (
            kernel.experts.fuse_experts(self.weights, tables, 0) if direct and self.dtype is torch.bfloat16 else None
        )
        self._entry = EXPERTS_OF_ENGINES.enter(self)

    @property
    def backend(self) -> str:
        """The experts backend that multiplies."""
        return self.decision.chosen.experts

    def _laid_out(self, weights: EngineWeights) -> Weights:
        scheme = plain(weights.w2.dtype)
        w13, w2 = QuantTensor(weights.w13.detach(), None, scheme), QuantTensor(weights.w2.detach(), None, scheme)
        return self.kernel.experts.relayout(ExpertWeights(w13, w2, gated=weights.gated))

    def __call__(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """(T, H) with weights (T, K) and ids (T, K) of this rank's experts to (T, H), weighted and summed.

        Ids outside this rank's experts are skipped. Weights must be normalised and scaled.
        """
        self._check(hidden_states, topk_weights, topk_ids)
        if is_untraced(hidden_states):
            return self.run(hidden_states, topk_weights, topk_ids)
        out: Tensor = engine_experts(hidden_states, topk_weights, topk_ids, self._entry)
        return out

    def _check(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        if (
            x_TH.dtype is self.dtype
            and x_TH.dim() == 2
            and x_TH.shape[1] == self.hidden_size
            and ids_TK.dim() == 2
            and ids_TK.dtype in IDS
            and ids_TK.shape[0] == x_TH.shape[0]
            and ids_TK.device == x_TH.device
            and weights_TK.shape == ids_TK.shape
            and not x_TH.requires_grad
        ):
            return
        if torch.is_grad_enabled() and x_TH.requires_grad:
            raise UnsupportedError(f"gradients through {self.name}", ["inference only; run under torch.no_grad()"])
        expect("hidden_states", x_TH, "T H", self.dtype, H=self.hidden_size)
        expect("topk_ids", ids_TK, "T K", IDS, x_TH.device, T=x_TH.shape[0])
        if weights_TK.shape != ids_TK.shape:
            raise ShapeError(f"topk_weights is {tuple(weights_TK.shape)}, topk_ids is {tuple(ids_TK.shape)}")

    def run(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """The implementation of the operator."""
        x_TH = x_TH if x_TH.is_contiguous() else x_TH.contiguous()
        if self._routed is not None and x_TH.is_cpu:
            if ids_TK.dtype is torch.int64:  # all ids out of range are skipped, those beyond int32 as well
                ids_TK = ids_TK.clamp(-1, self.num_experts)
            ids_TK, weights_TK = ids_TK.to(torch.int32).contiguous(), weights_TK.to(torch.float32).contiguous()
            if can_be_called(x_TH, ids_TK, weights_TK):
                y_TH = self._routed(x_TH, ids_TK, weights_TK, None, skip=True)
                record_as_stages(self.kernel, y_TH)
                return y_TH
        with torch.no_grad():
            here = (ids_TK >= 0) & (ids_TK < self.num_experts)
            ids = torch.where(here, ids_TK, -1).to(torch.int32)
            routing = Routing(ids, weights_TK.to(torch.float32).masked_fill(~here, 0.0))
            return wait(self.kernel.steps(x_TH, routing, self.weights))


def _run(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, entry: Tensor) -> Tensor:
    return EXPERTS_OF_ENGINES.owner(entry).run(hidden_states, topk_weights, topk_ids)


EXPERTS_OF_ENGINES: Operator[EngineExperts] = Operator(
    "engine_experts", "(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor entry) -> Tensor", _run
)
"""(T, H), weights (T, K) and ids (T, K) to (T, H): one node of a graph, so that engines can compile around it."""
engine_experts = EXPERTS_OF_ENGINES.call


class HeldExperts:
    """For engines that pass their weights with every call: converted once, and again when they change."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[tuple[object, ...], Sequence[Tensor], EngineExperts]] = {}

    def of(self, tensors: Sequence[Tensor], build: Callable[[], EngineExperts]) -> EngineExperts:
        """The experts over some tensors. They are kept alive, so that no other tensor can take their address."""
        stamp = tuple((t.data_ptr(), t.dtype, t.shape, 0 if t.is_inference() else t._version) for t in tensors)
        held = self._held.get(tensors[0].data_ptr())
        if held is not None and held[0] == stamp:
            return held[2]
        made = build()
        self._held[tensors[0].data_ptr()] = (stamp, tuple(tensors), made)
        return made


def _problem(name: str, weights: EngineWeights, top_k: int, settings: dict[str, Any]) -> Problem:
    experts, hidden, inner = weights.w2.shape
    dtype = plain(weights.w2.dtype)
    model = {
        "name": name,
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "activation": weights.activation,
        "quant": {"weights": dtype.name},
    }
    config = MoEConfig.parse({"model": model, "router": {"top_k": top_k}}, name)
    config = config.with_(**({"prepare_finalize": "no_ep"} | settings))  # the engine moves the tokens
    return Problem(config, profile_here(weights.w2.device), dtype, config.kernel.max_num_tokens, installed())
