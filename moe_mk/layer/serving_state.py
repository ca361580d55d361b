"""Everything of a layer that a forward reads, as one immutable state that is replaced at once.

A change of the placement or of the backends builds a second state next to the one in use and then switches, see
`live.py`. A forward reads the state when it starts and keeps it to its end, so that nothing it reads is written to
meanwhile.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError, FallbackWarning, LostExpertError, UnsupportedError
from moe_mk.experts.residency import ResidencyPool
from moe_mk.external.device import without_autocast
from moe_mk.flight import Flight
from moe_mk.kernel import FusedMoEKernel
from moe_mk.layer.experts_of_rank import ExpertsOfRank
from moe_mk.layer.gate import Gate
from moe_mk.layer.grid import Grid
from moe_mk.layer.shared import SharedExperts
from moe_mk.oracle.assemble import Parts
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap, PlacementTables
from moe_mk.runner.invariant import InvariantKernel
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Spans
from moe_mk.weights.expert_weights import MappedExpertWeights, ReleasedSlots, SlotWeights
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.scan import Contents, Progress
from moe_mk.weights.stamp import storages_of

_project = without_autocast(nn.functional.linear)


@dataclass(frozen=True)
class LostExperts:
    """Experts of one placement without a live copy, and the policy for calls: `parallel.on_lost_expert`."""

    layer: str
    policy: str
    experts: tuple[int, ...]
    lost_E: Tensor
    """bool, on the device of the layer."""

    def check(self) -> None:
        """Raise LostExpertError under the policy `raise`; every rank has the same placement, so all raise."""
        if self.policy == "raise":
            raise LostExpertError(
                f"{shown(self.experts)} no live copy and parallel.on_lost_expert = raise; call "
                "RebalanceManager.rank_lost() on every rank to read them from the checkpoint again, or set "
                "on_lost_expert to drop or renormalise",
                layer=self.layer,
                experts=self.experts,
            )

    def leave_out(self, routing: Routing, dropped: Tensor) -> Routing:
        """Remove lost experts from a logical routing; `renormalise` keeps the sum of each token's weights.

        dropped: int64 scalar on the device, to which the number of removed assignments is added.
        """
        ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
        asked_TK = ids_TK >= 0
        lost_TK = asked_TK & self.lost_E[ids_TK.clamp_min(0).long()]
        dropped += lost_TK.sum()
        if self.policy == "renormalise":
            kept_T1 = weights_TK.masked_fill(~asked_TK | lost_TK, 0.0).sum(1, keepdim=True)
            asked_T1 = weights_TK.masked_fill(~asked_TK, 0.0).sum(1, keepdim=True)
            scales = lost_TK.any(1, keepdim=True) & (kept_T1 != 0)
            # A factor of exactly 1 leaves the weights of every other token as they are, to the bit.
            factor_T1 = torch.where(scales, asked_T1 / kept_T1.masked_fill(~scales, 1.0), 1.0)
            weights_TK = weights_TK * factor_T1
        return replace(routing, ids_TK=ids_TK.masked_fill(lost_TK, -1), weights_TK=weights_TK.masked_fill(lost_TK, 0.0))

    def warn(self) -> None:
        """Warn under the policies that serve without the lost experts."""
        if self.policy != "raise":
            warnings.warn(
                f"layer {self.layer!r}: {shown(self.experts)} no live copy; parallel.on_lost_expert = {self.policy}, "
                "so outputs lack their part until they are repaired",
                FallbackWarning,
                stacklevel=3,
            )


def shown(experts: Sequence[int]) -> str:
    """The start of a sentence about some experts."""
    listed = ", ".join(map(str, experts[:16])) + (f" and {len(experts) - 16} more" if len(experts) > 16 else "")
    return f"expert {listed} has" if len(experts) == 1 else f"experts {listed} have"


@dataclass(frozen=True)
class Backends:
    """The parts of a layer that follow from its settings and from the size of its EP group."""

    config: MoEConfig
    asked: MoEConfig
    """The settings of the user, from which backends are chosen again for another group."""
    groups: ParallelGroups
    gate: Gate
    shared: SharedExperts | None
    pool: ResidencyPool | None = None
    """As of `MoELayer`."""

    def loaded(self, weights: LayerWeights) -> Backends:
        """These with the gate and the shared experts of other weights, in objects of their own."""
        gate, shared = copy(self.gate), copy(self.shared)
        if shared is not None and weights.shared is not None:
            shared.load(weights.shared, weights.shared_gate_H)
        gate.load(weights.router_EH, weights.bias_E, weights.logit_bias_E, weights.expert_scale_E)
        return replace(self, gate=gate, shared=shared)

    def fuse_shared(self, experts: ExpertsOfRank) -> Any:
        """Weights of routed and shared experts as one, where tokens are local and the backend can; else None."""
        shared, kernel = self.shared, experts.kernel
        if shared is None or shared.weights is None or not isinstance(kernel, FusedMoEKernel):
            return None
        if kernel.prepare_finalize.traits.max_ranks != 1 or isinstance(kernel, InvariantKernel):
            return None
        routed, own = (
            (each.compute, each.hidden_size, each.activation, each.swiglu_limit)
            for each in (kernel.experts.context, shared.experts.context)
        )
        model, alone = self.config.model, shared.gate_H is None and shared.scale == 1
        if routed != own or not alone or model.latent_size is not None or self.config.router.weight_on_input:
            return None
        return kernel.experts.fuse_shared_experts(experts.weights, shared.weights)


@dataclass(frozen=True)
class ServingState:
    """Everything of a layer that a forward reads."""

    backends: Backends
    expert_map: ExpertMap
    tables: PlacementTables
    experts: ExpertsOfRank
    epoch: int
    """How many placements this layer has had before."""
    lost: LostExperts | None = None
    """Experts without a live copy and what calls do about them; None while every expert has one."""
    weights: LayerWeights | None = None
    """In the format of the checkpoint; those of `experts` are in the layout of the backend."""
    loads: int = 0
    """How often weights were loaded before it was built."""
    swaps: int = 0
    """How often backends were replaced before it was used."""
    latent: tuple[Tensor, ...] | None = None
    """The projections of tokens to the width of the experts and back, in the layer's dtype, and the norm's weight."""
    input_norm_H: Tensor | None = None
    """f32, the weight of the normalised input for the experts; None: tokens are read as they are."""

    @cached_property
    def is_direct(self) -> bool:
        """Whether the experts read the layer's input rows unchanged and their output is the layer's output."""
        return self.lost is None and self.experts.is_direct

    @cached_property
    def may_be_native(self) -> bool:
        """Whether a native call may make a forward of plain tokens, if the backends have one."""
        plain = self.latent is None and not self.backends.config.router.weight_on_input and self.lost is None
        return plain and (self.experts.is_direct or self.experts.is_exchanged)

    @property
    def routes_apart(self) -> bool:
        """Whether the router reads other rows than the experts, or its choice is changed before these use it."""
        changes = self.backends.gate.expert_scale_E is not None or self.backends.config.model.num_zero_experts > 0
        return self.input_norm_H is not None or changes

    def inputs(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the router and of the experts from the layer's input, in its dtype."""
        if self.input_norm_H is None:
            return x_TH, x_TH
        eps = self.backends.config.model.input_norm
        assert eps is not None
        wide_TH = x_TH.to(torch.float32)
        wide_TH = wide_TH * torch.rsqrt(wide_TH.pow(2).mean(1, keepdim=True) + eps)
        return wide_TH.to(x_TH.dtype), (wide_TH * self.input_norm_H).to(x_TH.dtype)

    def routed(self, x_TH: Tensor, physical: Routing, weights: Any) -> Flight[Tensor]:
        """The routed experts on tokens, with the projections around them. Linear: partial sums stay partial sums.

        A norm is not linear: partial sums are added up before it, and one of the ranks that have the sum returns it.

        weights: in the layout of the backend, with shared experts where they are fused.
        """
        in_TH, config = x_TH, self.backends.config
        if config.router.weight_on_input:
            in_TH = (x_TH.to(torch.float32) * physical.weights_TK).to(x_TH.dtype)
            physical = replace(physical, weights_TK=torch.ones_like(physical.weights_TK))
        in_TH = in_TH if self.latent is None else _project(in_TH, self.latent[0])
        y_TH = yield from self.experts.kernel.steps(in_TH, physical, weights)
        if self.latent is None:
            return y_TH
        if (eps := config.model.latent_norm) is None:
            return _project(y_TH.to(x_TH.dtype), self.latent[1])
        grid, partial = self.experts.grid, self.experts.is_partial
        y_TH = yield from grid.late_reduce(y_TH, self.experts.kernel.spans, partial_over_ep=partial)
        wide_TH = y_TH.to(torch.float32)
        wide_TH = wide_TH * torch.rsqrt(wide_TH.pow(2).mean(1, keepdim=True) + eps) * self.latent[2].to(torch.float32)
        y_TH = _project(wide_TH.to(x_TH.dtype), self.latent[1])
        return y_TH if grid.tp.rank == 0 and (grid.ep.rank == 0 or not partial) else torch.zeros_like(y_TH)

    def loaded(
        self, weights: LayerWeights, device: torch.device, dtype: torch.dtype, on_progress: Progress | None = None
    ) -> ServingState:
        """The state with weights, converted to the layouts of the backends; what serves keeps its own."""
        experts, backends = self.experts.loaded(weights.experts, on_progress), self.backends.loaded(weights)
        latent, norm_H = self.latent, self.input_norm_H
        if weights.latent is not None:
            latent = tuple(each.to(device, dtype).contiguous() for each in weights.latent)
        if weights.input_norm is not None:
            norm_H = weights.input_norm[0].to(device, torch.float32).contiguous()
        experts = replace(experts, grid=experts.grid.renewed())
        taken = replace(self, backends=backends, weights=weights, experts=experts, loads=self.loads + 1)
        return replace(taken, latent=latent, input_norm_H=norm_H)

    def sharing(self, other: ServingState) -> ServingState:
        """The state with the weights of another one, for the same backend: one copy for both."""
        return replace(self, weights=other.weights, experts=replace(self.experts, weights=other.experts.weights))

    def released(self, name: str) -> ServingState:
        """The state without the experts in the format of the checkpoint; raises UnsupportedError if they are read."""
        assert self.weights is not None
        experts = self.weights.experts
        if not isinstance(experts.slots, ReleasedSlots):
            in_use = storages_of(self.experts.weights)
            codes = (matrix.values for slot in experts.slots for matrix in slot.matrices.values())
            if any(storages_of(values) & in_use for values in codes):  # zero points and biases alone may be shared
                chosen = self.experts.decision.chosen.experts
                raise UnsupportedError(
                    f"the experts of layer {name!r} cannot be released",
                    [f"{chosen} reads them, there is no second copy; pin kernel.experts to another backend"],
                )
        gone = replace(experts, slots=ReleasedSlots(f"layer {name!r}", experts.num_slots))
        return replace(self, weights=replace(self.weights, experts=gone))

    def try_out(self, device: torch.device) -> Flight[None]:
        """Run it without tokens: ranks compare notes, open buffers and hear from every peer; nothing is recorded.

        Raises CommError where ranks have decided differently or a peer does not answer.
        """
        experts, gate = self.experts, self.backends.gate
        decision, kernel = experts.decision, experts.kernel
        yield from experts.grid.agree(lambda: {**decision.notes(), **self.notes}, self.loads)
        if self.weights is None:
            return
        config, spans, dtype = decision.problem.config, Spans(), decision.problem.dtype.dtype
        # In its config hidden_size is the width of the experts.
        x_TH = torch.empty((0, decision.problem.token_size), dtype=dtype, device=device)
        nowhere_TK = torch.empty((0, config.router.top_k), dtype=torch.int32, device=device)
        logits_TE = gate(x_TH) if kernel.routes_inside else None
        nowhere = Routing(nowhere_TK, nowhere_TK.float(), logits_TE=logits_TE, bias_E=gate.bias_E)
        silent = replace(self, experts=replace(experts, kernel=replace(kernel, spans=spans)))
        y_TH = yield from silent.routed(x_TH, nowhere, experts.weights)
        yield from experts.grid.late_reduce(y_TH, spans, partial_over_ep=experts.is_partial)

    @property
    def notes(self) -> dict[str, str]:
        """Return notes that ranks compare after a change of placement: equal where maps and numerics are."""
        placed = repr((self.expert_map.experts_of_rank, self.expert_map.shares)).encode()
        found, experts, shared = [], self.experts, self.backends.shared
        if self.weights is not None and isinstance(experts.kernel, FusedMoEKernel):
            found.append(experts.numerics())
        if shared is not None and shared.weights is not None:
            found.append(shared.experts.numerics(shared.weights))
        numerics = "; shared experts ".join(dict.fromkeys(found))
        notes = {"placement": hashlib.sha256(placed).hexdigest()[:16], "epoch": str(self.epoch)}
        return notes | ({"numerics": numerics} if numerics else {})


