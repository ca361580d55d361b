"""Routed experts over weights of an engine: the common part of the adapters.

The engine computes routing, communication and shared experts; this module computes the experts of one rank, with
the backend that the oracle selects. Inference only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

# Imported before the first call of a custom op imports it, see `moe_mk.layer.custom_op`.
import torch.distributed.nn
from torch import Tensor

from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem
from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.external.device import profile_here
from moe_mk.external.library import installed
from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle import Decision, select
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant.plain import plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.shapes import expect
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import ExpertWeights, Weights

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


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
        self.kernel = kernel
        self.weights = self._laid_out(weights)
        self._number = next(_numbers)
        _known[self._number] = self

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
        if not torch.compiler.is_compiling():
            self._check(hidden_states, topk_weights, topk_ids)
        out: Tensor = engine_experts(hidden_states, topk_weights, topk_ids, self._number)
        return out

    def _check(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        if torch.is_grad_enabled() and x_TH.requires_grad:
            raise UnsupportedError(f"gradients through {self.name}", ["inference only; run under torch.no_grad()"])
        dtype = self.decision.problem.dtype.dtype
        expect("hidden_states", x_TH, "T H", dtype, H=self.hidden_size)
        expect("topk_ids", ids_TK, "T K", (torch.int32, torch.int64), x_TH.device, T=x_TH.shape[0])
        if weights_TK.shape != ids_TK.shape:
            raise ShapeError(f"topk_weights is {tuple(weights_TK.shape)}, topk_ids is {tuple(ids_TK.shape)}")

    def run(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """The implementation of the operator."""
        here = (ids_TK >= 0) & (ids_TK < self.num_experts)
        ids = torch.where(here, ids_TK, -1).to(torch.int32)
        routing = Routing(ids, weights_TK.to(torch.float32).masked_fill(~here, 0.0))
        return wait(self.kernel.steps(x_TH.contiguous(), routing, self.weights))


_numbers = count(1)
_known: WeakValueDictionary[int, EngineExperts] = WeakValueDictionary()


@torch.library.custom_op("moe_mk::engine_experts", mutates_args=())
def engine_experts(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, number: int) -> Tensor:
    """Run the experts that got this number; one node of a graph, so that engines can compile around it."""
    if number not in _known:
        raise UnsupportedError("the experts of a compiled graph are gone", ["compile the new model again"])
    return _known[number].run(hidden_states, topk_weights, topk_ids)


@engine_experts.register_fake
def _(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, number: int) -> Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


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
