"""The layer an engine embeds: decided at construction, loaded, copied; how it runs is in `layer.running`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem
from moe_mk.errors import ConfigError, FallbackWarning, UnsupportedError
from moe_mk.experts.base import FusedExperts
from moe_mk.external.device import profile_here, usable_device
from moe_mk.external.library import emulated, installed
from moe_mk.layer.custom_op import number_of_new
from moe_mk.layer.gate import Gate
from moe_mk.layer.grid import Grid
from moe_mk.layer.placement_state import Frame, build_half
from moe_mk.layer.report import MemoryReport, memory_report
from moe_mk.layer.running import RunningLayer
from moe_mk.layer.settings import expert_map_of, for_ranks, hash_router_of, layer_spec_of, router_of, with_sizes
from moe_mk.layer.shared import shared_experts
from moe_mk.oracle import select
from moe_mk.oracle.assemble import Parts
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant.plain import plain
from moe_mk.trace.recorder import Spans
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.source import MappingSource, SafetensorsSource, TensorSource

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Progress = Callable[[str, int, int], None]


class MoELayer(RunningLayer):
    """A MoE layer on one rank of its groups, decided at construction, empty until it is loaded."""

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
        self._asked = self.config
        self.decision = self._decide(self.config)
        self.router = router_of(self.config)
        self._half = build_half(self.decision, expert_map_of(self.config), grid, self.device, self.spans)
        self._build()

    def _decide(self, config: MoEConfig) -> Decision:
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(f"dtype {self.dtype} cannot be a layer's; use bfloat16, float16 or float32")
        return select(
            Problem(
                config=config,
                device=profile_here(self.device),
                dtype=plain(self.dtype),
                num_tokens=config.kernel.max_num_tokens,
                installed=installed(),
                emulated=emulated(),
            )
        )

    def _build(self) -> None:
        parts = Parts(self.expert_map, self.device, self.ep, self.spans, self._half.tables)
        self._shared = shared_experts(self.decision, parts) if self.config.model.shared_size else None
        self._gate = Gate(self.decision, self.dtype, self.device)
        self.hash_router = None
        self._number = number_of_new(self)
        with torch.inference_mode(False):  # else nobody could count or reset outside of that mode
            load_E = torch.zeros(self.config.model.num_experts, dtype=torch.int64, device=self.device)
        self.register_buffer("expert_load", load_E, persistent=False)

    def _frame_for(self, expert_map: ExpertMap, ep: Communicator) -> Frame:
        """Decide anew for another group. A pinned transport that cannot serve it gives way, with a FallbackWarning."""
        config = for_ranks(self._asked, expert_map)
        try:
            decision = self._decide(config)
        except UnsupportedError:
            pinned = config.kernel.prepare_finalize
            if pinned == "auto":
                raise
            config = config.with_(prepare_finalize="auto")
            decision = self._decide(config)
            text = f"layer {self.name!r}: kernel.prepare_finalize = {pinned} cannot serve a group of {ep.size}; "
            text += f"{decision.chosen.prepare_finalize} does while the group has that size"
            warnings.warn(text, FallbackWarning, stacklevel=2)
        kept = {name: open_ for name, open_ in self.groups.kept.items() if name != "ep"}
        groups = replace(self.groups, ep=ep, kept=kept)
        if _same_experts(decision, self.decision):
            return Frame(config, decision, groups, self._gate, self._shared)
        gate, shared, weights = Gate(decision, self.dtype, self.device), None, self._half.weights
        if self._shared is not None:
            shared = shared_experts(decision, Parts(expert_map, self.device, ep, self.spans))
            if weights is not None and weights.shared is not None:
                shared.load(weights.shared)
        if weights is not None:
            gate.load(weights.gate_EH, weights.bias_E, weights.logit_bias_E)
        return Frame(config, decision, groups, gate, shared)

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
            laid_out = experts.relayout(weights.experts, on_progress=on_progress)
        else:
            laid_out = experts.relayout(weights.experts)
        if self._shared is not None and weights.shared is not None:
            self._shared.load(weights.shared, file_backed=weights.experts.file_backed)
        self._gate.load(weights.gate_EH, weights.bias_E, weights.logit_bias_E)
        self.hash_router = hash_router_of(self.config, weights.table_XK, self.device)
        self._whole, self._half = None, replace(self._half, weights=weights, laid_out=laid_out)

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


def _same_experts(one: Decision, other: Decision) -> bool:
    """Whether gate and shared experts of one decision serve for the other."""
    parts = ((d.chosen.experts, d.compute, d.effect, d.gate) for d in (one, other))
    return next(parts) == next(parts)


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
