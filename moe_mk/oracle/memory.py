"""What a pair holds beside the weights, and how many tokens of a rank and call a device has room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_mk.config.problem import Problem
from moe_mk.oracle import cost
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import row_bytes

Workspace = Callable[[Problem, int], int]
"""Bytes that experts allocate for so many received rows."""


@dataclass(frozen=True)
class Buffers:
    """The most bytes that one rank holds beside the weights, by who needs them: worst routing."""

    rows: int
    """Received rows as bytes and as tensors, and their outputs in f32 and in the layer's dtype."""
    workspace: int
    """Of the experts, during a call."""
    transport: int
    """What the transport or its library keeps between calls."""

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.rows + self.workspace + self.transport


def weights_bytes(problem: Problem) -> int:
    """Of this layer's experts on the fullest rank."""
    return problem.slots * cost.expert_bytes(problem)


def buffers_of(
    transport_type: type[PrepareFinalize], wire: QuantScheme, workspace: Workspace, problem: Problem
) -> Buffers:
    """For calls of `problem.num_tokens` tokens a rank."""
    rows, hidden = transport_type.max_rows(problem), problem.config.model.hidden_size
    per_row = 2 * row_bytes(wire, hidden) + hidden * (4 + problem.dtype.dtype.itemsize)
    return Buffers(rows * per_row, workspace(problem, rows), transport_type.buffer_bytes(problem))


def limited_to(problem: Problem, num_tokens: int) -> Problem:
    """The problem of a layer with kernel.max_num_tokens = num_tokens, for calls of as many tokens a rank."""
    kernel = problem.config.kernel.model_copy(update={"max_num_tokens": num_tokens})
    return replace(problem, config=problem.config.model_copy(update={"kernel": kernel}), num_tokens=num_tokens)


def room_of(problem: Problem) -> int:
    """Bytes of the device."""
    return round(problem.device.memory_gib * 2**30)


def most_tokens(problem: Problem, buffers: Callable[[Problem], Buffers]) -> int:
    """The most tokens a rank, up to kernel.max_num_tokens, whose buffers fit the device beside the weights; at least 1.

    buffers: those of a problem's number of tokens; they grow with it.
    """
    free = room_of(problem) - weights_bytes(problem)
    fits, beyond = 1, problem.config.kernel.max_num_tokens + 1
    while beyond - fits > 1:
        # The limit itself first: it nearly always fits.
        middle = beyond - 1 if beyond > problem.config.kernel.max_num_tokens else (fits + beyond) // 2
        if buffers(limited_to(problem, middle)).total <= free:
            fits = middle
        else:
            beyond = middle
    return fits
