"""Memory of a pair in addition to the weights, and the most tokens per rank and call that fit the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_mk.config.problem import Problem
from moe_mk.oracle import cost
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import row_bytes

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
    return resident_experts(problem) * cost.expert_bytes(problem)


def resident_experts(problem: Problem) -> int:
    """Experts in memory on the rank with the most slots: all of them, or as many as `kernel.residency` states."""
    residency = problem.config.kernel.residency
    if residency is None:
        return problem.slots
    return min(problem.slots, residency.slots or max((residency.bytes or 0) // cost.expert_bytes(problem), 1))


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
