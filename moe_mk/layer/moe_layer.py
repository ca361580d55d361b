"""The layer that an engine embeds: configured at construction, loaded from a checkpoint, then called.

One forward:

    logits  = gate(x)                              (T, E), of the normalised x where model.input_norm is set
    routing = router(logits, bias)                 ids and weights (T, K), logical experts
    load   += how often each expert was chosen
    y       = kernel(x, physical ids, weights)     during dispatch: shared = mlp(x)
    y       = all_reduce(y + shared)               only over groups in which both are partial sums
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moe_mk.comm.collective import collective
from moe_mk.comm.communicator import Communicator
from moe_mk.comm.failure import FRAMES
from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import MoEMKError, ShapeError, WeightError
from moe_mk.experts.monolithic import MonolithicKernel
from moe_mk.experts.residency import ResidencyPool
from moe_mk.external.device import wanted_device
from moe_mk.flight import Flight, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.layer import settings
from moe_mk.layer.checks import checked_routing, checked_tokens, expect_inference
from moe_mk.layer.custom_op import LAYERS, ROUTED, Identity, is_untraced, run_operator, traced_route
from moe_mk.layer.forward import NO_WEIGHTS, PreparedForward, steps
from moe_mk.layer.gate import Gate
from moe_mk.layer.grid import Grid
from moe_mk.layer.live import LivePlacement
from moe_mk.layer.module_habits import Part, WithoutParameters, copied, counter, pickled
from moe_mk.layer.report import cleared, explained, memory_of, report_of
from moe_mk.layer.routing import LayerRouting, RouterPart, forward_replayed, run_replayed
from moe_mk.layer.serving_state import Backends, ServingState, build_state
from moe_mk.layer.shared import shared_experts
from moe_mk.oracle.assemble import Parts
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.router.hashed import HashRouter, ImageRouter
from moe_mk.router.replay import ReplayedTokens
from moe_mk.shapes import expect_dense
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Spans
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.loader import LayerLoader
from moe_mk.weights.source import MappingSource, TensorSource

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Progress = Callable[[str, int, int], None]


def groups_of(layer: MoELayer, /, *_: object, **__: object) -> Grid:
    """The groups whose ranks call a layer together."""
    return layer.state.experts.grid


class MoELayer(WithoutParameters):
    """A MoE layer on one rank of its groups. Backends are chosen at construction; it has no weights until loaded."""

    state: ServingState
    """Everything that a forward reads, as it serves now; another object after each change."""
    expert_load: Tensor
    """int64 [E]. How many tokens chose each logical expert since the last reset; ids of -1 are not counted, and experts
    without weights are counted apart."""
    source: tuple[TensorSource, int] | None = None
    """Where the weights were read, and the number of the layer there; None: they cannot be read again."""
    _prepared: PreparedForward | None = None

    config = Part[MoEConfig]("state.backends.config")
    """The settings that are in use."""
    decision = Part[Decision]("state.experts.decision")
    """The backends that are in use, and why."""
    groups = Part[ParallelGroups]("state.backends.groups")
    """The process groups that are in use."""
    expert_map = Part[ExpertMap]("state.expert_map")
    """The current placement: which rank holds which expert."""
    kernel = Part[FusedMoEKernel | MonolithicKernel]("state.experts.kernel")
    """The current transport and experts backend."""
    epoch = Part[int]("state.epoch")
    """The number of placements before the current one."""
    ep = Part[Communicator]("state.experts.grid.ep")
    """The ranks over which experts are distributed."""
    tp = Part[Communicator]("state.experts.grid.tp")
    """The ranks that hold slices of the same experts."""
    dp = Part[Communicator]("state.experts.grid.dp")
    """The ranks whose expert loads are summed."""
    on_lost_expert = Part[str]("state.backends.config.parallel.on_lost_expert")
    """The policy for calls when experts have no live copy: `parallel.on_lost_expert`."""
    router = RouterPart("routing.router")
    """Chooses experts by scores; may be replaced by a function of logits and bias that returns a `Routing`."""
    hash_router = Part[HashRouter | ImageRouter | None]("routing.hash_router")
    """Chooses experts by token id, once its table is loaded; None in a layer that chooses by scores."""
    on_routing = Part[Callable[[Routing], None] | None]("routing.listener")
    """Called with the logical routing of every forward, which it must not change, before or after the experts run; see
    `lab.trace.routing.RoutingRecorder`."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        groups: ParallelGroups | DeviceMesh | None = None,
        name: str = "moe",
        pool: ResidencyPool | None = None,
    ) -> None:
        """Choose the backends; allocates nothing but the load counter and tables of the placement.

        device: None is torch's default device. On the meta device, backends are chosen for this machine, and again for
        the device that `to_empty(device=...)` states; loading without it uses torch's default device, or the CPU.
        groups: process groups of the engine; their sizes must be those of config.parallel where it states any.
        name: of the layer in error messages. pool: the memory of `kernel.residency` for several layers, instead of its
        slots or bytes. Raises ConfigError, or UnsupportedError with every reason.
        """
        super().__init__()
        settings.expect_arguments(config, name, pool)
        groups, wanted = ParallelGroups.of(groups), wanted_device(device)
        self.dtype, self.name, self.spans, self.pool = dtype, name, Spans(), pool
        grid = Grid(groups, config.kernel.timeout_s, name)
        config = settings.with_sizes(config, grid.sizes)
        self.routing = LayerRouting(config, name)
        self._build_for(wanted, config, groups, grid, settings.expert_map_of(config))
        self._entry = LAYERS.enter(self, self._identity())

    def _build_on(self, device: torch.device, *parts: Any) -> None:
        """Choose and build everything that depends on the device; changes nothing if no backend is eligible.

        parts: settings, groups, grid and placement; none: those that are in use.
        """
        config, groups, grid, expert_map = parts or (self.config, self.groups, self.state.experts.grid, self.expert_map)
        decision, shared = settings.decide(config, self.dtype, device), None
        if config.model.shared_size:
            shared = shared_experts(decision, Parts(expert_map, device, grid.ep, self.spans))
        backends = Backends(config, config, groups, Gate(decision, self.dtype, device), shared, self.pool)
        state = build_state(decision, backends, expert_map, grid, device, self.spans)
        self.register_buffer("expert_load", counter(config.model.num_experts, device), persistent=False)
        self.routing.zero = counter((), device) if config.model.num_zero_experts else None
        self.device, self.built_for = device, device
        self.use(state)

    def use(self, state: ServingState) -> None:
        """Serve with a state from the next forward on."""
        if state.lost is not None and self.routing.dropped is None:
            self.routing.dropped = counter((), self.device)
        self.state, self._prepared = state, None

    # What was chosen, and what ran.

    explain = explained
    memory_report = memory_of
    report = report_of
    reset_report = cleared

    def reset_expert_load(self) -> None:
        """Set the counters of chosen experts to zero."""
        self.expert_load.zero_()
        self.routing.count_from(0, counter((), self.device))

    @property
    def spec(self) -> LayerSpec:
        """Return the specification of the tensors that a checkpoint must hold for this layer."""
        return settings.layer_spec_of(self.config)

    @property
    def weights(self) -> LayerWeights:
        """The loaded weights; raises WeightError before loading."""
        if self.state.weights is None:
            raise WeightError(NO_WEIGHTS.format(self.name))
        return self.state.weights

    @property
    def live(self) -> LivePlacement:
        """Changes of the placement and of the backends while the layer serves; `rebalance` calls these."""
        return LivePlacement(self)

    @property
    def dropped_assignments(self) -> int:
        """Assignments of this rank's tokens to lost experts, left out since the last reset; waits for the device."""
        return 0 if self.routing.dropped is None else int(self.routing.dropped)

    @property
    def unrouted(self) -> int:
        """Assignments since `reset_expert_load` that chose no expert; waits for the device.

        A token with a NaN among its scores, from a NaN or an infinity in its hidden state, has none: its routed experts
        add 0. So are ids of -1 of an engine.
        """
        return self.routing.unrouted(self.expert_load)

    # Loading.

    @classmethod
    def from_checkpoint(
        cls,
        path: str | PathLike[str],
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        groups: ParallelGroups | DeviceMesh | None = None,
        pool: ResidencyPool | None = None,
        prefix: str | None = None,
        on_progress: Progress | None = None,
        **overrides: Any,
    ) -> Self:
        """Build from a checkpoint folder's config.json and load one layer of it.

        prefix: the part of names before "experts.0...", where several blocks have the number of the layer.
        overrides: settings by their bare key, such as experts="reference". Scales of activations that the checkpoint
        was calibrated with become settings of the layer, and so does a table that chooses experts by token id: call
        such a layer with token_ids_T. Raises ConfigError or WeightError.
        """
        config = settings.stated(settings.config_of(path, layer, **overrides), path, layer, prefix)
        built = cls(config, device=device, dtype=dtype, groups=groups, name=f"layer {layer}", pool=pool)
        return built.load(path, layer, prefix=prefix, on_progress=on_progress)

    @collective(groups_of)
    def load(
        self,
        source: str | PathLike[str] | Mapping[str, Tensor] | TensorSource,
        layer: int,
        *,
        prefix: str | None = None,
        on_progress: Progress | None = None,
    ) -> Self:
        """Load this rank's share of one layer. Strict: reports all problems at once, before anything is changed.

        source: a checkpoint folder or file, tensors in memory with the names of a checkpoint, or any source of tensors.
        On a CPU, experts of files stay memory-mapped, and those in memory are views. prefix: of the names; None: found
        by the number of the layer. Raises WeightError or ConfigError.
        """
        if isinstance(source, Mapping):
            source = MappingSource(source)
        elif isinstance(source, str | PathLike):
            source = open_source(source)
        settings.expect_calibrated(self.decision, source, layer, prefix)
        weights = load_layer(
            source,
            layer,
            self.spec,
            owned=self.expert_map.local_to_global(self.ep.rank),
            tp_rank=self.tp.rank,
            tp_size=self.tp.size,
            prefix=prefix,
            on_progress=on_progress,
        )
        self.take(weights, on_progress=on_progress)
        self.source = source, layer
        return self

    load_from_safetensors = load

    def load_weights(self, tensors: Mapping[str, Tensor], layer: int = 0, *, prefix: str | None = "") -> Self:
        """`load` from tensors in memory, with names below `prefix`."""
        return self.load(tensors, layer, prefix=prefix)

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

    @collective(groups_of)
    def take(self, weights: LayerWeights, *, on_progress: Progress | None = None) -> None:
        """Use weights that are already loaded for this rank; converts experts to the layout of the backend.

        A layer on the meta device is built on torch's default device first, or on the CPU.
        """
        self._leave_meta()
        by_id = settings.hash_router_of(self.config, weights, self.device)
        self.use(self.state.loaded(weights, self.device, self.dtype, on_progress))
        self.routing.hash_router = by_id
        LAYERS.identify(self, self._identity(weights.gate_EH))

    def _identity(self, gate_EH: Tensor | None = None) -> Identity:
        """By what a program of `torch.export` recognises this layer; some columns of the gate are enough."""
        some_EX = None if gate_EH is None else gate_EH[:, :16]
        return Identity.of(self.name, (self.config.model, self.config.router, self.dtype), some_EX)

    def read_from(self, source: TensorSource, layer: int) -> None:
        """Set where experts are read again for a layer loaded with take(). layer: its number there."""
        self.source = source, layer

    def release_weights(self) -> int:
        """Free the experts in the format of the checkpoint where the backend has a copy; returns the number of bytes.

        Until the layer is loaded again, its experts cannot be moved, and it cannot be copied or pickled. Tensors that
        were given to `load_weights` are freed when the caller drops them as well. Raises UnsupportedError where the
        backend reads them, WeightError before loading.
        """
        freed = self.weights.experts.num_bytes
        self.use(self.state.released(self.name))
        if self.source is not None and isinstance(self.source[0], MappingSource):
            self.source = None  # it holds the same tensors
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
        try:
            load_E: Any = self._buffers["expert_load"]  # nn.Module finds a buffer by attribute only after a long search
            # What is read here becomes a guard that every call of a compiled layer checks, and must not differ between
            # layers: one graph serves all of them.
            if is_compiling() or not is_untraced(hidden_states):
                if not is_compiling():
                    expect_inference("the layer", hidden_states)
                elif hidden_states.requires_grad:
                    hidden_states = self.checked(hidden_states)
                return LAYERS.traced(hidden_states, load_E, self._entry, token_ids_T, active_T)
            if hidden_states.dim() != 2 or active_T is not None:
                return run_operator(self, hidden_states, load_E, token_ids_T, active_T)
            return self.forward_checked(self.checked(hidden_states), load_E, token_ids_T)
        except BaseException as error:
            if not isinstance(error, MoEMKError):  # `forward_checked` may have had no frame left to report it
                sys.setrecursionlimit((limit := sys.getrecursionlimit()) + FRAMES)
                self.state.experts.grid.fail(error)
                sys.setrecursionlimit(limit)
            raise

    def forward_checked(
        self,
        x_TH: Tensor,
        expert_load_E: Tensor,
        token_ids_T: Tensor | None = None,
        given: Routing | None = None,
        check: Callable[[], Routing] | None = None,
    ) -> Tensor:
        """The forward on checked tokens without torch's operator: one prepared call where there is one, else `steps`.

        given: a routing, with which the shared experts are not added; None: that of the router. check: checks what is
        given and returns it as `steps` need it; None: this was done. A native call on one rank checks ids by itself. An
        interrupt at any instruction is reported to peers, which may be in the same call. Errors of this library are
        reported where they arise, and a refusal of arguments is not.
        """
        has_gradients = torch.is_grad_enabled()
        try:
            prepared = self._prepared
            if prepared is None or not prepared.is_current():
                prepared = self.prepare()
            if (call := prepared.call_for(x_TH, expert_load_E, given)) is not None:
                try:
                    return prepared.execute(call, x_TH, expert_load_E, given)
                except ShapeError:
                    if check is not None:
                        check()  # names the ids
                    raise
            if check is not None:
                return self.forward_checked(x_TH, expert_load_E, given=check())
            with torch.no_grad():
                return wait(self.steps(x_TH, expert_load_E, token_ids_T, given))
        except BaseException as error:
            torch._C._set_grad_enabled(has_gradients)  # an interrupt within torch's own contexts leaves its mode
            if not isinstance(error, MoEMKError):
                self.state.experts.grid.fail(error)
            raise

    def prepare(self) -> PreparedForward:
        """Prepare the native calls of the present state; a forward does, once a part has been replaced."""
        self._prepared = PreparedForward(self.state, self.routing)
        return self._prepared

    def steps(
        self,
        x_TH: Tensor,
        expert_load_E: Tensor | None = None,
        token_ids_T: Tensor | ReplayedTokens | None = None,
        given: Routing | None = None,
    ) -> Flight[Tensor]:
        """The forward as a flight: for several ranks in one process, or several micro-batches at once.

        token_ids_T: as of `forward`, or the recorded experts of these tokens, see `forward_replayed`. given: a checked
        routing of logical experts, with which shared experts are not added.
        """
        load_E = self.expert_load if expert_load_E is None else expert_load_E
        return steps(self.state, self.routing, x_TH, load_E, token_ids_T, given)

    @collective(groups_of)
    def warm_up(self, token_counts: Iterable[int]) -> None:
        """Run once with each number of tokens, so that no later call compiles kernels, reads tuned tiles or allocates.

        For a GPU: the numbers for which graphs are captured, and one of prefill. Every rank calls it with the same
        numbers. The tokens are zeros; `expert_load` and `on_routing` do not see them, `report()` does. Raises
        ShapeError for more than kernel.max_num_tokens, and for what is no number of tokens.
        """
        counts = settings.token_counts_of(token_counts, self.config.kernel.max_num_tokens)
        with self.routing.unseen():
            for count in sorted(counts):
                x_TH = torch.zeros((count, self.config.model.hidden_size), dtype=self.dtype, device=self.device)
                token_ids_T = torch.zeros((count,), dtype=torch.int64, device=self.device)
                self.forward_checked(self.checked(x_TH), torch.zeros_like(self.expert_load), token_ids_T)

    def forward_routed(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Run the routed experts only, for an engine that routes by itself: (T, H), (T, K), (T, K) to (T, H).

        topk_weights: already renormalised and scaled; floats, used as f32. topk_ids: logical experts, distinct for each
        token on a GPU; -1 goes nowhere. Ids other than those that the last `route` returned are read on the host to
        refuse those that do not exist. Shared experts are not added.
        """
        if is_compiling() or not is_untraced(hidden_states):
            if not is_compiling():
                expect_inference("the layer", hidden_states)
            return ROUTED.traced(hidden_states, topk_weights, topk_ids, self._buffers["expert_load"], self._entry)
        return self.run_routed(hidden_states, topk_weights, topk_ids, self._buffers["expert_load"])

    def run_routed(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, load_E: Any) -> Tensor:
        """`forward_routed` without torch's operator. load_E: the expert load to add to."""
        try:
            _ = self.weights  # raises WeightError before loading
            x_TH = self.checked(hidden_states)
            check = partial(checked_routing, self, x_TH, topk_weights, topk_ids)
            if self.state.is_direct and self.on_routing is None and self.routing.zero is None:
                return self.forward_checked(x_TH, load_E, given=Routing(topk_ids, topk_weights), check=check)
            return self.forward_checked(x_TH, load_E, given=check())
        except BaseException as error:
            if not isinstance(error, MoEMKError):
                self.state.experts.grid.fail(error)
            raise

    forward_replayed = forward_replayed
    run_replayed = run_replayed

    def route(self, hidden_states: Tensor, token_ids_T: Tensor | None = None) -> Routing:
        """The first stage alone: logical experts, weights and router logits of each token.

        token_ids_T: as of `forward`. A token with a NaN among its scores gets ids of -1, see `router.grouped_topk`.
        """
        if is_compiling():
            return traced_route(self, hidden_states, token_ids_T)
        _ = self.weights  # raises WeightError before loading
        if not is_untraced(hidden_states):
            expect_inference("the layer", hidden_states)
            expect_dense("hidden_states", hidden_states, traced=True)
        router_TH, _ = self.state.inputs(self.checked(hidden_states))
        return self.routing.choose(self.state.backends.gate, router_TH, token_ids_T)

    @collective(groups_of, recovers=True)
    def recover(self) -> None:
        """Resume after a call failed on some rank. Every rank of the layer's groups calls it; it waits for them.

        One call covers all layers over the same groups. Raises CommError where a rank is dead or was late, so that
        connections are gone, and UnsupportedError for a transport that cannot start over: both need new groups. After
        any other exception, such as an interrupt, it is called again, also by ranks that raise CommError for it.
        """
        wait(self.state.experts.grid.recover())

    checked = checked_tokens
    __deepcopy__ = copied
    __reduce__ = pickled

    def extra_repr(self) -> str:
        state = self.state
        fused = ", shared experts fused" if state.backends.fuse_shared(state.experts) is not None else ""
        gate = self.decision.gate.tier
        return f"{self.decision.chosen.name}, gate {gate}{fused}, ep={self.ep.size} tp={self.tp.size}, {self.dtype}"
