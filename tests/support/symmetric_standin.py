"""A strict stand-in for torch's symmetric memory between threads: its signatures, and its demands of callers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Handle:
    """What `rendezvous` gives: the names that the real one has, each as it is there."""

    rank: int
    world_size: int
    buffer_ptrs: list[int]
    offset: int


@dataclass
class StandIn:
    """One rank's module. Memory is found again by where it lies, and a rendezvous waits for every rank."""

    rank: int
    meeting: Meeting
    backend: str | None = "CUDA"
    shift: int = 0
    """Bytes in front of a window in its allocation."""
    taken: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Poisoned, as it is undefined."""
        if self.backend is None:
            raise RuntimeError(
                f"SymmetricMemory does not support device type {device}\nException raised from get_allocator"
            )
        assert dtype is torch.uint8 and len(size) == 1
        whole = torch.full((size[0] + self.shift,), 0xAA, dtype=dtype, device=device)
        self.taken.append((whole, whole[self.shift :]))
        return self.taken[-1][1]

    def rendezvous(self, tensor: Tensor, group: Any) -> Handle:
        """Together with all ranks; refuses memory that is not its own, and windows that differ."""
        whole = next((whole for whole, window in self.taken if window is tensor), None)
        if whole is None:
            raise RuntimeError("rendezvous: the tensor was not allocated by symmetric memory")
        assert not bool(tensor.any()), "zeros before anybody can see them"
        arrived = self.meeting.of(self.rank, (whole.data_ptr(), tensor.numel(), group.group_name))
        if len({size for _, size, _ in arrived}) > 1:
            raise RuntimeError("rendezvous: sizes differ")
        return Handle(self.rank, len(arrived), [base for base, _, _ in arrived], self.shift)

    def get_backend(self, device: torch.device) -> str | None:
        """As set, or as found."""
        return self.backend


class Meeting:
    def __init__(self, ranks: int) -> None:
        self._notes: list[Any] = [None] * ranks
        self._all = threading.Barrier(ranks, timeout=20.0)

    def of(self, rank: int, note: Any) -> list[Any]:
        """What every rank has brought."""
        self._notes[rank] = note
        self._all.wait()
        return list(self._notes)
