"""The two executions of a forward: stage by stage, and as one native call prepared once, with the same bits.

At a handful of tokens the operators between router and experts cost more than the router itself. Layers that record
spans or replace lost experts run stage by stage.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_mk.errors import MoEMKError, WeightError
from moe_mk.flight import Flight
from moe_mk.kernels import native
from moe_mk.layer.experts_of_rank import can_be_called
from moe_mk.layer.routing import LayerRouting
from moe_mk.layer.serving_state import ServingState
from moe_mk.router.replay import CapturedIds, ReplayedTokens
from moe_mk.runner.overlap import alongside
from moe_mk.tokens import Routing

if TYPE_CHECKING:
    from moe_mk.kernels.native.layer import LayerCall


def steps(
    state: ServingState,
    routing: LayerRouting,
    x_TH: Tensor,
    load_E: Tensor,
    token_ids_T: Tensor | ReplayedTokens | None,
    given: Routing | None,
) -> Flight[Tensor]:
    """The forward of a state, stage by stage. See `MoELayer.steps`."""
    is_accepted = False
    epochs: tuple[int | None, int | None] = None, None
    # From the first instruction to the last: an interrupt may arise at any of them while peers are in this call.
    try:
        experts, backends = state.experts, state.backends
        grid, spans = experts.grid, experts.kernel.spans
        epochs, shared = grid.epochs, backends.shared if given is None else None
        if state.weights is None:
            raise WeightError(NO_WEIGHTS.format(grid.name))
        router = routing.router_of(x_TH, token_ids_T) if given is None else routing.router
        is_accepted = True
        if grid.agreed != epochs:
            yield from grid.agree(
                lambda: {**experts.decision.notes(), **state.notes, **backends.gate.notes(), **routing.notes()},
                state.loads,
            )
        if state.lost is not None:
            state.lost.check()
        fused = None if shared is None else backends.fuse_shared(experts)
        router_TH, x_TH = state.inputs(x_TH)
        if given is not None:
            physical = routing.place(given, load_E, state)
        else:
            with spans.span("route"):
                physical = routing.physical(router_TH, router, load_E, state)
        routed = state.routed(x_TH, physical, fused or experts.weights)
        if shared is None or fused is not None:
            y_TH = yield from routed
        else:
            rows = grid.share_of(x_TH.shape[0]) if experts.is_partial else slice(None)
            y_TH, shared_XH = yield from alongside(routed, lambda: shared(x_TH[rows]))
            total_TH = y_TH.to(torch.float32, copy=True)
            total_TH[rows] += shared_XH
            y_TH = total_TH.to(y_TH.dtype)
        y_TH = yield from grid.late_reduce(y_TH, spans, partial_over_ep=experts.is_partial)
        return with_input(y_TH, x_TH, physical).to(backends.gate.dtype)
    except BaseException as error:
        if is_accepted or not isinstance(error, MoEMKError):
            state.experts.grid.fail(error, epochs)
        raise


def with_input(y_TH: Tensor, x_TH: Tensor, routing: Routing) -> Tensor:
    """The layer's output with that of experts which return its input, added up in f32."""
    weights_T1 = routing.input_weights_T1
    return y_TH if weights_T1 is None else (y_TH.to(torch.float32) + weights_T1 * x_TH).to(y_TH.dtype)


NO_WEIGHTS = "layer {!r} has no weights yet; call load(path, layer=N)"


