"""How a layer runs: gate, route, carry out, multiply, carry home, shared experts, one late sum.

One forward:

    logits  = gate(x)                              (T, E)
    routing = router(logits, bias)                 ids and weights (T, K), logical experts
    load   += how often each expert was chosen
    y       = kernel(x, physical ids, weights)     while tokens are in flight: shared = mlp(x)
    y       = all_reduce(y + shared)               only over groups in which both are partial sums
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.flight import Flight
from moe_mk.layer.checks import check_hidden_states, check_routing
from moe_mk.layer.custom_op import moe_layer
from moe_mk.layer.fused_forward import FusedForward, build_fused_forward, is_untraced
from moe_mk.layer.gate import Gate
from moe_mk.layer.placed import PlacedLayer
from moe_mk.layer.placement_state import Half
from moe_mk.layer.settings import router_of_batch
from moe_mk.layer.shared import SharedExperts
from moe_mk.router.hashed import HashedTokens, HashRouter
from moe_mk.router.router import Router
from moe_mk.runner.monolithic import MonolithicKernel
from moe_mk.runner.overlap import alongside, run_alone
from moe_mk.tokens import Routing


class RunningLayer(PlacedLayer):
    """What runs on a placed layer: forwards, whole, routed by an engine, or as a flight."""

    dtype: torch.dtype
    router: Router
    """What chooses experts by scores."""
    hash_router: HashRouter | None
    """What chooses them by token id, once its table is loaded; None in a layer that chooses by scores."""
    expert_load: Tensor
    """int64 [E]. How many tokens chose each logical expert since the last reset; -1 counts for nobody."""
    on_routing: Callable[[Routing], None] | None = None
    """Told of the logical routing of every forward, which it must not change; see `trace.routing_recorder`."""
    _gate: Gate
    _shared: SharedExperts | None
    _number: int
    _whole: FusedForward | None = None

    def forward(self, hidden_states: Tensor, token_ids_T: Tensor | None = None) -> Tensor:
        """Run the layer: (T, H) to (T, H), shared experts included. T may be zero and differ between ranks.

        token_ids_T: integers, the tokens of the vocabulary; needed where they choose the experts, else without effect.
        """
        hidden_states = self._checked(hidden_states)
        self._router_of(hidden_states, token_ids_T)
        if not is_untraced(hidden_states):
            out: Tensor = moe_layer(hidden_states, self.expert_load, self._number, token_ids_T)
            return out
        load_E = self._buffers["expert_load"]  # a module finds a buffer by its name only after a long search
        assert load_E is not None
        return self.run(hidden_states, load_E, token_ids_T)

    def run(self, x_TH: Tensor, expert_load_E: Tensor, token_ids_T: Tensor | None = None) -> Tensor:
        """The forward on tokens that were checked, past torch's operator: it would cost a tenth of a millisecond."""
        if self.spans.recorder is None and self.on_routing is None and self.hash_router is None:
            whole = self._whole_forward()
            if whole.call is not None and whole.takes(x_TH, expert_load_E):
                return whole.run(whole.call, x_TH, expert_load_E, self.spans.ledger)
        with torch.no_grad():
            return run_alone(self.steps(x_TH, expert_load_E, token_ids_T))

    def _whole_forward(self) -> FusedForward:
        """What was prepared, anew if anything it was made from has been exchanged."""
        half, gate, shared = self._half, self._gate, self._shared
        parts = (half, self.router, gate.weight_EH, gate.bias_E, gate.logit_bias_E, shared and shared.weights)
        whole = self._whole
        if whole is None or not whole.made_of(parts, gate):
            together = half.laid_out if shared is None else self._with_shared(half)
            whole = self._whole = build_fused_forward(half, together, gate, self.router, parts)
        return whole

    def flip(self, half: Half) -> Half:
        """Serve from a staged half from the next forward on; returns what served. All ranks flip at one step."""
        self._whole = None  # it would keep the weights that served
        return super().flip(half)

    def forward_routed(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Run the routed experts only, for an engine that routes by itself: (T, H), (T, K), (T, K) to (T, H).

        topk_weights: f32, already renormalised and scaled. topk_ids: logical experts, -1 goes nowhere; read once on the
        host to refuse ids that do not exist. Shared experts are not added.
        """
        hidden_states = self._checked(hidden_states)
        num_tokens, top_k, num_experts = hidden_states.shape[0], self.config.router.top_k, self.config.model.num_experts
        check_routing(topk_weights, topk_ids, self.device, num_tokens, top_k, num_experts)
        if isinstance(self.kernel, MonolithicKernel):
            chosen = self.decision.chosen.experts
            raise UnsupportedError(f"{chosen} routes inside", ["pin kernel.experts to another backend"])
        routing = Routing(topk_ids.to(torch.int32), topk_weights)
        return run_alone(self._routed_steps(hidden_states, routing))

    def _routed_steps(self, x_TH: Tensor, routing: Routing) -> Flight[Tensor]:
        half = self._half
        yield from half.grid.agree(lambda: {**self.decision.notes(), **half.notes, **self._gate.notes()})
        if half.lost is not None:
            half.lost.check()
        assert not isinstance(half.kernel, MonolithicKernel)
        with half.grid.abort_on_error():
            self._record(routing, self.expert_load)
            physical = self._physical(routing, half)
            y_TH = yield from half.kernel.steps(x_TH, physical, half.laid_out)
            return (yield from self._late_reduce(y_TH, half))

    def route(self, hidden_states: Tensor, token_ids_T: Tensor | None = None) -> Routing:
        """The first stage alone: logical experts and weights of each token. token_ids_T: as of `forward`."""
        hidden_states = self._checked(hidden_states)
        return self._gate.route(hidden_states, self._router_of(hidden_states, token_ids_T))[0]

    def check_token_ids(self, x_TH: Tensor, token_ids_T: Tensor | None) -> None:
        """Raise ShapeError or ConfigError unless these ids can route these tokens; reads them on the host.

        For who hands a batch on in parts: ranks that share it must all refuse it, not only the one with the bad part.
        """
        if isinstance(router := self._router_of(x_TH, token_ids_T), HashedTokens):
            router.router.check(router.token_ids_T)

    def _router_of(self, x_TH: Tensor, token_ids_T: Tensor | None) -> Router | HashedTokens:
        return router_of_batch(self.router, self.hash_router, token_ids_T, x_TH, self.name)

    def steps(
        self, x_TH: Tensor, expert_load_E: Tensor | None = None, token_ids_T: Tensor | None = None
    ) -> Flight[Tensor]:
        """The forward as a flight: for several ranks in one process, or several micro-batches at once."""
        _ = self.weights
        load_E = self.expert_load if expert_load_E is None else expert_load_E
        router = self._router_of(x_TH, token_ids_T)
        half = self._half
        yield from half.grid.agree(lambda: {**self.decision.notes(), **half.notes, **self._gate.notes()})
        if half.lost is not None:
            half.lost.check()
        with half.grid.abort_on_error():
            return (yield from self._accepted(x_TH, load_E, router, half))

    def _accepted(self, x_TH: Tensor, load_E: Tensor, router: Router | HashedTokens, half: Half) -> Flight[Tensor]:
        """The forward from where an exception ends it on every rank."""
        together = self._with_shared(half)
        with self.spans.span("route"):
            routing, logits_TE = self._gate.route(x_TH, router)
            self._record(routing, load_E)
            physical = self._physical(routing, half)
        if isinstance(half.kernel, MonolithicKernel):
            routed = half.kernel.steps(x_TH, logits_TE, self._gate.bias_E, half.laid_out)
        else:
            routed = half.kernel.steps(x_TH, physical, together or half.laid_out)
        if self._shared is None or together is not None:
            return (yield from self._late_reduce((yield from routed), half))
        rows = half.grid.share_of(x_TH.shape[0]) if half.is_partial else slice(None)
        y_TH, shared_XH = yield from alongside(routed, lambda: self._shared_on(x_TH[rows]))
        total_TH = y_TH.to(torch.float32, copy=True)
        total_TH[rows] += shared_XH
        return (yield from self._late_reduce(total_TH.to(self.dtype), half))

    def recover(self) -> None:
        """Serve again after a call failed on some rank. Every rank of the layer's groups calls it; it waits for them.

        One call serves all layers over the same groups. Raises CommError where a rank is dead or was late, so that
        connections are gone, and UnsupportedError for a transport that cannot start over: both need new groups.
        """
        run_alone(self._half.grid.recover())

    def _with_shared(self, half: Half) -> Any:
        """Routed and shared experts as one, where tokens stay on their rank and the backend can; None: one by one."""
        if self._shared is None or self._shared.weights is None or isinstance(half.kernel, MonolithicKernel):
            return None
        if half.kernel.prepare_finalize.traits.max_ranks != 1:
            return None
        return half.kernel.experts.fuse_shared_experts(half.laid_out, self._shared.weights)

    def _shared_on(self, x_XH: Tensor) -> Tensor:
        assert self._shared is not None
        return self._shared(x_XH)

    def _record(self, routing: Routing, load_E: Tensor) -> None:
        """Count each chosen expert, on the device; -1 counts for nobody. Whoever listens hears of the routing."""
        if self.on_routing is not None:
            self.on_routing(routing)
        ids = routing.ids_TK.flatten().long()
        load_E.index_add_(0, ids.clamp_min(0), (ids >= 0).to(torch.int64))

    def _physical(self, routing: Routing, half: Half) -> Routing:
        """Choose replicas. Ranks with the same tokens must choose the same ones, others should not all choose one."""
        if half.lost is not None:
            assert self._dropped is not None
            routing = half.lost.leave_out(routing, self._dropped)
        salt = 0 if half.is_partial else half.grid.ep.rank
        return Routing(half.tables.to_physical(routing.ids_TK, salt), routing.weights_TK, routing.losses)

    def _late_reduce(self, y_TH: Tensor, half: Half) -> Flight[Tensor]:
        return half.grid.late_reduce(y_TH, self.spans, partial_over_ep=half.is_partial)

    def _checked(self, hidden_states: Tensor) -> Tensor:
        """The tokens, if the layer can run on them, row by row: a GEMM rounds other strides in another way."""
        if self._half.weights is None:
            _ = self.weights
        model, kernel = self.config.model, self.config.kernel
        check_hidden_states(hidden_states, self.dtype, self.device, model.hidden_size, kernel.max_num_tokens)
        return hidden_states if hidden_states.is_contiguous() else hidden_states.contiguous()
