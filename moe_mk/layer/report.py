"""How much memory a layer takes on this rank, told before any of it is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from moe_mk.experts.base import EXPERTS
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
        """The report as JSON."""
        return asdict(self) | {"total": self.total, "peak": self.peak}

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.num_slots} experts {self.experts / GIB:.2f} GiB, "
            f"shared {self.shared / GIB:.3f} GiB, gate {self.gate / GIB:.3f} GiB, "
            f"buffers at most {self.buffers / GIB:.2f} GiB, total {self.total / GIB:.2f} GiB, "
            f"at most {self.peak / GIB:.2f} GiB while it loads"
        )


def memory_report(decision: Decision, expert_map: ExpertMap, rank: int) -> MemoryReport:
    """Sizes from the decision alone; nothing is allocated."""
    problem, model = decision.problem, decision.problem.config.model
    num_slots = expert_map.num_slots(rank)
    shared_inner = model.shared_size // problem.config.parallel.tp
    shared = mlp_bytes(problem, shared_inner) if shared_inner else 0
    router, width = problem.config.router, 4 if keeps_gate_in_f32(decision) else problem.dtype.dtype.itemsize
    gate = model.num_experts * (model.hidden_size * width + 4 * router.has_correction_bias)
    expert = expert_bytes(problem)
    chosen = decision.chosen.experts
    packing = expert if chosen in EXPERTS and EXPERTS[chosen].traits.copies_weights else 0
    return MemoryReport(rank, num_slots, num_slots * expert, shared, gate, decision.buffer_bytes, packing)
