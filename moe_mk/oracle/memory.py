"""Memory of a pair in addition to the weights, and the most tokens per rank and call that fit the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from moe_mk.comm.destinations import expected_experts
from moe_mk.config.problem import Problem
from moe_mk.experts.base import EXPERTS
from moe_mk.oracle import cost
from moe_mk.oracle.trust import is_named
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import row_bytes
from moe_mk.text import amount

Workspace = Callable[[Problem, int], int]
"""(problem, received rows) to the bytes that experts allocate."""


@dataclass(frozen=True)
class Buffers:
    """Upper bound on the bytes of one rank in addition to the weights, by use, for the worst routing."""

    rows: int
    """Received rows as bytes and as tensors, and their outputs in f32 and in the layer's dtype."""
    workspace: int
    """Temporary memory of the experts during a call."""
    transport: int
    """Memory that the transport or its library keeps between calls."""

    @property
    def total(self) -> int:
        return self.rows + self.workspace + self.transport


def weights_bytes(problem: Problem) -> int:
    """Bytes in memory of this layer's experts on the rank with the most slots."""
    return resident_experts(problem) * slot_bytes(problem)


def slot_bytes(problem: Problem) -> int:
    """Bytes of one expert in memory: as stored, or with `kernel.residency` in a slot of the experts that support it."""
    stored = cost.expert_bytes(problem)
    if problem.config.kernel.residency is None:
        return stored
    allowed = [EXPERTS[name] for name in EXPERTS if is_named(EXPERTS, name, problem)]
    able = (each for each in allowed if each.traits.pages and problem.device.kind in each.traits.kinds)
    return max((each.slot_bytes(problem) for each in able), default=0) or stored


def resident_experts(problem: Problem) -> int:
    """Experts in memory on the rank with the most slots: all, or as many as `kernel.residency` states; of a pool 1."""
    residency = problem.config.kernel.residency
    if residency is None:
        return problem.slots
    return min(problem.slots, residency.slots or max((residency.bytes or 0) // slot_bytes(problem), 1))


@dataclass(frozen=True)
class ExpectedReads:
    """Expected store reads in a step of `problem.num_tokens` tokens a rank, on the rank with the most slots."""

    slots: int
    experts: int
    """Of the rank."""
    used: float
    """Distinct experts of a step, expected under uniform routing."""
    most_used: int
    """The most distinct experts of a step."""
    slot_bytes: int

    @property
    def hit_rate(self) -> float:
        """The hit rate under uniform routing, which no policy can improve without knowing the future."""
        return self.slots / self.experts

    @property
    def num_bytes(self) -> int:
        return round(self.used * (1 - self.hit_rate) * self.slot_bytes)

    @property
    def least_bytes(self) -> int:
        """Bytes of the experts of the largest step for which there are no slots."""
        return max(self.most_used - self.slots, 0) * self.slot_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest step if none of its experts is resident."""
        return self.most_used * self.slot_bytes

    def as_dict(self) -> dict[str, int | float]:
        derived = {"hit_rate": self.hit_rate, "bytes": self.num_bytes, "least_bytes": self.least_bytes}
        return asdict(self) | derived | {"most_bytes": self.most_bytes}

    def __str__(self) -> str:
        uniform = f"under uniform routing {self.used:.3g} experts a step, hit rate {100 * self.hit_rate:.3g} %"
        reads = f"{amount(self.num_bytes)} read, at most {amount(self.most_bytes)}"
        return f"{self.slots} of {self.experts} experts in memory; {uniform}, {reads}"


def expected_reads(problem: Problem) -> ExpectedReads | None:
    """Expected reads of a step if `kernel.residency` keeps fewer experts than a rank has; None: none, or a pool."""
    residency, slots = problem.config.kernel.residency, resident_experts(problem)
    if residency is None or residency.slots is residency.bytes or slots >= problem.slots:
        return None
    experts, top_k, tokens = problem.config.model.num_experts, problem.config.router.top_k, problem.all_tokens
    used = expected_experts(problem.slots, experts, top_k, tokens)
    return ExpectedReads(slots, problem.slots, used, min(problem.slots, tokens * top_k), slot_bytes(problem))


def buffers_of(
    transport_type: type[PrepareFinalize], wire: QuantScheme, workspace: Workspace, problem: Problem
) -> Buffers:
    """Buffers for calls of `problem.num_tokens` tokens a rank."""
    rows, hidden = transport_type.max_rows(problem), problem.config.model.hidden_size
    per_row = 2 * row_bytes(wire, hidden) + hidden * (4 + problem.sums.dtype.itemsize)
    return Buffers(rows * per_row, workspace(problem, rows), transport_type.buffer_bytes(problem))


def limited_to(problem: Problem, num_tokens: int) -> Problem:
    """The problem of a layer with kernel.max_num_tokens = num_tokens, for calls of as many tokens a rank."""
    kernel = problem.config.kernel.model_copy(update={"max_num_tokens": num_tokens})
    return replace(problem, config=problem.config.model_copy(update={"kernel": kernel}), num_tokens=num_tokens)


def room_of(problem: Problem) -> int:
    """Bytes of device memory."""
    return round(problem.device.memory_gib * 2**30)


def most_tokens(problem: Problem, buffers: Callable[[Problem], Buffers]) -> int:
    """The most tokens a rank, up to kernel.max_num_tokens, whose buffers and the weights fit the device; at least 1.

    buffers: returns the buffers for a problem's num_tokens, and grows with it.
    """
    free = room_of(problem) - weights_bytes(problem)
    fits, beyond = 1, problem.config.kernel.max_num_tokens + 1
    while beyond - fits > 1:
        # The limit first: it nearly always fits.
        middle = beyond - 1 if beyond > problem.config.kernel.max_num_tokens else (fits + beyond) // 2
        if buffers(limited_to(problem, middle)).total <= free:
            fits = middle
        else:
            beyond = middle
    return fits
