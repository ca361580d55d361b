"""The layer an engine embeds: gate, route, carry out, multiply, carry home, shared experts, one late sum.

One forward:

    logits  = gate(x)                              (T, E)
    routing = router(logits, bias)                 ids and weights (T, K), logical experts
    load   += how often each expert was chosen
    y       = kernel(x, physical ids, weights)     while tokens are in flight: shared = mlp(x)
    y       = all_reduce(y + shared)               only over groups in which both are partial sums
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.experts.base import FusedExperts
from moe_mk.external.device import profile_here, usable_device
from moe_mk.external.library import emulated, installed
from moe_mk.flight import Flight
from moe_mk.layer.checks import check_hidden_states, check_routing
from moe_mk.layer.custom_op import moe_layer, number_of_new
from moe_mk.layer.gate import Gate
from moe_mk.layer.grid import Grid
from moe_mk.layer.hashed import hash_router_of, router_of_batch
from moe_mk.layer.placed import PlacedLayer
from moe_mk.layer.placing import Half, build_half
from moe_mk.layer.report import MemoryReport, memory_report
from moe_mk.layer.settings import expert_map_of, layer_spec_of, router_of, with_sizes
from moe_mk.layer.shared import shared_experts
from moe_mk.oracle import select
from moe_mk.oracle.assemble import Parts
from moe_mk.oracle.verdict import Decision
from moe_mk.quant.plain import plain
from moe_mk.router.hashed import HashedTokens, HashRouter
from moe_mk.router.router import Router
from moe_mk.runner.naive import MonolithicKernel
from moe_mk.runner.overlap import alongside, run_alone
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Spans
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.source import MappingSource, SafetensorsSource, TensorSource

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Progress = Callable[[str, int, int], None]


class MoELayer(PlacedLayer):
    """A MoE layer on one rank of its groups, decided at construction, empty until it is loaded."""

    expert_load: Tensor
    """int64 [E]. How many tokens chose each logical expert since the last reset; -1 counts for nobody."""
    on_routing: Callable[[Routing], None] | None = None
    """Told of the logical routing of every forward, which it must not change; see `trace.routing_recorder`."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        groups: ParallelGroups | DeviceMesh | None = None,
        name: str = "moe",
    ) -> None:
        """Decide how the layer will run; allocates nothing but the load counter.

        groups: what the engine made; their sizes must be those of config.parallel where it states any.
        name: how errors call the layer. Raises ConfigError, or UnsupportedError with every reason.
        """
        super().__init__()
        if groups is not None and not isinstance(groups, ParallelGroups):
            groups = ParallelGroups.from_mesh(groups)
        self.device = usable_device(device)
        self.dtype, self.groups, self.name = dtype, groups or ParallelGroups(), name
        grid = Grid(self.groups, config.kernel.timeout_s, name)
        self.config = with_sizes(config, grid.sizes)
        self.spans = Spans()
        self.decision = self._decide()
        self.router = router_of(self.config)
        self._half = build_half(self.decision, expert_map_of(self.config), grid, self.device, self.spans)
        self._build()

    def _decide(self) -> Decision:
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(f"dtype {self.dtype} cannot be a layer's; use bfloat16, float16 or float32")
        return select(
            Problem(
                config=self.config,
                device=profile_here(self.device),
                dtype=plain(self.dtype),
                num_tokens=self.config.kernel.max_num_tokens,
                installed=installed(),
                emulated=emulated(),
            )
        )

    def _build(self) -> None:
        parts = Parts(self.expert_map, self.device, self.ep, self.spans, self._half.tables)
        self._shared = shared_experts(self.decision, parts) if self.config.model.shared_size else None
        self._gate = Gate(self.decision, self.dtype, self.device)
        self._by_id: HashRouter | None = None
        if self.config.router.hash_vocabulary is not None and isinstance(self.kernel, MonolithicKernel):
            raise UnsupportedError(
                f"{self.decision.chosen.experts} routes inside, by scores alone; layer {self.name!r} chooses experts "
                "by token id",
                ["pin kernel.experts to another backend"],
            )
        self._number = number_of_new(self)
        num_experts = self.config.model.num_experts
        self.register_buffer(
            "expert_load", torch.zeros(num_experts, dtype=torch.int64, device=self.device), persistent=False
        )

    # What a user asks before and after loading.

    def explain(self) -> Decision:
        """The decision: every pair with every reason. Print it, or take `as_dict()`."""
        return self.decision

    def memory_report(self) -> MemoryReport:
        """Bytes on this rank, predicted from the decision."""
        return memory_report(self.decision, self.expert_map, self.ep.rank)

    @property
    def spec(self) -> LayerSpec:
        """What a checkpoint must hold for this layer."""
        return layer_spec_of(self.config)

    def reset_expert_load(self) -> None:
        """Count from zero again."""
        self.expert_load.zero_()

    # Loading.

    def load_from_safetensors(
        self,
        path: str | PathLike[str],
        layer: int,
        *,
        prefix: str | None = None,
        on_progress: Progress | None = None,
    ) -> Self:
        """Load this rank's share of one layer from a checkpoint folder or file. Strict: every problem is told at once.

        On a CPU, experts stay memory-mapped. Raises WeightError or ConfigError before anything is changed.
        """
        return self.load(SafetensorsSource(path), layer, prefix=prefix, on_progress=on_progress)

    def load_weights(self, tensors: Mapping[str, Tensor], layer: int = 0, *, prefix: str | None = "") -> Self:
        """Load from tensors in memory, named as a checkpoint names them below `prefix`. Experts are views of them."""
        return self.load(MappingSource(tensors), layer, prefix=prefix)

    def load(
        self, source: TensorSource, layer: int, *, prefix: str | None = None, on_progress: Progress | None = None
    ) -> Self:
        """Load from any source of tensors."""
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
        self._source = source, layer
        return self

    def take(self, weights: LayerWeights, *, on_progress: Progress | None = None) -> None:
        """Use weights that are already loaded for this rank; experts are brought into the layout of the backend."""
        experts = self.kernel.experts
        if on_progress is not None and isinstance(experts, FusedExperts):
            laid_out = experts.relayout_telling(weights.experts, on_progress)
        else:
            laid_out = experts.relayout(weights.experts)
        if self._shared is not None and weights.shared is not None:
            self._shared.load(weights.shared, file_backed=weights.experts.file_backed)
        self._gate.load(weights.gate_EH, weights.bias_E, weights.logit_bias_E)
        self._by_id = hash_router_of(self.config, weights.table_XK, self.device)
        self._half = replace(self._half, weights=weights, laid_out=laid_out)

    # Running.

    def forward(self, hidden_states: Tensor, token_ids_T: Tensor | None = None) -> Tensor:
        """Run the layer: (T, H) to (T, H), shared experts included. T may be zero and differ between ranks.

        token_ids_T: integers, the tokens of the vocabulary; needed where they choose the experts, else without effect.
        """
        hidden_states = self._checked(hidden_states)
        self._router_of(hidden_states, token_ids_T)
        if torch.compiler.is_compiling() or type(hidden_states) is not Tensor:
            out: Tensor = moe_layer(hidden_states, self.expert_load, self._number, token_ids_T)
            return out
        with torch.no_grad():  # nobody looks on: the operator would cost a tenth of a millisecond
            return run_alone(self.steps(hidden_states, token_ids_T=token_ids_T))

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
        yield from half.grid.agree(lambda: {**self.decision.notes(), **half.notes})
        assert not isinstance(half.kernel, MonolithicKernel)
        self._record(routing, self.expert_load)
        physical = self._physical(routing, half)
        y_TH = yield from half.kernel.steps(x_TH, physical, half.laid_out)
        return (yield from self._late_reduce(y_TH, half))

    def route(self, hidden_states: Tensor, token_ids_T: Tensor | None = None) -> Routing:
        """The first stage alone: logical experts and weights of each token. token_ids_T: as of `forward`."""
        hidden_states = self._checked(hidden_states)
        return self._gate.route(hidden_states, self._router_of(hidden_states, token_ids_T))[0]

    def _router_of(self, x_TH: Tensor, token_ids_T: Tensor | None) -> Router | HashedTokens:
        return router_of_batch(self.router, self._by_id, token_ids_T, x_TH, self.name)

    def steps(
        self, x_TH: Tensor, expert_load_E: Tensor | None = None, token_ids_T: Tensor | None = None
    ) -> Flight[Tensor]:
        """The forward as a flight: for several ranks in one process, or several micro-batches at once."""
        load_E = self.expert_load if expert_load_E is None else expert_load_E
        router = self._router_of(x_TH, token_ids_T)
        half = self._half
        yield from half.grid.agree(lambda: {**self.decision.notes(), **half.notes})
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

    def _with_shared(self, half: Half) -> Any:
        """Routed and shared experts as one, where tokens stay on their rank and the backend can; None: one by one."""
        if self._shared is None or self._shared.weights is None or isinstance(half.kernel, MonolithicKernel):
            return None
        if half.kernel.prepare_finalize.traits.max_ranks != 1:
            return None
        return half.kernel.experts.beside(half.laid_out, self._shared.weights)

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
        salt = 0 if half.is_partial else half.grid.ep.rank
        return Routing(half.tables.to_physical(routing.ids_TK, salt), routing.weights_TK, routing.losses)

    def _late_reduce(self, y_TH: Tensor, half: Half) -> Flight[Tensor]:
        return half.grid.late_reduce(y_TH, self.spans, partial_over_ep=half.is_partial)

    def _checked(self, hidden_states: Tensor) -> Tensor:
        """The tokens, if the layer can run on them, row by row: a GEMM rounds other strides in another way."""
        _ = self.weights
        model, kernel = self.config.model, self.config.kernel
        check_hidden_states(hidden_states, self.dtype, self.device, model.hidden_size, kernel.max_num_tokens)
        return hidden_states.contiguous()

    # Copies.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda` and `cpu` call: a move to where the layer already is. Raises UnsupportedError elsewhere."""
        there = fn(self.expert_load.new_empty(0)).device
        if there != self.device:
            raise UnsupportedError(
                f"layer {self.name!r} cannot be moved from {self.device} to {there}",
                [f"its backends were chosen for {self.device}; build it with device={str(there)!r} and load it there"],
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A second layer over the same groups, with weights of its own."""
        twin = type(self)(self.config, device=self.device, dtype=self.dtype, groups=self.groups, name=self.name)
        memo[id(self)] = twin
        if self._half.weights is not None:
            twin.set_placement(self.expert_map)
            twin.take(copy.deepcopy(self._half.weights, memo))
        twin.expert_load.copy_(self.expert_load)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle settings and weights. Groups do not travel between processes: raises ConfigError if there are any."""
        if self.groups != ParallelGroups():
            raise ConfigError(f"layer {self.name!r} holds process groups, which cannot travel; build it where it runs")
        state = (self._half.weights, self.expert_map, self.expert_load.clone())
        return _rebuild, (type(self), self.config, str(self.device), self.dtype, self.name, state)

    def extra_repr(self) -> str:
        """What was chosen."""
        together = ", shared experts in the same pass" if self._with_shared(self._half) is not None else ""
        gate = self.decision.gate.tier
        return f"{self.decision.chosen.name}, gate {gate}{together}, ep={self.ep.size} tp={self.tp.size}, {self.dtype}"


def _rebuild(
    cls: type[MoELayer], config: MoEConfig, device: str, dtype: torch.dtype, name: str, state: Any
) -> MoELayer:
    layer = cls(config, device=device, dtype=dtype, name=name)
    weights, expert_map, load_E = state
    if weights is not None:
        layer.set_placement(expert_map)
        layer.take(weights)
    layer.expert_load.copy_(load_E)
    return layer
