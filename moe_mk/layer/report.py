"""How much memory a layer takes on this rank, reported before any of it is allocated.

What a layer's forwards really ran, beside what was decided: a silent fallback shows as a departure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_mk.errors import UnsupportedError
from moe_mk.experts.base import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.experts.residency import ResidencyCounts
from moe_mk.layer.gate import keeps_gate_in_f32
from moe_mk.oracle.cost import expert_bytes, mlp_bytes
from moe_mk.oracle.decide import INSIDE
from moe_mk.oracle.memory import resident_experts, slot_bytes
from moe_mk.oracle.verdict import REPLACED, UNROUTED, Decision
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from moe_mk.text import amount

if TYPE_CHECKING:
    from moe_mk.layer.moe_layer import MoELayer


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one layer on one rank."""

    rank: int
    num_slots: int
    experts: int
    """Values and scales of the routed experts."""
    shared: int
    gate: int
    """The gate's weight as it multiplies, and the correction bias."""
    buffers: int
    """The most that one call of kernel.max_num_tokens tokens a rank allocates, with the worst routing."""
    packing: int = 0
    """One expert of the checkpoint, mapped while the backend copies it into a layout of its own; 0: no copy is made."""

    @property
    def total(self) -> int:
        """All of it at once, while the layer serves: the checkpoint's pages have been given back."""
        return self.experts + self.shared + self.gate + self.buffers

    @property
    def peak(self) -> int:
        """The most that is held at any time, loading from a file included. Tensors a caller passes are its own."""
        return max(self.total, self.experts + self.shared + self.gate + self.packing)

    def as_dict(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total, "peak": self.peak}

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.num_slots} experts {amount(self.experts)}, "
            f"shared {amount(self.shared)}, gate {amount(self.gate)}, "
            f"buffers at most {amount(self.buffers)}, total {amount(self.total)}, "
            f"at most {amount(self.peak)} while it loads"
        )


def memory_report(decision: Decision, expert_map: ExpertMap, rank: int) -> MemoryReport:
    """Sizes from the decision alone; nothing is allocated."""
    problem, model = decision.problem, decision.problem.config.model
    num_slots = expert_map.num_slots(rank)
    shared_inner = model.shared_size // problem.config.parallel.tp
    shared = mlp_bytes(problem, shared_inner, shared=True) if shared_inner else 0
    router, width = problem.config.router, 4 if keeps_gate_in_f32(decision) else problem.dtype.dtype.itemsize
    gate = model.scored_experts * (problem.token_size * width + 4 * router.has_correction_bias)
    chosen = decision.chosen.experts
    packing = expert_bytes(problem) if chosen in EXPERTS and EXPERTS[chosen].traits.copies_weights else 0
    held = num_slots if problem.config.kernel.residency is None else min(num_slots, resident_experts(problem))
    experts = held * slot_bytes(problem)
    return MemoryReport(rank, num_slots, experts, shared, gate, decision.buffer_bytes, packing)


@dataclass(frozen=True)
class StageRun:
    """One stage as it ran."""

    stage: str
    planned: str
    """The backend that was decided for."""
    executed: str
    """The backend whose code ran: its registered name, or its class where it has none."""
    calls: int
    num_bytes: int
    """Of rows that went in and came out."""

    @property
    def as_planned(self) -> bool:
        """Whether the decided backend ran."""
        return self.planned == self.executed