class PreparedForward:
    """The native calls of one state; None where the pair of backends has none."""

    call: LayerCall | None = None
    """The whole layer."""
    alone: LayerCall | None = None
    """The same without shared experts, for tokens that are routed by the caller."""

    def __init__(self, state: ServingState, routing: LayerRouting) -> None:
        self.state, self.routing, gate, shared = state, routing, state.backends.gate, state.backends.shared
        self._router, self._logit_bias_E = routing.router, gate.logit_bias_E
        self._top_k = state.backends.config.router.top_k
        self._shared = None if shared is None else shared.weights
        self._load_shape = (state.expert_map.num_experts,)
        self._gate_at: tuple[object, object] | None = None
        self.is_current()  # notes the gate's memory, before it is read
        experts = state.experts
        if state.weights is None or not state.may_be_native:
            return
        inside = state.tables.one_to_one and not state.routes_apart
        gating = gate.gating(routing.router) if inside else None
        self.alone = experts.prepare(gating=None if shared is not None else gating)
        if shared is None:
            self.call = self.alone
        elif (both := state.backends.fuse_shared(experts)) is not None:
            self.call = experts.prepare(both, gating=gating)
        else:
            self.call = experts.prepare(gating=gating, shared=shared)

    def is_current(self) -> bool:
        """Whether the parts of its state are those it was made from, and the gate's memory was not replaced."""
        gate, shared = self.state.backends.gate, self.state.backends.shared
        w, b = gate.weight_EH, gate.bias_E
        at = w is None or (w.data_ptr(), w.is_contiguous()), b is None or (b.data_ptr(), b.is_contiguous())
        if self._gate_at is None:
            self._gate_at = at
        same = self._router is self.routing.router and gate.logit_bias_E is self._logit_bias_E
        return same and (shared is None or shared.weights is self._shared) and self._gate_at == at

    def call_for(self, x_TH: Tensor, load_E: Tensor, given: Routing | None) -> LayerCall | None:
        """Return the call that makes the next forward; None: the stages do. given: a routing of logical experts.

        The calls use the tensors' memory directly; the stages handle strides and check errors.
        """
        state, routing = self.state, self.routing
        call = self.call if given is None else self.alone
        if (
            call is None
            or state.experts.kernel.spans.recorder is not None
            or (given is None and routing.hash_router is not None)
        ):
            return None
        dense = x_TH.is_contiguous() and load_E.is_contiguous() and load_E.shape == self._load_shape
        counter = type(load_E) is Tensor and load_E.dtype is torch.int64 and load_E.is_cpu
        if not dense or not counter:
            return None
        if state.is_direct:
            if given is None:
                return call
            fits = can_be_called(x_TH, given.ids_TK, given.weights_TK) and given.ids_TK.shape[1] == self._top_k
            return call if fits else None
        grid = state.experts.grid
        agreed = grid.agreed == (grid.ep.status.epoch, grid.tp.status.epoch)
        return call if agreed and x_TH.is_cpu and call.is_ready(x_TH.shape[0]) else None

    def execute(self, call: LayerCall, x_TH: Tensor, load_E: Tensor, given: Routing | None) -> Tensor:
        """The forward in one call: from its router on, or from a routing that is given or that another router makes."""
        state, routing, chosen, routed, tensors = self.state, self.routing, None, None, None
        try:
            first, listener, shared = native.Stage.ROUTE, routing.listener, state.backends.shared
            router_TH, captured = x_TH, None
            if state.input_norm_H is not None:
                router_TH, x_TH = state.inputs(x_TH)
            direct = state.tables.one_to_one and state.is_direct and routing.zero is None
            if given is not None and direct:  # as `can_be_called` has checked it
                first, tensors = native.Stage.PLACE, (given.ids_TK, given.weights_TK)
                routed = None if listener is None else partial(listener, given)
            elif given is not None or not call.routes:
                with torch.no_grad():
                    chosen = state.backends.gate.route(router_TH, routing.router)[0] if given is None else given
                    if state.tables.one_to_one:
                        first, chosen = native.Stage.PLACE, routing.dispatched(chosen, state)
                        routed = None if listener is None else partial(listener, chosen)
                    else:
                        first, chosen = native.Stage.DISPATCH, routing.place(chosen, load_E, state)
                ids_TK = chosen.ids_TK if chosen.ids_TK.dtype is torch.int64 else chosen.ids_TK.to(torch.int32)
                tensors = ids_TK.contiguous(), chosen.weights_TK.float().contiguous()
            elif isinstance(listener, CapturedIds) and (captured := listener.address) is not None:
                listener.expect(x_TH.shape[0], routing.router.top_k)
            elif listener is not None:
                shape = x_TH.shape[0], routing.router.top_k
                ids_TK = torch.empty(shape, dtype=torch.int32, device="cpu")
                tensors = ids_TK, torch.empty(shape, dtype=torch.float32, device="cpu")
                routed = partial(listener, Routing(*tensors))
            weights_T = None
            if shared is not None and shared.is_weighted and given is None:
                weights_T = shared.row_weights(x_TH)
            y_TH = call(x_TH, load_E, tensors, first, routed=routed, shared_weights_T=weights_T, captured=captured)
            if first is not native.Stage.DISPATCH:
                routing.tokens += x_TH.shape[0]
            return y_TH if chosen is None else with_input(y_TH, x_TH, chosen)
        except BaseException as error:
            state.experts.grid.fail(error)
            raise
