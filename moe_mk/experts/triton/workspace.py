"""Scratch memory that is allocated once; kernels take pieces of it during a run and release them at its end.

One workspace serves every layer of a device: layers run one after the other. Runs that may overlap use different
arenas (one for each stream of the device and each thread that queues on it), and arenas never share a byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes; boxes of the tensor memory accelerator need 16 (tensors) and 128 (shared memory)."""

Empty = Callable[..., Tensor]


class Arena:
    """Memory of runs that never overlap. Not thread-safe."""

    def __init__(self) -> None:
        self.high_water = 0
        """Bytes of the largest run so far: the size of the arena."""
        self.allocations = 0
        """Number of allocations through torch."""
        self._memory: Tensor | None = None
        self._outgrown: list[Tensor | None] = []

    @contextmanager
    def frame(self, device: torch.device) -> Iterator[Empty]:
        """Yield an allocator like torch.empty whose tensors are released at the end of the block.

        A run larger than all earlier ones gets the rest from torch, and the arena grows to its size afterwards.
        Outgrown memory is kept, because a captured CUDA graph may still write to it.
        """
        taken = 0

        def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            nonlocal taken
            size = math.prod(shape) * dtype.itemsize
            start, taken = taken, taken + -(-size // ALIGNMENT) * ALIGNMENT
            if self._memory is None or taken > len(self._memory):
                self.allocations += 1
                return torch.empty(shape, dtype=dtype, device=device)
            return self._memory[start : start + size].view(dtype).view(shape)

        yield empty
        if taken > self.high_water:
            self._outgrown.append(self._memory)
            self.high_water, self.allocations = taken, self.allocations + 1
            self._memory = torch.empty((taken,), dtype=torch.uint8, device=device)


class Workspace:
    """Arenas by a key that differs between runs that may overlap."""

    def __init__(self) -> None:
        self.arenas: dict[object, Arena] = {}

    def arena(self, key: object) -> Arena:
        """The arena of a key, created on first use."""
        return self.arenas.setdefault(key, Arena())

    @property
    def high_water(self) -> int:
        """Bytes held by all arenas, without outgrown memory."""
        return sum(arena.high_water for arena in self.arenas.values())


_of_device: WeakValueDictionary[torch.device, Workspace] = WeakValueDictionary()


def workspace_of(device: torch.device) -> Workspace:
    """The workspace shared by all layers of a device; it is freed with the last layer that references it."""
    workspace = _of_device.get(device)
    if workspace is None:
        workspace = _of_device[device] = Workspace()
    return workspace
