"""How much memory a layer takes on this rank, told before any of it is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from moe_mk.layer.gate import keeps_gate_in_f32
from moe_mk.oracle.cost import expert_bytes, mlp_bytes
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap

GIB = 2**30


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

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.experts + self.shared + self.gate + self.buffers

    def as_dict(self) -> dict[str, int]:
        """The report as JSON."""
        return asdict(self) | {"total": self.total}

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.num_slots} experts {self.experts / GIB:.2f} GiB, "
            f"shared {self.shared / GIB:.3f} GiB, gate {self.gate / GIB:.3f} GiB, "
            f"buffers at most {self.buffers / GIB:.2f} GiB, total {self.total / GIB:.2f} GiB"
        )


def memory_report(decision: Decision, expert_map: ExpertMap, rank: int) -> MemoryReport:
    """Sizes from the decision alone; nothing is allocated."""
    problem, model = decision.problem, decision.problem.config.model
    num_slots = expert_map.num_slots(rank)
    shared_inner = model.shared_size // problem.config.parallel.tp
    shared = mlp_bytes(problem, shared_inner) if shared_inner else 0
    router, width = problem.config.router, 4 if keeps_gate_in_f32(decision) else problem.dtype.dtype.itemsize
    gate = model.num_experts * (model.hidden_size * width + 4 * router.has_correction_bias)
    return MemoryReport(rank, num_slots, num_slots * expert_bytes(problem), shared, gate, decision.buffer_bytes)
