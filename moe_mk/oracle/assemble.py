"""Build the kernel of a decision: the second phase, the same for every quantisation type."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.single import SingleRank
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.experts.base import EXPERTS, ExpertsContext, FusedExperts
from moe_mk.experts.monolithic import MONOLITHIC, MonolithicContext, MonolithicKernel
from moe_mk.experts.residency import ResidencyPool
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap, PlacementTables
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportContext
from moe_mk.runner.invariant import InvariantKernel
from moe_mk.trace.recorder import Spans


@dataclass(frozen=True)
class Parts:
    """The arguments of a kernel other than its decision: placement, device and communicator of this rank."""

    expert_map: ExpertMap
    device: torch.device
    comm: Communicator = field(default_factory=SingleRank)
    spans: Spans = field(default_factory=Spans)
    tables: PlacementTables | None = None
    """The placement tables on the device; None builds them."""
    pool: ResidencyPool | None = None
    """As of `MoELayer`."""


def assemble(decision: Decision, parts: Parts) -> FusedMoEKernel | MonolithicKernel:
    """Build the chosen pair, or the chosen monolithic kernel, on this rank.

    Raises ConfigError unless `kernel.residency` has one size, UnsupportedError where a rebalance asks a backend without
    placement tables for another placement than linear.
    """
    chosen, tables, problem = decision.chosen, parts.tables or parts.expert_map.tables(parts.device), decision.problem
    kernel = problem.config.kernel
    residency = kernel.residency
    sizes = (parts.pool, *(() if residency is None else (residency.slots, residency.bytes)))
    if (given := len(sizes) - sizes.count(None)) != (residency is not None):
        one = "its slots, its bytes or a ResidencyPool"
        raise ConfigError(f"a layer with kernel.residency takes one of {one}, one without it none; {given} are given")
    _check_tables(decision, parts.expert_map)
    context = experts_context(decision, parts, parts.expert_map.num_slots(parts.comm.rank), problem.intermediate)
    if chosen.experts in MONOLITHIC:
        routed = MonolithicContext(context, problem.config.router, tables, parts.comm.rank)
        return MonolithicKernel.build(chosen.experts, routed, parts.comm, parts.spans)
    sent = problem.as_sent.config
    transport = TransportContext(
        comm=parts.comm, expert_map=parts.expert_map, tables=tables, wire=decision.wire, dtype=problem.sums,
        hidden_size=problem.config.model.hidden_size, top_k=sent.router.top_k, spans=parts.spans,
        max_num_tokens=sent.kernel.max_num_tokens, device=parts.device, ranks_per_node=problem.ep_ranks_per_node,
        relay_tokens=sent.kernel.relay_tokens, comm_units=kernel.comm_units, allow_emulated=kernel.allow_emulated,
        network=kernel.network, network_link=decision.link.name if decision.link else "auto",
    )  # fmt: skip
    prepare_finalize = PREPARE_FINALIZE[chosen.prepare_finalize](transport)
    modular = InvariantKernel if kernel.invariant else FusedMoEKernel
    return modular(prepare_finalize, build_experts(decision, chosen.experts, context), parts.spans)


def _check_tables(decision: Decision, placement: ExpertMap) -> None:
    if placement == ExpertMap.linear(placement.num_experts, placement.num_ranks):
        return
    chosen = decision.chosen
    found = ((PREPARE_FINALIZE, chosen.prepare_finalize), (EXPERTS, chosen.experts), (MONOLITHIC, chosen.experts))
    if without := [name for kinds, name in found if name in kinds and not kinds[name].traits.tables]:
        raise UnsupportedError(
            f"{' and '.join(without)} cannot serve this placement",
            ["no placement tables: only linear placements without replicas are served; do not rebalance this layer, "
             "or choose another backend"],
        )  # fmt: skip


def build_experts(decision: Decision, name: str, context: ExpertsContext) -> FusedExperts:
    """Build a backend by name, wrapped in `HeldExperts` if the decision requantises weights at load."""
    experts = EXPERTS[name](context)
    if decision.effect is None:
        return experts
    from moe_mk.experts.held import HeldExperts

    return HeldExperts(experts, decision.problem.weights, decision.problem.config.model.quant.down_scheme)


def experts_context(decision: Decision, parts: Parts, num_slots: int, intermediate_size: int) -> ExpertsContext:
    """The context in which experts are built; shared experts are one slot of another intermediate size."""
    problem, model, kernel = decision.problem, decision.problem.config.model, decision.problem.config.kernel
    return ExpertsContext(
        dtype=problem.sums, compute=decision.compute, activation=model.activation, num_slots=num_slots,
        hidden_size=model.hidden_size, intermediate_size=intermediate_size, device=parts.device, spans=parts.spans,
        swiglu_limit=model.swiglu_limit, swiglu_alpha=model.swiglu_alpha,
        batch_invariant=kernel.batch_invariant or kernel.invariant, own_threads=kernel.threads == "own",
        instruction_set=kernel.instruction_set, cache_dir=kernel.cache_dir, tuned_dir=kernel.tuned_dir,
        residency=kernel.residency, pool=parts.pool, timeout_s=kernel.timeout_s,
    )  # fmt: skip
