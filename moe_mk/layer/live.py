"""Changes of a layer while it serves: another placement, another group of ranks, other backends.

    staged = layer.live.stage(expert_map, arrived)     # built next to the state in use, with its weights
    old = layer.live.flip(staged)                      # used from the next forward on; every rank at the same step

`rebalance` and `hot_swap` change layers by these steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_mk.comm.collective import collective
from moe_mk.comm.communicator import Communicator
from moe_mk.config.moe import KernelConfig
from moe_mk.errors import ConfigError, FallbackWarning, UnsupportedError, WeightError
from moe_mk.flight import Flight
from moe_mk.layer.gate import Gate
from moe_mk.layer.serving_state import Backends, ServingState, build_state, with_experts
from moe_mk.layer.settings import decide, for_ranks, layer_spec_of
from moe_mk.layer.shared import shared_experts
from moe_mk.oracle.assemble import Parts
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.expert_weights import SlotWeights

if TYPE_CHECKING:
    from moe_mk.layer.moe_layer import MoELayer


@dataclass
class LivePlacement:
    """The placement and the backends of one layer, to be changed between two forwards."""

    layer: MoELayer

    @property
    def generation(self) -> tuple[int, int]:
        """How often weights were loaded, and how often backends were replaced; moves for an older one are stale."""
        return self.layer.state.loads, self.layer.state.swaps

    def export_slot(self, slot: int) -> SlotWeights:
        """The weights of one of this rank's slots in the checkpoint's format."""
        return self.layer.weights.experts.slot(slot)

    def read_expert(self, expert: int) -> SlotWeights:
        """Read any expert from the layer's source, after its last copy was lost. Raises WeightError."""
        layer = self.layer
        if layer.source is None:
            raise WeightError(
                f"layer {layer.name!r} was given its weights by take() or loader(), so nothing can be read again"
            )
        prefix, tp = layer.weights.facts.prefix, layer.tp
        spec = layer_spec_of(layer.config)
        read = load_layer(*layer.source, spec, owned=[expert], tp_rank=tp.rank, tp_size=tp.size, prefix=prefix)
        return read.experts.slot(0)

    def stage(
        self,
        expert_map: ExpertMap,
        arrived: Mapping[int, SlotWeights] | None = None,
        *,
        ep: Communicator | None = None,
        epoch: int | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> ServingState:
        """Build the state for another placement or other backends without using it yet; see `flip`.

        arrived: weights by slot of this rank for experts it does not hold yet. ep: another group of ranks, after one
        was lost or has joined: backends are chosen again for its size. epoch: the number of the placement, the same on
        all ranks; None: the next one, if it differs from the present one. settings: of the kernel section, by name;
        backends are chosen again with them.
        Raises ConfigError for a map of other sizes and for experts without weights, UnsupportedError where no pair
        supports a group of that size or those settings.
        """
        layer, serving = self.layer, self.layer.state
        grid, decision, backends = serving.experts.grid.renewed(ep), serving.experts.decision, serving.backends
        check_sizes(expert_map, serving.expert_map, grid.ep)
        if ep is not None or settings:
            decision, backends = self._decided(expert_map, ep, settings or {})
        differs = bool(settings) or expert_map != serving.expert_map
        number = serving.epoch + differs if epoch is None else epoch
        staged = build_state(decision, backends, expert_map, grid, layer.built_for, layer.spans, number)
        staged = replace(staged, loads=serving.loads, swaps=serving.swaps, latent=serving.latent)
        staged = replace(staged, input_norm_H=serving.input_norm_H)
        if serving.weights is None:
            return staged
        same = settings and expert_map == serving.expert_map and not arrived
        if same and _same_experts(decision, serving.experts.decision):
            return staged.sharing(serving)
        return with_experts(staged, serving, arrived or {})

    def try_out(self, staged: ServingState) -> Flight[None]:
        """Run a staged state once without tokens, on all ranks of its group; raises CommError where that fails."""
        yield from staged.try_out(self.layer.device)

    def flip(self, staged: ServingState) -> ServingState:
        """Use a staged state from the next forward on; returns the previous one. All ranks flip at the same step.

        Raises WeightError if weights were loaded after it was staged.
        """
        layer, old = self.layer, self.layer.state
        if staged.loads != old.loads:
            raise WeightError(f"layer {layer.name!r} has loaded weights since this state was staged; stage it again")
        if swapped := staged.backends is not old.backends:
            layer.spans.ledger.clear()  # it would be compared with the new decision
        layer.use(replace(staged, swaps=old.swaps + swapped))
        if staged.lost is not None and staged.expert_map.lost != old.expert_map.lost:
            staged.lost.warn()
        return old

    @collective(lambda live, *_, **__: live.layer.state.experts.grid)
    def set_placement(self, expert_map: ExpertMap, arrived: Mapping[int, SlotWeights] | None = None) -> None:
        """Stage and flip: for a layer without weights, for new shares, or where the weights are in memory.

        Every rank calls it between the same two forwards; ranks do not wait for each other. After an exception on one
        of them all `recover()` and call it again: until then forwards end in CommError, because placements differ.
        A `RebalanceManager` goes on from it, if every rank calls this between the same two of its steps.
        """
        self.flip(self.stage(expert_map, arrived))

    def _decided(
        self, expert_map: ExpertMap, ep: Communicator | None, settings: Mapping[str, object]
    ) -> tuple[Decision, Backends]:
        """Decide again for another group or settings.

        A pinned transport that does not support another group is replaced with a warning.
        """
        layer, used, weights = self.layer, self.layer.state.backends, self.layer.state.weights
        before = self.layer.decision
        if unknown := sorted(set(settings) - set(KernelConfig.model_fields)):
            raise ConfigError(f"layer {layer.name!r}: {', '.join(unknown)} are no settings of kernel")
        asked = used.asked.with_(**settings)
        config = for_ranks(asked, expert_map)
        try:
            decision = decide(config, layer.dtype, layer.built_for)
        except UnsupportedError:
            pinned = config.kernel.prepare_finalize
            if pinned == "auto" or ep is None:
                raise
            config = config.with_(prepare_finalize="auto")
            decision = decide(config, layer.dtype, layer.built_for)
            text = f"layer {layer.name!r}: kernel.prepare_finalize = {pinned} cannot serve a group of {ep.size}; "
            text += f"{decision.chosen.prepare_finalize} does while the group has that size"
            warnings.warn(text, FallbackWarning, stacklevel=2)
        groups, gate, shared = used.groups, used.gate, used.shared
        if ep is not None:
            kept = {name: open_ for name, open_ in groups.kept.items() if name != "ep"}
            groups = replace(groups, ep=ep, kept=kept)
        sets = {each.problem.config.kernel.instruction_set for each in (decision, before)}
        if len(sets) > 1 or not _same_experts(decision, before):
            gate = Gate(decision, layer.dtype, layer.built_for)
            if shared is not None:
                shared = shared_experts(decision, Parts(expert_map, layer.built_for, ep or layer.ep, layer.spans))
                if weights is not None and weights.shared is not None:
                    shared.load(weights.shared, weights.shared_gate_H)
            if weights is not None:  # the bias may have been corrected since it was loaded
                gate.load(weights.router_EH, used.gate.bias_E, weights.logit_bias_E, weights.expert_scale_E)
        return decision, Backends(config, asked, groups, gate, shared, used.pool)


def check_sizes(expert_map: ExpertMap, serving: ExpertMap, comm: Communicator) -> None:
    """Raise ConfigError unless a new map has the experts of the layer and the ranks of the group."""
    wrong = []
    if expert_map.num_experts != serving.num_experts:
        wrong.append(f"it places {expert_map.num_experts} experts, the layer has {serving.num_experts}")
    if expert_map.num_ranks != comm.size:
        wrong.append(f"it has {expert_map.num_ranks} ranks, the group has {comm.size}")
    if wrong:
        raise ConfigError("placement cannot replace the current one: " + "; ".join(wrong))


def _same_experts(one: Decision, other: Decision) -> bool:
    parts = ((d.chosen.experts, d.compute, d.effect, d.gate) for d in (one, other))
    return next(parts) == next(parts)
