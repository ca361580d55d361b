"""What a rank can ask of its group: rows to and from every peer, with sizes that differ and may be zero.

Rows are tensors of shape (rows, X). Every collective is a flight: posted, in the air, landed. `Communicator` says what;
`single`, `distributed` and `lockstep` say how. Failures end in CommError with rank, phase and layer, never in a hang.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from moe_mk.comm.traffic import Traffic
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight


class Communicator(ABC):
    """One rank's view of one group."""

    rank: int
    size: int
    layer: str = ""
    """How errors call the layer that this view belongs to."""

    def __init__(self, kept: dict[Hashable, object] | None = None) -> None:
        """kept: what transports keep open over the group, by what it is; views that share it share windows."""
        self.traffic = Traffic()
        self.kept: dict[Hashable, object] = {} if kept is None else kept

    @abstractmethod
    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        """Send the first send[0] rows to rank 0, the next to rank 1, ...; return theirs in rank order."""

    def all_to_others(
        self, received: Tensor, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str
    ) -> Flight[None]:
        """`all_to_all` into rows that are there, without those that stay here: its caller copies them.

        send and receive are those of `all_to_all`; received and rows are dense and hold what is from and for others
        alone. What stays is counted as traffic with itself, as if it had come this way.
        """
        self._count_stayed(phase, rows, send[self.rank])
        received.copy_((yield from self.all_to_all(rows, self._to_others(send), self._to_others(receive), phase)))

    @abstractmethod
    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """Give my rows to everybody; return everybody's in rank order. counts[r] is what rank r brings."""

    @abstractmethod
    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        """Sum over the group; x is left as it was."""

    def library_group(self) -> object:
        """What a communication library is given to find its peers: the process group, or the threads' stand-in for one.

        Raises ConfigError where ranks are only pretended in one thread, where a library call would wait for ever.
        """
        raise ConfigError(f"{type(self).__name__} has no group that a communication library could wait in")

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
        row = rows.element_size() * prod(rows.shape[1:])
        self.traffic.sent(phase, [row * count for count in send], self.rank)

    def _count_stayed(self, phase: str, rows: Tensor, count: int) -> None:
        self.traffic.stayed(phase, count * rows.element_size() * prod(rows.shape[1:]), self.rank)

    def _to_others(self, counts: Sequence[int]) -> list[int]:
        return [0 if peer == self.rank else count for peer, count in enumerate(counts)]

    def _count_reduced(self, phase: str, x: Tensor) -> None:
        """A ring all-reduce sends 2 (W - 1) / W of the tensor to the next rank, in the dtype that sums run in."""
        to_next = 2 * (self.size - 1) * x.numel() * summing_dtype(x.dtype).itemsize // self.size
        following = (self.rank + 1) % self.size
        self.traffic.sent(phase, [to_next if peer == following else 0 for peer in range(self.size)], self.rank)


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