def build_state(
    decision: Decision,
    backends: Backends,
    expert_map: ExpertMap,
    grid: Grid,
    device: torch.device,
    spans: Spans,
    epoch: int = 0,
) -> ServingState:
    """A state without weights: kernel and tables. Ranks with tokens of their own prefer near replicas."""
    experts = ExpertsOfRank.build(decision, grid, Parts(expert_map, device, grid.ep, spans, pool=backends.pool))
    same_tokens = experts.kernel.routes_inside or experts.is_partial
    per_node = -(-grid.ep.size // decision.problem.nodes)
    tables = expert_map.tables(device, None if same_tokens else grid.ep.rank, per_node)
    lost = None
    if expert_map.lost:
        lost_E = torch.zeros(expert_map.num_experts, dtype=torch.bool, device=device)
        lost_E[sorted(expert_map.lost)] = True
        policy = decision.problem.config.parallel.on_lost_expert
        if policy == "renormalise" and experts.kernel.routes_inside:
            chosen = decision.chosen.experts
            raise UnsupportedError(
                f"layer {grid.name!r}: parallel.on_lost_expert = renormalise with {chosen}, which routes inside",
                ["set on_lost_expert to drop or raise, or pin kernel.experts to another backend"],
            )
        lost = LostExperts(grid.name, policy, tuple(sorted(expert_map.lost)), lost_E)
    return ServingState(backends, expert_map, tables, experts, epoch, lost)


def with_experts(state: ServingState, old: ServingState, arrived: Mapping[int, SlotWeights]) -> ServingState:
    """Give a state its weights: those that arrived, else those that `old` holds on this rank. `old` is not changed.

    arrived: by slot of the new state. Raises ConfigError naming every slot whose expert is neither here nor arrived,
    WeightError for NaN codes and invalid scales in what arrived.
    """
    assert old.weights is not None
    rank = state.experts.grid.ep.rank
    wanted = state.expert_map.local_to_global(rank)
    here = dict(zip(old.weights.facts.owned, old.weights.experts.slots, strict=True))
    missing = [f"expert {e} of slot {slot}" for slot, e in enumerate(wanted) if slot not in arrived and e not in here]
    if missing:
        raise ConfigError(
            f"rank {rank} holds neither {', nor '.join(missing[:8])}; pass them as arrived={{slot: weights}}"
        )
    contents = Contents()
    for slot, weights in arrived.items():
        for name, q in (("gate", weights.gate_IH), ("up", weights.up_IH), ("down", weights.down_HI)):
            if q is not None:
                of = f"{name} of expert {wanted[slot]}"
                contents.note(q, of, f"scales of {of}", f"global scale of {of}")
    contents.expect_valid(f"weights that arrived at rank {rank} cannot be used")
    slots = tuple(arrived[slot] if slot in arrived else here[e] for slot, e in enumerate(wanted))
    experts = MappedExpertWeights(slots, old.weights.experts.scheme, passing=True)
    layer = replace(old.weights, experts=experts, facts=replace(old.weights.facts, owned=tuple(wanted)))
    return replace(state, weights=layer, experts=state.experts.loaded(experts))
