"""A forward as one native call, prepared once for a state, a router and weights, with the bits of the stages.

At a handful of tokens the operators between router and experts cost more than the router itself. Where tokens stay on
this rank the experts backend has the call; where they are dispatched, the transport has it, and returns in between for
shared experts and a listener. Layers that record spans or replace lost experts run stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_mk.experts.base import LayerCall
from moe_mk.kernel import FusedMoEKernel
from moe_mk.layer.routing import LayerRouting
from moe_mk.layer.serving_state import ServingState
from moe_mk.prepare_finalize.base import ExchangedCall
from moe_mk.tokens import Routing
from moe_mk.weights.stamp import places_of

Call = Callable[[Tensor, Tensor, Routing | None], Tensor]
"""Checked tokens, the expert load and a routing that is given or None, to (T, H)."""


class PreparedForward:
    """The native calls of one state. A call is None where the pair has none."""

    call: LayerCall | None = None
    """The experts, shared ones included, and the router if it is native, where tokens stay on this rank."""
    alone: LayerCall | None = None
    """The same without shared experts, for tokens that are routed."""
    exchanged: ExchangedCall | None = None
    """Dispatch, experts and combine, without shared experts."""

    def __init__(self, state: ServingState, routing: LayerRouting) -> None:
        self.state, self.routing, gate = state, routing, state.backends.gate
        self._router, self._logit_bias_E = routing.router, gate.logit_bias_E
        self._shared = None if state.backends.shared is None else state.backends.shared.weights
        self._gate_at, self._load_shape = places_of(gate.weight_EH, gate.bias_E), (state.expert_map.num_experts,)
        kernel, tables = state.kernel, state.tables
        if state.weights is None or not isinstance(kernel, FusedMoEKernel):
            return
        self._kernel = kernel
        if state.is_exchanged:
            transport = kernel.prepare_finalize
            rows = own_hook(kernel.experts, "fuse_rows", state.laid_out, transport.context.top_k)
            if rows is not None:
                gating = gate.gating(routing.router) if tables.one_to_one else None
                multiply = partial(kernel.multiply, weights=state.laid_out)
                self.exchanged = own_hook(transport, "fuse_layer", rows, gating, tables, multiply)
        elif state.is_direct:
            fuse = partial(own_hook, kernel.experts, "fuse_layer")
            rank, apart = state.grid.ep.rank, state.backends.shared is not None
            weights = state.backends.fuse_shared(kernel, state.laid_out) if apart else state.laid_out
            if weights is not None:
                self.call = fuse(weights, gate.gating(routing.router), tables, rank)
            same = weights is state.laid_out
            self.alone = self.call if same else fuse(state.laid_out, None, tables, rank)

    def is_current(self, state: ServingState) -> bool:
        """Whether it was made from the parts of now, and the gate's memory was not replaced."""
        gate, shared = state.backends.gate, state.backends.shared
        same = state is self.state and self._router is self.routing.router and gate.logit_bias_E is self._logit_bias_E
        return (
            same
            and (shared is None or shared.weights is self._shared)
            and self._gate_at == places_of(gate.weight_EH, gate.bias_E)
        )

    def call_for(self, x_TH: Tensor, load_E: Tensor, given: Routing | None) -> Call | None:
        """What makes the next forward; None: the stages do. given: a routing of logical experts.

        The calls use the tensors' memory directly; the stages handle strides and check errors.
        """
        exchanged = self.exchanged
        if exchanged is None and (self.call if given is None else self.alone) is None:
            return None
        dense = x_TH.is_contiguous() and load_E.is_contiguous() and load_E.shape == self._load_shape
        counter = type(load_E) is Tensor and load_E.dtype is torch.int64 and load_E.is_cpu
        if not dense or not counter:
            return None
        if exchanged is not None:
            ready = x_TH.is_cpu and self.state.grid.has_agreed and exchanged.is_ready(x_TH.shape[0])
            return self._exchange if ready else None
        return self._direct if given is None or can_be_called(x_TH, given.ids_TK, given.weights_TK) else None

    def _direct(self, x_TH: Tensor, load_E: Tensor, given: Routing | None) -> Tensor:
        """The forward in one call of the experts backend, with the router where that is a part of it."""
        call, listener = self.call if given is None else self.alone, self.routing.listener
        assert call is not None
        routing, is_routed = given, given is not None or not call.routes
        if given is None and is_routed:
            routing = self._routed(x_TH)
        elif given is None and listener is not None:
            routing = self._unwritten(x_TH.shape[0])
        tensors = None if routing is None else (routing.ids_TK.contiguous(), routing.weights_TK.contiguous())
        y_TH = call(x_TH, load_E, tensors, is_routed=is_routed)
        self.routing.tokens += x_TH.shape[0]
        if listener is not None and routing is not None:
            listener(routing if given is None else replace(given, ids_TK=given.ids_TK.to(torch.int32)))
        record_as_stages(self._kernel, y_TH, 2 * y_TH.nbytes)
        return y_TH

    def _exchange(self, x_TH: Tensor, load_E: Tensor, given: Routing | None) -> Tensor:
        """The forward between ranks in one native call, which returns in between for a listener and shared experts."""
        state, call = self.state, self.exchanged
        assert call is not None
        try:
            shared, listener = state.backends.shared if given is None else None, self.routing.listener
            tensors, routed, added = None, None, list[Tensor]()
            is_routed = given is not None or not call.routes
            if is_routed:
                with torch.no_grad():
                    physical = self.routing.place(self._routed(x_TH) if given is None else given, load_E, state)
                tensors = physical.ids_TK.to(torch.int32).contiguous(), physical.weights_TK.float().contiguous()
            elif listener is not None:
                written = self._unwritten(x_TH.shape[0])
                tensors, routed = (written.ids_TK, written.weights_TK), partial(listener, written)
            meanwhile = None if shared is None else lambda: added.append(shared(x_TH))
            y_TH = call(x_TH, load_E, tensors, is_routed=is_routed, routed=routed, meanwhile=meanwhile)
            if not is_routed:
                self.routing.tokens += x_TH.shape[0]
            if added:
                with torch.no_grad():
                    y_TH = (y_TH.to(torch.float32) + added[0]).to(x_TH.dtype)
            record_as_stages(self._kernel, y_TH, call.experts_bytes)
            return y_TH
        except BaseException as error:
            state.grid.fail(error)
            raise

    def _routed(self, x_TH: Tensor) -> Routing:
        with torch.no_grad():
            return self.state.backends.gate.route(x_TH, self.routing.router)[0]

    def _unwritten(self, num_tokens: int) -> Routing:
        """Memory for a routing that a native call writes."""
        shape = num_tokens, self.routing.router.top_k
        ids_TK = torch.empty(shape, dtype=torch.int32, device="cpu")
        return Routing(ids_TK, torch.empty(shape, dtype=torch.float32, device="cpu"))


def own_hook(backend: object, hook: str, *arguments: object) -> Any:
    """What a hook returns if the class of the backend defines it; None for a derived class, which may run otherwise."""
    return getattr(backend, hook)(*arguments) if hook in vars(type(backend)) else None


def record_as_stages(kernel: FusedMoEKernel, y_TH: Tensor, experts_bytes: int | None) -> None:
    """Record the stages of one fused call in the ledger of its kernel.

    experts_bytes: of the rows that the experts have read and written; None: the experts have recorded them.
    """
    transport, num_bytes = type(kernel.prepare_finalize), y_TH.nbytes
    sent = ("dispatch", transport, num_bytes), ("combine", transport, num_bytes)
    ran = () if experts_bytes is None else (("experts", type(kernel.experts), experts_bytes),)
    kernel.spans.ledger.have_run(sent[0], *ran, sent[1])


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