@dataclass(frozen=True)
class RunReport:
    """Everything that ran since the last reset."""

    stages: tuple[StageRun, ...]
    sent: Mapping[str, int]
    """Bytes this rank put on the wire, by phase, since the layer was built."""
    num_calls: int
    """Forwards of the routed experts; a batch in two parts counts twice."""
    lost_experts: tuple[int, ...] = ()
    """Experts without a live copy, now."""
    on_lost_expert: str = "raise"
    """What calls do about them."""
    dropped_assignments: int = 0
    """Assignments of this rank's tokens to lost experts that were left out."""
    unrouted: int = 0
    """Assignments that chose no expert, see `MoELayer.unrouted`."""
    zero_assignments: int = 0
    """Assignments to experts without weights (model.num_zero_experts), which no stage computes."""
    router: str = ""
    """The router that is used instead of that of the settings; empty: none."""
    residency: ResidencyCounts | None = None
    """What was read from the store of `kernel.residency` since loading; None: all experts are in memory."""

    @property
    def departures(self) -> tuple[str, ...]:
        """Where something else ran than was decided, in words; empty if nothing did."""
        return tuple(
            f"{run.stage}: {run.planned} was decided, {run.executed} ran {run.calls} times on {amount(run.num_bytes)}"
            for run in self.stages
            if not run.as_planned
        )

    def require_as_planned(self) -> None:
        """Raise UnsupportedError with every departure, and if nothing ran at all."""
        if self.departures or not self.stages:
            raise UnsupportedError("the layer did not run as decided", self.departures or ["nothing has run yet"])

    def as_dict(self) -> dict[str, Any]:
        stages = [asdict(run) | {"as_planned": run.as_planned} for run in self.stages]
        lists = {"departures": list(self.departures), "lost_experts": list(self.lost_experts)}
        found = asdict(self) | {"stages": stages} | lists
        return {"calls": found.pop("num_calls"), **found}

    def __str__(self) -> str:
        lines = [f"{self.num_calls} calls"]
        for run in self.stages:
            mark = " " if run.as_planned else "!"
            who = run.executed if run.as_planned else f"{run.executed}, not {run.planned}"
            lines.append(f"{mark} {run.stage:<10}{who:<28}{run.calls:>6} times {run.num_bytes:>14,} B")
        if self.lost_experts or self.dropped_assignments:
            lost = f"{len(self.lost_experts)} lost experts, on_lost_expert = {self.on_lost_expert}"
            lines.append(f"! {lost}, {self.dropped_assignments:,} assignments left out")
        lines += [f"! {REPLACED.format(self.router)}"] * bool(self.router)
        lines += [f"! {UNROUTED.format(self.unrouted)}"] * bool(self.unrouted)
        lines += [f"  {self.zero_assignments:,} assignments to experts without weights"] * bool(self.zero_assignments)
        lines += [f"  sent {phase:<22}{count:>28,} B" for phase, count in self.sent.items()]
        return "\n".join(lines)


def report_of(layer: MoELayer) -> RunReport:
    """The backend that ran at each stage since the last reset, and its bytes, compared with the decision."""
    chosen = layer.decision.chosen
    transport = "all_gather" if chosen.prepare_finalize == INSIDE else chosen.prepare_finalize
    planned = {"dispatch": transport, "experts": chosen.experts, "combine": transport, "shared": chosen.experts}
    stages = []
    for (stage, who), entry in layer.spans.ledger.entries.items():
        name, wanted = _name_of(who), planned.get(stage, "")
        # Monolithic experts hand their rows to a backend of another registry; that is how they are written.
        inside = chosen.experts in MONOLITHIC and stage in ("experts", "shared") and name == "reference"
        stages.append(StageRun(stage, name if inside else wanted, name, entry.calls, entry.num_bytes))
    calls = sum(run.calls for run in stages if run.stage == "dispatch") or max((run.calls for run in stages), default=0)
    return RunReport(
        tuple(stages),
        dict(layer.ep.traffic.bytes_by_phase + layer.tp.traffic.bytes_by_phase),
        calls,
        lost_experts=tuple(sorted(layer.expert_map.lost)),
        on_lost_expert=layer.on_lost_expert,
        dropped_assignments=layer.dropped_assignments,
        unrouted=layer.unrouted,
        zero_assignments=0 if layer.routing.zero is None else int(layer.routing.zero),
        router=layer.routing.replaced,
        residency=getattr(layer.state.experts.weights, "counts", None),
    )


def explained(layer: MoELayer) -> Decision:
    """The decision: every pair with every reason; assignments that chose no expert, and a router that was replaced."""
    unrouted, router, shared = layer.unrouted, layer.routing.replaced, layer.state.backends.shared
    decision = layer.state.experts.explained(*(() if shared is None else (shared.experts,)))
    return replace(decision, unrouted=unrouted, router=router) if unrouted or router else decision


def memory_of(layer: MoELayer) -> MemoryReport:
    """Bytes on this rank, predicted from the decision."""
    return memory_report(layer.decision, layer.expert_map, layer.ep.rank)


def cleared(layer: MoELayer) -> None:
    """Clear the record of what ran."""
    layer.spans.ledger.clear()
    if layer.routing.dropped is not None:
        layer.routing.dropped.zero_()


def _name_of(who: type) -> str:
    for registry in (PREPARE_FINALIZE, EXPERTS, MONOLITHIC):
        for name, cls in registry.items():
            if cls is who:
                return name
    return f"{who.__module__}.{who.__qualname__}"
