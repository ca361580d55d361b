"""A forward as one call of the experts backend, or the router and one call; used where nothing moves in between.

At a handful of tokens the operators between router and experts cost more than the router itself. Layers that record
spans, replace lost experts or dispatch tokens to other ranks run stage by stage, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import is_

import torch
from torch import Tensor

from moe_mk.experts.base import LayerCall
from moe_mk.kernel import FusedMoEKernel
from moe_mk.layer.gate import Gate
from moe_mk.layer.serving_state import ServingState
from moe_mk.prepare_finalize.base import ExchangedCall
from moe_mk.router.router import Router
from moe_mk.weights.stamp import places_of


@dataclass(frozen=True)
class FusedForward:
    """The prepared calls, and the parts that they were prepared from. A call is None where the backend has none."""

    made_from: tuple[object, ...]
    call: LayerCall | None
    """The experts, shared ones included, and the router if it is native; None: this layer runs stage by stage."""
    alone: LayerCall | None
    """Without shared experts, for tokens that are routed."""
    exchanged: ExchangedCall | None
    """Dispatch, experts and combine, without shared experts; None: tokens are not dispatched, or stage by stage."""
    kernel: FusedMoEKernel | None
    load_shape: torch.Size
    gate_at: object

    def is_current(self, parts: tuple[object, ...], gate: Gate) -> bool:
        """Whether these are the same objects that it was prepared from, and the gate's memory was not replaced."""
        return all(map(is_, self.made_from, parts)) and self.gate_at == places_of(gate.weight_EH, gate.bias_E)

    def takes(self, x_TH: Tensor, load_E: Tensor) -> bool:
        """Whether the calls may use these tensors' memory directly; the stages handle strides and check errors."""
        dense = x_TH.is_contiguous() and load_E.is_contiguous()
        counter = type(load_E) is Tensor and load_E.dtype is torch.int64 and load_E.is_cpu
        return dense and counter and load_E.shape == self.load_shape


def record_as_stages(kernel: FusedMoEKernel, y_TH: Tensor, experts_bytes: int | None) -> None:
    """Record the stages of one fused call in the ledger of its kernel.

    experts_bytes: of the rows that the experts have read and written; None: the experts have recorded them.
    """
    ran, transport, num_bytes = kernel.spans.ledger.ran, type(kernel.prepare_finalize), y_TH.nbytes
    ran("dispatch", transport, num_bytes)
    if experts_bytes is not None:
        ran("experts", type(kernel.experts), experts_bytes)
    ran("combine", transport, num_bytes)


def can_be_called(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> bool:
    """Whether a `LayerCall` reads this routing of x as it is: plain dense tensors on the CPU, integers and f32."""
    if type(ids_TK) is not Tensor or type(weights_TK) is not Tensor or weights_TK.requires_grad:
        return False
    plain = ids_TK.is_cpu and weights_TK.is_cpu and ids_TK.layout is weights_TK.layout is torch.strided
    typed = ids_TK.dtype in (torch.int32, torch.int64) and weights_TK.dtype is torch.float32
    if not plain or not typed or ids_TK.dim() != 2 or weights_TK.dim() != 2:
        return False
    fits = ids_TK.shape == weights_TK.shape and ids_TK.shape[0] == x_TH.shape[0]
    return fits and ids_TK.is_contiguous() and weights_TK.is_contiguous()


def build_fused_forward(state: ServingState, router: Router, made_from: tuple[object, ...]) -> FusedForward:
    """Prepare a forward; shared experts are a part of `call` where the backend fuses them."""
    kernel, tables, rank, gate = state.kernel, state.tables, state.grid.ep.rank, state.backends.gate
    apart = state.backends.shared is not None
    weights = state.backends.fuse_shared(kernel, state.laid_out) if apart else state.laid_out
    call, alone, exchanged = None, None, None
    if state.is_exchanged and state.weights is not None:
        exchanged = _build_exchanged(state, gate, router)
    if isinstance(kernel, FusedMoEKernel) and state.is_direct and state.weights is not None:
        if weights is not None:
            call = kernel.experts.fuse_layer(weights, gate.gating(router), tables, rank)
        same = weights is state.laid_out
        alone = call if same else kernel.experts.fuse_layer(state.laid_out, None, tables, rank)
    load_shape, fused = (
        torch.Size((state.expert_map.num_experts,)),
        kernel if isinstance(kernel, FusedMoEKernel) else None,
    )
    at = places_of(gate.weight_EH, gate.bias_E)
    return FusedForward(made_from, call, alone, exchanged, fused, load_shape, at)


def _build_exchanged(state: ServingState, gate: Gate, router: Router) -> ExchangedCall | None:
    """The call between ranks, with the router where that is native and each expert has one replica."""
    kernel, tables = state.kernel, state.tables
    assert isinstance(kernel, FusedMoEKernel)
    transport = kernel.prepare_finalize
    experts = kernel.experts.fuse_rows(state.laid_out, transport.context.top_k)
    if experts is None:
        return None
    gating = gate.gating(router) if tables.one_to_one else None
    return transport.fuse_layer(experts, gating, tables, partial(kernel.multiply, weights=state.laid_out))
