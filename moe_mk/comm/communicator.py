"""What a rank can ask of its group: rows to and from every peer, with sizes that differ and may be zero.

Rows are tensors of shape (rows, X). Every collective is a flight: posted, in the air, landed. `Communicator` says what;
`single`, `distributed` and `lockstep` say how. Failures end in CommError with rank, phase and layer, never in a hang.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from moe_mk.flight import Flight


@dataclass
class Traffic:
    """Bytes this rank has sent to others, by phase; what stays on the rank is not traffic."""

    bytes_by_phase: Counter[str] = field(default_factory=Counter)
    calls_by_phase: Counter[str] = field(default_factory=Counter)

    def sent(self, phase: str, num_bytes: int) -> None:
        """Note one collective."""
        self.bytes_by_phase[phase] += num_bytes
        self.calls_by_phase[phase] += 1

    def reset(self) -> None:
        """Start over."""
        self.bytes_by_phase.clear()
        self.calls_by_phase.clear()


class Communicator(ABC):
    """One rank's view of one group."""

    rank: int
    size: int

    def __init__(self) -> None:
        self.traffic = Traffic()

    @abstractmethod
    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        """Send the first send[0] rows to rank 0, the next to rank 1, ...; return theirs in rank order."""

    @abstractmethod
    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """Give my rows to everybody; return everybody's in rank order. counts[r] is what rank r brings."""

    @abstractmethod
    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        """Sum over the group; x is left as it was."""

    def reduce_scatter(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """Sum everybody's rows and keep my part of counts[rank] rows.

        Peers are added in rank order in f32 and rounded once, so the result does not depend on arrival or dtype.
        """
        mine = counts[self.rank]
        parts = yield from self.all_to_all(rows, counts, [mine] * self.size, phase)
        return sum_in_order(parts.view(self.size, mine, *rows.shape[1:]).unbind())

    def exchange_counts(self, counts: Sequence[int], phase: str) -> Flight[list[int]]:
        """Tell each peer how many rows it will get; return how many each will send."""
        ones = [1] * self.size
        mine = torch.tensor(counts, dtype=torch.int64, device="cpu").view(self.size, 1)
        theirs = yield from self.all_to_all(mine, ones, ones, phase)
        return [int(count) for count in theirs.flatten().tolist()]

    def gather_count(self, count: int, phase: str) -> Flight[list[int]]:
        """Tell everybody one number; return everybody's."""
        mine = torch.tensor([[count]], dtype=torch.int64, device="cpu")
        theirs = yield from self.all_gather(mine, [1] * self.size, phase)
        return [int(number) for number in theirs.flatten().tolist()]

    def _count_sent(self, phase: str, rows: Tensor, send: Sequence[int]) -> None:
        row = rows.element_size() * (rows[0].numel() if rows.shape[0] else 0)
        self.traffic.sent(phase, row * (sum(send) - send[self.rank]))

    def _count_reduced(self, phase: str, x: Tensor) -> None:
        """A ring all-reduce sends 2 (W - 1) / W of the tensor, in the dtype that sums run in."""
        self.traffic.sent(phase, 2 * (self.size - 1) * x.numel() * summing_dtype(x.dtype).itemsize // self.size)


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: f32 for 16-bit floats, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Add the parts of ranks 0, 1, ... one after the other, on every device alike; rounded once at the end."""
    total = parts[0].to(summing_dtype(parts[0].dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def offsets(counts: Sequence[int]) -> list[int]:
    """Where each part starts, and where the last one ends: [0, c0, c0 + c1, ...]."""
    return [0, *accumulate(counts)]
