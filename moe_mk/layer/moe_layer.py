"""The layer that an engine embeds: configured at construction, loaded from a checkpoint, then called.

One forward:

    logits  = gate(x)                              (T, E)
    routing = router(logits, bias)                 ids and weights (T, K), logical experts
    load   += how often each expert was chosen
    y       = kernel(x, physical ids, weights)     during dispatch: shared = mlp(x)
    y       = all_reduce(y + shared)               only over groups in which both are partial sums
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import MoEMKError, ShapeError, UnsupportedError, WeightError
from moe_mk.experts.base import FusedExperts, LayerCall
from moe_mk.external.device import is_here, usable_device, wanted_device, without_autocast
from moe_mk.flight import Flight, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.layer.checks import check_hidden_states, check_routing
from moe_mk.layer.custom_op import LAYERS, moe_layer
from moe_mk.layer.fused_forward import FusedForward, build_fused_forward, can_be_called, record_as_stages
from moe_mk.layer.gate import Gate
from moe_mk.layer.grid import Grid
from moe_mk.layer.live import LivePlacement
from moe_mk.layer.module_habits import WithoutParameters, copied, pickled
from moe_mk.layer.report import MemoryReport, RunReport, memory_report, run_report
from moe_mk.layer.serving_state import Backends, ServingState, build_state
from moe_mk.layer.settings import (
    decide,
    expect_calibrated,
    expert_map_of,
    hash_router_of,
    layer_spec_of,
    router_of,
    router_of_batch,
    with_sizes,
)
from moe_mk.layer.shared import shared_experts
from moe_mk.oracle.assemble import Parts
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import ExchangedCall
from moe_mk.router.hashed import HashedTokens, HashRouter
from moe_mk.router.router import Router
from moe_mk.runner.monolithic import MonolithicKernel
from moe_mk.runner.overlap import alongside
from moe_mk.shapes import expect, expect_dense
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Spans
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.expert_weights import ReleasedSlots, storages_of
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.loader import LayerLoader
from moe_mk.weights.source import MappingSource, TensorSource

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Progress = Callable[[str, int, int], None]
FEW_CHOICES = 32
"""So many choices are counted one by one in less time than the operators for any number of them take to begin."""
STRIDED = torch.strided
MASKS = (torch.bool, torch.int64, torch.int32, torch.uint8, torch.int8)


class MoELayer(WithoutParameters):
    """A MoE layer on one rank of its groups. Backends are chosen at construction; it has no weights until loaded."""

    state: ServingState
    """Everything that a forward reads, as it serves now; another object after each change."""
    router: Router
    """Chooses experts by scores."""
    hash_router: HashRouter | None
    """Chooses experts by token id, once its table is loaded; None in a layer that chooses by scores."""
    expert_load: Tensor
    """int64 [E]. How many tokens chose each logical expert since the last reset; ids of -1 are not counted."""
    on_routing: Callable[[Routing], None] | None = None
    """Called with the logical routing of every forward, which it must not change, before or after the experts run.

    See `trace.routing_recorder`.
    """
    _tokens: list[int]
    """How many tokens were counted into `expert_load`, in calls of `top_k` choices each: one number."""
    _latent: tuple[Tensor, Tensor] | None = None
    """The projections of tokens to the width of the experts and back, in the layer's dtype."""
    _fused: FusedForward | None = None
    _routed_ids: tuple[weakref.ref[Tensor], int, int] | None = None
    """The ids that the last `route` returned, their version and address."""
    source: tuple[TensorSource, int] | None = None
    """Where the weights were read, and the number of the layer there; None: they cannot be read again."""
    built_for: torch.device
    """The device of kernel and tables: `device`, or the one assumed while that is the meta device."""
    _dropped: Tensor | None = None
    """int64 scalar on the device: assignments to lost experts that were left out."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        groups: ParallelGroups | DeviceMesh | None = None,
        name: str = "moe",
    ) -> None:
        """Choose the backends; allocates nothing but the load counter and tables of the placement.

        device: None is torch's default device. On the meta device, backends are chosen for this machine, and again for
        the device that `to_empty(device=...)` states; loading without it uses torch's default device, or the CPU.
        groups: process groups of the engine; their sizes must be those of config.parallel where it states any.
        name: of the layer in error messages. Raises ConfigError, or UnsupportedError with every reason.
        """
        super().__init__()
        if groups is not None and not isinstance(groups, ParallelGroups):
            groups = ParallelGroups.from_mesh(groups)
        wanted = wanted_device(device)
        groups = groups or ParallelGroups()
        self.dtype, self.name, self.spans, self._tokens = dtype, name, Spans(), [0]
        grid = Grid(groups, config.kernel.timeout_s, name)
        config = with_sizes(config, grid.sizes)
        self.router, self.hash_router, parts = router_of(config), None, (config, groups, grid, expert_map_of(config))
        if wanted.type != "meta":
            self._build_on(usable_device(wanted), *parts)
        else:
            try:
                self._build_on(torch.device("cpu"), *parts)
            except UnsupportedError:
                if not is_here(torch.device("cuda")):
                    raise
                self._build_on(usable_device("cuda"), *parts)
            self.device, self.expert_load = wanted, self.expert_load.to("meta")
        self._entry = LAYERS.enter(self)

    def _build_on(
        self, device: torch.device, config: MoEConfig, groups: ParallelGroups, grid: Grid, expert_map: ExpertMap
    ) -> None:
        """Choose and build everything that depends on the device; changes nothing if no backend is eligible."""
        decision, shared = decide(config, self.dtype, device), None
        if config.model.shared_size:
            shared = shared_experts(decision, Parts(expert_map, device, grid.ep, self.spans))
        backends = Backends(config, config, decision, groups, Gate(decision, self.dtype, device), shared)
        state = build_state(backends, expert_map, grid, device, self.spans)
        self.register_buffer("expert_load", self._no_load(config, device), persistent=False)
        self.device, self.built_for = device, device
        self.use(state)

    def _leave_meta(self, device: torch.device) -> None:
        """Leave the meta device."""
        if device != self.built_for:
            self._build_on(device, self.config, self.groups, self.state.grid, self.expert_map)
        self.device, self.expert_load = device, self._no_load(self.config, device)

    @staticmethod
    def _no_load(config: MoEConfig, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be updated outside of it
            return torch.zeros(config.model.num_experts, dtype=torch.int64, device=device)

    def use(self, state: ServingState) -> None:
        """Serve with a state from the next forward on."""
        if state.lost is not None and self._dropped is None:
            with torch.inference_mode(False):
                self._dropped = torch.zeros((), dtype=torch.int64, device=self.device)
        self.state, self._fused = state, None

    # What was chosen, and what ran.

    def explain(self) -> Decision:
        """The decision: every pair with every reason, and assignments that chose no expert, if any; see `unrouted`."""
        unrouted = self.unrouted
        return replace(self.decision, unrouted=unrouted) if unrouted else self.decision

    def memory_report(self) -> MemoryReport:
        """Bytes on this rank, predicted from the decision."""
        return memory_report(self.decision, self.expert_map, self.ep.rank)

    def report(self) -> RunReport:
        """The backend that ran at each stage since the last reset, and its bytes, compared with the decision."""
        sent = self.ep.traffic.bytes_by_phase + self.tp.traffic.bytes_by_phase
        return replace(
            run_report(self.decision, self.spans.ledger, sent),
            lost_experts=tuple(sorted(self.expert_map.lost)),
            on_lost_expert=self.on_lost_expert,
            dropped_assignments=self.dropped_assignments,
            unrouted=self.unrouted,
        )

    def reset_report(self) -> None:
        """Clear the record of what ran."""
        self.spans.ledger.clear()
        if self._dropped is not None:
            self._dropped.zero_()

    def reset_expert_load(self) -> None:
        """Set the counters of chosen experts to zero."""
        self.expert_load.zero_()
        self._tokens[0] = 0

    @property
    def spec(self) -> LayerSpec:
        """What a checkpoint must hold for this layer."""
        return layer_spec_of(self.config)

    @property
    def weights(self) -> LayerWeights:
        """The loaded weights; raises WeightError before loading."""
        if self.state.weights is None:
            raise WeightError(f"layer {self.name!r} has no weights yet; call load_from_safetensors(path, layer=N)")
        return self.state.weights

    @property
    def expert_map(self) -> ExpertMap:
        """The current placement: which rank holds which expert."""
        return self.state.expert_map

    @cached_property
    def live(self) -> LivePlacement:
        """Changes of the placement and of the backends while the layer serves; `rebalance` calls these."""
        return LivePlacement(self)

    @property
    def config(self) -> MoEConfig:
        """The settings that are in use."""
        return self.state.backends.config

    @property
    def decision(self) -> Decision:
        """The backends that are in use, and why."""
        return self.state.backends.decision

    @property
    def groups(self) -> ParallelGroups:
        """The process groups that are in use."""
        return self.state.backends.groups

    @property
    def kernel(self) -> FusedMoEKernel | MonolithicKernel:
        """The current transport and experts backend."""
        return self.state.kernel

    @property
    def epoch(self) -> int:
        """The number of placements before the current one."""
        return self.state.epoch

    @property
    def ep(self) -> Communicator:
        """The ranks over which experts are distributed."""
        return self.state.grid.ep

    @property
    def tp(self) -> Communicator:
        """The ranks that hold slices of the same experts."""
        return self.state.grid.tp

    @property
    def dp(self) -> Communicator:
        """The ranks whose expert loads are summed."""
        return self.state.grid.dp

    @property
    def on_lost_expert(self) -> str:
        """The policy for calls when experts have no live copy: `parallel.on_lost_expert`."""
        return self.config.parallel.on_lost_expert

    @property
    def dropped_assignments(self) -> int:
        """Assignments of this rank's tokens to lost experts, left out since the last reset; waits for the device."""
        return 0 if self._dropped is None else int(self._dropped)

    @property
    def unrouted(self) -> int:
        """Assignments since `reset_expert_load` that chose no expert; waits for the device.

        A token with a NaN among its scores, from a NaN or an infinity in its hidden state, has none: its routed experts
        add 0. So are ids of -1 of an engine.
        """
        asked = self._tokens[0] * self.config.router.top_k
        return max(asked - int(self.expert_load.sum()), 0) if asked else 0

    # Loading.

    def load_from_safetensors(
        self,
        path: str | PathLike[str],
        layer: int,
        *,
        prefix: str | None = None,
        on_progress: Progress | None = None,
    ) -> Self:
        """Load this rank's share of one layer from a checkpoint folder or file. Strict: reports all problems at once.

        On a CPU, experts stay memory-mapped. Raises WeightError or ConfigError before anything is changed.
        """
        return self.load(open_source(path), layer, prefix=prefix, on_progress=on_progress)

    def load_weights(self, tensors: Mapping[str, Tensor], layer: int = 0, *, prefix: str | None = "") -> Self:
        """Load from tensors in memory with the names of a checkpoint below `prefix`. Experts are views of them."""
        return self.load(MappingSource(tensors), layer, prefix=prefix)

    def load(
        self, source: TensorSource, layer: int, *, prefix: str | None = None, on_progress: Progress | None = None
    ) -> Self:
        """Load from any source of tensors."""
        expect_calibrated(self.decision, source, layer, prefix)
        weights = load_layer(
            source,
            layer,
            layer_spec_of(self.config),
            owned=self.expert_map.local_to_global(self.ep.rank),
            tp_rank=self.tp.rank,
            tp_size=self.tp.size,
            prefix=prefix,
            on_progress=on_progress,
        )
        self.take(weights, on_progress=on_progress)
        self.source = source, layer
        return self

    def loader(self, layer: int = 0, *, prefix: str = "") -> LayerLoader:
        """Load tensor by tensor, in any order: `feed(name, tensor)` for each, then `finish()`, which is strict.

        prefix: the part of names before "experts.0...", for instance "model.layers.3.mlp."; {N} is the layer. Shares
        are copied to host memory; the layer is unchanged until `finish()`.
        """
        return LayerLoader(
            f"layer {self.name!r}",
            self.spec,
            self._take_fed,
            owned=self.expert_map.local_to_global(self.ep.rank),
            tp=(self.tp.rank, self.tp.size),
            layer=layer,
            prefix=prefix,
        )

    def _take_fed(self, weights: LayerWeights) -> None:
        if weights.facts.owned != tuple(self.expert_map.local_to_global(self.ep.rank)):
            raise WeightError(f"layer {self.name!r} was given another placement after loader() was called; load again")
        self.take(weights)
        self.source = None

    def take(self, weights: LayerWeights, *, on_progress: Progress | None = None) -> None:
        """Use weights that are already loaded for this rank; converts experts to the layout of the backend.

        A layer on the meta device is built on torch's default device first, or on the CPU.
        """
        if self.device.type == "meta":
            default = torch.get_default_device()
            self._leave_meta(usable_device("cpu" if default.type == "meta" else default))
        state, experts, backends = self.state, self.kernel.experts, self.state.backends
        if on_progress is not None and isinstance(experts, FusedExperts):
            laid_out = experts.relayout(weights.experts, on_progress=on_progress)
        else:
            laid_out = experts.relayout(weights.experts)
        if isinstance(experts, FusedExperts):
            decision = replace(backends.decision, parameters=experts.parameters())
            backends = replace(backends, decision=decision)
        if backends.shared is not None and weights.shared is not None:
            backends.shared.load(weights.shared, weights.shared_gate_H)
        backends.gate.load(weights.gate_EH, weights.bias_E, weights.logit_bias_E)
        if weights.latent is not None:
            down, up = (each.to(self.device, self.dtype).contiguous() for each in weights.latent)
            self._latent = down, up
        self.hash_router = hash_router_of(self.config, weights.table_XK, self.device)
        self.use(replace(state, backends=backends, weights=weights, laid_out=laid_out, loads=state.loads + 1))

    def read_from(self, source: TensorSource, layer: int) -> None:
        """Set where experts are read again for a layer loaded with take(). layer: its number there."""
        self.source = source, layer

    def release_weights(self) -> int:
        """Free the experts in the format of the checkpoint where the backend has a copy; returns the number of bytes.

        Until the layer is loaded again, its experts cannot be moved, and it cannot be copied or pickled. Tensors that
        were given to `load_weights` are freed when the caller drops them as well. Raises UnsupportedError where the
        backend reads them, WeightError before loading.
        """
        experts, placed = self.weights.experts, self.state
        if not isinstance(experts.slots, ReleasedSlots):
            in_use = storages_of(placed.laid_out)
            if any(storages_of(slot) & in_use for slot in experts.slots):
                chosen = self.decision.chosen.experts
                raise UnsupportedError(
                    f"the experts of layer {self.name!r} cannot be released",
                    [f"{chosen} reads them, there is no second copy; pin kernel.experts to another backend"],
                )
        freed = experts.num_bytes
        gone = replace(experts, slots=ReleasedSlots(f"layer {self.name!r}", experts.num_slots))
        self.use(replace(placed, weights=replace(self.weights, experts=gone)))
        return freed

    # Forward.

    def forward(
        self, hidden_states: Tensor, token_ids_T: Tensor | None = None, *, active_T: Tensor | None = None
    ) -> Tensor:
        """Run the layer: (T, H) to (T, H), shared experts included. T may be zero and differ between ranks.

        (B, S, H) is taken as T = B S tokens and returned in that shape; token ids and active_T are then (B, S).
        token_ids_T: integers, the tokens of the vocabulary; required where they choose the experts, ignored elsewhere.
        active_T: bool, or integers as an attention mask; False and 0 are padding, which is left out of the call: it is
        not routed, not counted, and gives 0. Read on the host, so a CUDA graph cannot hold a call with it.
        """
        load_E: Any = self._buffers["expert_load"]  # nn.Module finds a buffer by attribute only after a long search
        # What is read here becomes a guard that every call of a compiled layer checks, and must not differ between
        # layers: one graph serves all of them.
        if is_compiling() or not is_untraced(hidden_states):
            expect_dense("hidden_states", hidden_states)
            if hidden_states.requires_grad:
                hidden_states = self._checked(hidden_states)
            out: Tensor = moe_layer(hidden_states, load_E, self._entry, token_ids_T, active_T)
            return out
        if hidden_states.dim() != 2 or active_T is not None:
            return self.run_operator(hidden_states, load_E, token_ids_T, active_T)
        return self.run(self._checked(hidden_states), load_E, token_ids_T)

    def run_operator(
        self,
        hidden_states: Tensor,
        expert_load_E: Tensor,
        token_ids_T: Tensor | None = None,
        active_T: Tensor | None = None,
    ) -> Tensor:
        """The implementation of torch's operator. It checks the tokens, so that graphs need no guards for it.

        Raises ShapeError for other numbers of dimensions, and for ids and masks of another shape.
        """
        expect_dense("hidden_states", hidden_states)
        if hidden_states.dim() not in (2, 3):
            raise ShapeError(
                f"hidden_states has {hidden_states.dim()} dimensions {tuple(hidden_states.shape)}, "
                "expected 2 [T, H] or 3 [B, S, H]"
            )
        shape = hidden_states.shape
        ids_T = self._flat("token_ids_T", token_ids_T, shape[:-1]) if hidden_states.dim() == 3 else token_ids_T
        x_TH = self._checked(hidden_states.flatten(0, -2))
        if active_T is None:
            return self.run(x_TH, expert_load_E, ids_T).view(shape)
        expect("active_T", active_T, "T" if len(shape) == 2 else "X T", MASKS, self.device)
        place_N = self._flat("active_T", active_T, shape[:-1]).nonzero().flatten()
        if ids_T is not None:
            ids_T = self._flat("token_ids_T", ids_T, x_TH.shape[:1])[place_N]
        y_TH = torch.zeros_like(x_TH, requires_grad=False)
        with torch.no_grad():
            y_TH[place_N] = self.run(x_TH[place_N], expert_load_E, ids_T)
        return y_TH.view(shape)

    @staticmethod
    def _flat(name: str, tensor: Tensor | None, shape: torch.Size) -> Any:
        """A tensor with one element for each token, flat; raises ShapeError for another shape."""
        if tensor is None:
            return None
        expect_dense(name, tensor)
        if tensor.shape != shape:
            raise ShapeError(f"{name} is {tuple(tensor.shape)}, expected {tuple(shape)} as of hidden_states")
        return tensor.flatten()

    def run(
        self, x_TH: Tensor, expert_load_E: Tensor, token_ids_T: Tensor | None = None, given: Routing | None = None
    ) -> Tensor:
        """The forward on checked tokens without torch's operator: one prepared call where there is one, else `steps`.

        given: a checked routing, with which the shared experts are not added; None: that of the router. An interrupt at
        any instruction is reported to peers, which may be in the same call. Errors of this library are reported where
        they arise, and a refusal of arguments is not.
        """
        try:
            if (direct := self._direct(x_TH, expert_load_E, given)) is not None:
                return self._run_direct(*direct, x_TH, expert_load_E, given)
            if (exchanged := self._exchanged(x_TH, expert_load_E, given)) is not None:
                return self._run_exchanged(*exchanged, x_TH, expert_load_E, given)
            with torch.no_grad():
                return wait(self.steps(x_TH, expert_load_E, token_ids_T, given))
        except BaseException as error:
            if not isinstance(error, MoEMKError):
                self.state.grid.fail(error)
            raise

    def _direct(self, x_TH: Tensor, load_E: Tensor, given: Routing | None) -> tuple[FusedForward, LayerCall] | None:
        """The call of the experts backend if the next forward may be made by it: no token leaves this rank."""
        if not self.state.is_direct or self.spans.recorder is not None or self._latent is not None:
            return None
        if given is None:
            if self.hash_router is not None:
                return None
        elif not can_be_called(x_TH, given.ids_TK, given.weights_TK):
            return None
        fused = self._fused_forward()
        call = fused.call if given is None else fused.alone
        return None if call is None or not fused.takes(x_TH, load_E) else (fused, call)

    def _run_direct(
        self, fused: FusedForward, call: LayerCall, x_TH: Tensor, load_E: Tensor, given: Routing | None
    ) -> Tensor:
        """The forward in one call of the experts backend, with the router where that is a part of it."""
        listener, routing, is_routed = self.on_routing, given, given is not None or not call.routes
        if given is None and is_routed:
            with torch.no_grad():
                routing = self.state.backends.gate.route(x_TH, self.router)[0]
        elif given is None and listener is not None:
            routing = self._unwritten(x_TH.shape[0])
        tensors = None if routing is None else (routing.ids_TK.contiguous(), routing.weights_TK.contiguous())
        y_TH = call(x_TH, load_E, tensors, is_routed=is_routed)
        self._tokens[0] += x_TH.shape[0]
        if listener is not None and routing is not None:
            listener(routing if given is None else replace(given, ids_TK=given.ids_TK.to(torch.int32)))
        assert fused.kernel is not None
        record_as_stages(fused.kernel, y_TH, 2 * y_TH.nbytes)
        return y_TH

    def _unwritten(self, num_tokens: int) -> Routing:
        """Memory for a routing that a native call writes."""
        shape = num_tokens, self.router.top_k
        ids_TK = torch.empty(shape, dtype=torch.int32, device="cpu")
        return Routing(ids_TK, torch.empty(shape, dtype=torch.float32, device="cpu"))

    def _run_exchanged(
        self, fused: FusedForward, call: ExchangedCall, x_TH: Tensor, load_E: Tensor, given: Routing | None
    ) -> Tensor:
        """The forward between ranks in one native call, which returns in between for a listener and shared experts."""
        placed = self.state
        try:
            shared, listener = placed.backends.shared if given is None else None, self.on_routing
            routing, routed, added = None, None, list[Tensor]()
            is_routed = given is not None or not call.routes
            if is_routed:
                with torch.no_grad():
                    chosen = placed.backends.gate.route(x_TH, self.router)[0] if given is None else given
                    self._record(chosen, load_E)
                    physical = self._physical(chosen, placed)
                routing = physical.ids_TK.to(torch.int32).contiguous(), physical.weights_TK.float().contiguous()
            elif listener is not None:
                written = self._unwritten(x_TH.shape[0])
                routing, routed = (written.ids_TK, written.weights_TK), partial(listener, written)
            meanwhile = None if shared is None else lambda: added.append(shared(x_TH))
            y_TH = call(x_TH, load_E, routing, is_routed=is_routed, routed=routed, meanwhile=meanwhile)
            if not is_routed:
                self._tokens[0] += x_TH.shape[0]
            if added:
                with torch.no_grad():
                    y_TH = (y_TH.to(torch.float32) + added[0]).to(self.dtype)
            assert fused.kernel is not None
            record_as_stages(fused.kernel, y_TH, call.experts_bytes)
            return y_TH
        except BaseException as error:
            placed.grid.fail(error)
            raise

    def _exchanged(
        self, x_TH: Tensor, load_E: Tensor, given: Routing | None
    ) -> tuple[FusedForward, ExchangedCall] | None:
        """The native call between ranks if the next forward may be made by it."""
        placed, routes = self.state, given is not None or self.hash_router is None
        plain = routes and self.spans.recorder is None and self._latent is None
        if not (placed.is_exchanged and plain and x_TH.is_cpu):
            return None
        fused = self._fused_forward()
        call = fused.exchanged
        if call is None or not (placed.grid.has_agreed and fused.takes(x_TH, load_E) and call.is_ready(x_TH.shape[0])):
            return None
        return fused, call

    def steps(
        self,
        x_TH: Tensor,
        expert_load_E: Tensor | None = None,
        token_ids_T: Tensor | None = None,
        given: Routing | None = None,
    ) -> Flight[Tensor]:
        """The forward as a flight: for several ranks in one process, or several micro-batches at once.

        given: a checked routing of logical experts, with which shared experts are not added.
        """
        placed, is_accepted = self.state, False
        epochs: tuple[int | None, int | None] = None, None
        # From the first instruction to the last: an interrupt may arise at any of them while peers are in this call.
        try:
            grid = placed.grid
            epochs, gate = grid.epochs, placed.backends.gate
            shared = placed.backends.shared if given is None else None
            if placed.weights is None:
                _ = self.weights  # raises
            load_E = self.expert_load if expert_load_E is None else expert_load_E
            router: Router | HashedTokens = self.router
            if self.hash_router is not None and given is None:
                router = self._router_of(x_TH, token_ids_T)
            is_accepted = True
            if grid.agreed != epochs:
                yield from grid.agree(self._notes)
            if placed.lost is not None:
                placed.lost.check()
            fused_weights = None if shared is None else placed.backends.fuse_shared(placed.kernel, placed.laid_out)
            logits_TE: Tensor | None = None
            if given is not None:
                self._record(given, load_E)
                physical = self._physical(given, placed)
            else:
                with self.spans.span("route"):
                    physical, logits_TE = self._route(x_TH, gate, router, load_E, placed)
            if isinstance(placed.kernel, MonolithicKernel):
                assert logits_TE is not None, "it routes inside"
                routed = placed.kernel.steps(self._to_latent(x_TH), logits_TE, gate.bias_E, placed.laid_out)
            else:
                routed = placed.kernel.steps(self._to_latent(x_TH), physical, fused_weights or placed.laid_out)
            routed = routed if self._latent is None else self._from_latent(routed)
            if shared is None or fused_weights is not None:
                y_TH = yield from routed
            else:
                rows = placed.grid.share_of(x_TH.shape[0]) if placed.is_partial else slice(None)
                y_TH, shared_XH = yield from alongside(routed, lambda: shared(x_TH[rows]))
                total_TH = y_TH.to(torch.float32, copy=True)
                total_TH[rows] += shared_XH
                y_TH = total_TH.to(y_TH.dtype)
            y_TH = yield from placed.grid.late_reduce(y_TH, self.spans, partial_over_ep=placed.is_partial)
            return y_TH.to(self.dtype)
        except BaseException as error:
            if is_accepted or not isinstance(error, MoEMKError):
                placed.grid.fail(error, epochs)
            raise

    def warm_up(self, token_counts: Iterable[int]) -> None:
        """Run once with each number of tokens, so that no later call compiles kernels, reads tuned tiles or allocates.

        For a GPU: the numbers for which graphs are captured, and one of prefill. Every rank calls it with the same
        numbers. The tokens are zeros; `expert_load` and `on_routing` do not see them, `report()` does. Raises
        ShapeError for more than kernel.max_num_tokens.
        """
        observer, self.on_routing, tokens = self.on_routing, None, self._tokens[0]
        try:
            for count in sorted(set(token_counts)):
                x_TH = torch.zeros((count, self.config.model.hidden_size), dtype=self.dtype, device=self.device)
                token_ids_T = torch.zeros((count,), dtype=torch.int64, device=self.device)
                self.run(self._checked(x_TH), torch.zeros_like(self.expert_load), token_ids_T)
        finally:
            self.on_routing, self._tokens[0] = observer, tokens

    def forward_routed(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Run the routed experts only, for an engine that routes by itself: (T, H), (T, K), (T, K) to (T, H).

        topk_weights: already renormalised and scaled; floats, used as f32. topk_ids: logical experts, distinct for each
        token on a GPU; -1 goes nowhere. Ids other than those that the last `route` returned are read on the host to
        refuse those that do not exist. Shared experts are not added.
        """
        _ = self.weights  # raises WeightError before loading
        x_TH, load_E, untraced = self._checked(hidden_states), self._buffers["expert_load"], is_untraced(hidden_states)
        assert load_E is not None
        if untraced and can_be_called(x_TH, topk_ids, topk_weights) and topk_ids.shape[1] == self.config.router.top_k:
            given = Routing(topk_ids, topk_weights)
            if (direct := self._direct(x_TH, load_E, given)) is not None:
                try:
                    return self._run_direct(*direct, x_TH, load_E, given)  # it checks the ids
                except ShapeError:
                    self._check_routing(x_TH, topk_weights, topk_ids)  # names the ids
                    raise
        self._check_routing(x_TH, topk_weights, topk_ids, read_ids=not self._is_of_router(topk_ids))
        if isinstance(self.kernel, MonolithicKernel):
            chosen = self.decision.chosen.experts
            raise UnsupportedError(f"{chosen} routes inside", ["pin kernel.experts to another backend"])
        routing = Routing(topk_ids.to(torch.int32), topk_weights.float().masked_fill(topk_ids < 0, 0.0))
        return self.run(x_TH, load_E, given=routing) if untraced else wait(self.steps(x_TH, load_E, given=routing))

    def _check_routing(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, *, read_ids: bool = True) -> None:
        sizes = x_TH.shape[0], self.config.router.top_k, self.config.model.num_experts
        check_routing(weights_TK, ids_TK, self.device, sizes, read_ids=read_ids)

    def _to_latent(self, x_TH: Tensor) -> Tensor:
        """Tokens in the width of the experts."""
        return x_TH if self._latent is None else _project(x_TH, self._latent[0])

    def _from_latent(self, routed: Flight[Tensor]) -> Flight[Tensor]:
        """What the experts return, in the width of the tokens. Linear: partial sums stay partial sums."""
        y_TH = yield from routed
        return y_TH if self._latent is None else _project(y_TH.to(self.dtype), self._latent[1])

    def route(self, hidden_states: Tensor, token_ids_T: Tensor | None = None) -> Routing:
        """The first stage alone: logical experts, weights and router logits of each token.

        token_ids_T: as of `forward`. A token with a NaN among its scores gets ids of -1, see `router.grouped_topk`.
        """
        _ = self.weights  # raises WeightError before loading
        hidden_states = self._checked(hidden_states)
        routing, logits_TE = self.state.backends.gate.route(hidden_states, self._router_of(hidden_states, token_ids_T))
        ids_TK = routing.ids_TK
        if not ids_TK.is_inference():  # those have no version
            self._routed_ids = weakref.ref(ids_TK), ids_TK._version, ids_TK.data_ptr()
        return routing if routing.logits_TE is not None else replace(routing, logits_TE=logits_TE)

    def _is_of_router(self, topk_ids: Tensor) -> bool:
        """Whether these are the ids that the last `route` returned, not written to since."""
        if self._routed_ids is None:
            return False
        ids, version, address = self._routed_ids
        same = topk_ids is not None and ids() is topk_ids
        return same and topk_ids._version == version and topk_ids.data_ptr() == address

    def check_token_ids(self, x_TH: Tensor, token_ids_T: Tensor | None) -> None:
        """Raise ShapeError or ConfigError unless these ids can route these tokens; reads them on the host.

        For callers that split a batch over ranks: all of them must refuse a bad batch, not only the rank with the bad
        part.
        """
        if isinstance(router := self._router_of(x_TH, token_ids_T), HashedTokens):
            router.router.check(router.token_ids_T)

    def recover(self) -> None:
        """Resume after a call failed on some rank. Every rank of the layer's groups calls it; it waits for them.

        One call covers all layers over the same groups. Raises CommError where a rank is dead or was late, so that
        connections are gone, and UnsupportedError for a transport that cannot start over: both need new groups.
        """
        wait(self.state.grid.recover())

    def _fused_forward(self) -> FusedForward:
        """The prepared forward, prepared again if any part that it was made from has been replaced."""
        placed = self.state
        gate, shared = placed.backends.gate, placed.backends.shared
        parts = (placed, self.router, gate.logit_bias_E, shared and shared.weights)
        fused = self._fused
        if fused is None or not fused.is_current(parts, gate):
            fused = self._fused = build_fused_forward(placed, self.router, parts)
        return fused

    def _notes(self) -> dict[str, str]:
        """What all ranks must agree on before the first collective."""
        return {**self.decision.notes(), **self.state.notes, **self.state.backends.gate.notes()}

    def _route(
        self, x_TH: Tensor, gate: Gate, router: Router | HashedTokens, load_E: Tensor, placed: ServingState
    ) -> tuple[Routing, Tensor]:
        """Physical routing and logits; on a GPU one launch after the gate where the router has a kernel for both."""
        if self.device.type == "cuda":
            logits_TE, tables = gate(x_TH), placed.tables
            if isinstance(router, Router) and placed.lost is None and tables.one_to_one:
                both = router.placed(logits_TE, gate.bias_E, load_E, tables.choice_X)
                if both is not None:
                    self._tokens[0] += x_TH.shape[0]
                    if self.on_routing is not None:
                        self.on_routing(both[0])
                    return both[1], logits_TE
            routing = router(logits_TE, gate.bias_E)
        else:
            routing, logits_TE = gate.route(x_TH, router)
        self._record(routing, load_E)
        return self._physical(routing, placed), logits_TE

    def _record(self, routing: Routing, load_E: Tensor) -> None:
        """Count each chosen expert on the device, except ids of -1, and call `on_routing`."""
        self._tokens[0] += routing.num_tokens
        if self.on_routing is not None:
            self.on_routing(routing)
        ids = routing.ids_TK.flatten()
        few = len(ids) <= FEW_CHOICES and ids.is_cpu and load_E.is_cpu and is_untraced(load_E)
        dense = (
            load_E.dtype is torch.int64 and load_E.shape == (self.config.model.num_experts,) and load_E.is_contiguous()
        )
        if few and dense:
            load = load_E.numpy()  # a view
            for expert in ids.tolist():
                if expert >= 0:
                    load[expert] += 1
            return
        ids = ids.long()
        load_E.index_add_(0, ids.clamp_min(0), (ids >= 0).to(torch.int64))

    def _physical(self, routing: Routing, placed: ServingState) -> Routing:
        """Choose replicas: the same ones on ranks with the same tokens, else spread over the ranks."""
        if placed.lost is not None:
            assert self._dropped is not None
            routing = placed.lost.leave_out(routing, self._dropped)
        if placed.tables.is_identity:
            return routing
        salt = 0 if placed.is_partial else placed.grid.ep.rank
        return Routing(placed.tables.to_physical(routing.ids_TK, salt), routing.weights_TK, routing.losses)

    def _router_of(self, x_TH: Tensor, token_ids_T: Tensor | None) -> Router | HashedTokens:
        return router_of_batch(self.router, self.hash_router, token_ids_T, x_TH, self.name)

    def _checked(self, hidden_states: Tensor) -> Tensor:
        """The tokens if the layer can run on them, contiguous: a GEMM rounds other strides differently."""
        config = self.state.backends.config
        hidden_size, max_num_tokens = config.model.hidden_size, config.kernel.max_num_tokens
        if type(hidden_states) is not Tensor:
            expect_dense("hidden_states", hidden_states)
        if (
            hidden_states.dtype is not self.dtype
            or hidden_states.layout is not STRIDED
            or hidden_states.device != self.device
            or hidden_states.dim() != 2
            or hidden_states.shape[1] != hidden_size
            or hidden_states.shape[0] > max_num_tokens
            or hidden_states.requires_grad
        ):
            if self.device.type == "meta":
                _ = self.weights  # raises WeightError
            check_hidden_states(hidden_states, self.dtype, self.device, hidden_size, max_num_tokens)
        return hidden_states if hidden_states.is_contiguous() else hidden_states.contiguous()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A second layer over the same groups, with weights of its own."""
        return copied(self, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Settings and weights. Raises ConfigError for process groups, which cannot be pickled."""
        return pickled(self)

    def extra_repr(self) -> str:
        """The chosen backends and sizes."""
        state = self.state
        fused = ", shared experts fused" if state.backends.fuse_shared(state.kernel, state.laid_out) is not None else ""
        gate = self.decision.gate.tier
        return f"{self.decision.chosen.name}, gate {gate}{fused}, ep={self.ep.size} tp={self.tp.size}, {self.dtype}"


_project = without_autocast(nn.functional.linear)


def is_untraced(x_TH: Tensor) -> bool:
    """Whether this is a plain tensor outside of tracing, dispatch modes and functorch: else use the torch operator."""
    if type(x_TH) is not Tensor or is_compiling():
        return False
    followed = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
    return not followed and torch._C._functorch.peek_interpreter_stack() is None
