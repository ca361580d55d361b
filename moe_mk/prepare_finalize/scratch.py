"""Memory that exchanges use again: rows on their way lie in it from when they are packed until they are taken apart.

Large tensors get new pages from the system every time they are made, and touching those for the first time takes far
longer than copying into pages that are there (20 times as long on the machine of `benchmarks/results`). So what lives
no longer than a call is kept, on the host and up to a limit, for the next call of any layer of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.config.problem import Problem
from moe_mk.kernels.native.library import Native
from moe_mk.prepare_finalize.packing import SMALL_BYTES, packed_row_bytes

KEPT_BYTES = 128 << 20
"""What is kept of one group at most, between calls."""
MAPPED_BYTES = 32 << 20
"""From here on the C library asks the system for every piece (`DEFAULT_MMAP_THRESHOLD_MAX` of glibc on 64 bits)."""


@dataclass(frozen=True)
class Borrowed:
    """Rows to write to, and the memory they lie in."""

    rows: Tensor
    memory: Tensor | None
    """None: it is nobody's to keep."""


@dataclass(eq=False)
class Scratch:
    """Pieces of host memory that nobody uses just now. Calls that are under way at once have one each."""

    free: list[Tensor] = field(default_factory=list)
    """uint8, smallest first."""

    @classmethod
    def of(cls, comm: Communicator) -> Scratch:
        """That of a group: layers over the same groups share it."""
        scratch = comm.kept.setdefault((cls,), cls())
        assert isinstance(scratch, Scratch)
        return scratch

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Borrowed:
        """Uninitialised rows: to be given back when nothing reads or writes them any more, and only then.

        Few bytes are made anew: the allocator of the C library has such pieces at hand.
        """
        wanted = prod(shape) * dtype.itemsize
        if device.type != "cpu" or wanted < SMALL_BYTES:
            return Borrowed(torch.empty(tuple(shape), dtype=dtype, device=device), None)
        memory = self._smallest(wanted)
        return Borrowed(memory[:wanted].view(dtype).view(tuple(shape)), memory)

    def give(self, *borrowed: Borrowed) -> None:
        """Let others use it; beyond the limit the smallest pieces go back to the system."""
        self.free += [each.memory for each in borrowed if each.memory is not None]
        self.free.sort(key=len)
        while sum(map(len, self.free)) > KEPT_BYTES:
            self.free.pop(0)

    def _smallest(self, wanted: int) -> Tensor:
        for place, memory in enumerate(self.free):
            if len(memory) >= wanted:
                return self.free.pop(place)
        if self.free:
            self.free.pop()  # the new one takes its place
        with torch.inference_mode(False):  # else nobody could write to it outside of that mode
            return torch.empty(-(-wanted // SMALL_BYTES) * SMALL_BYTES, dtype=torch.uint8, device="cpu")


def kept_bytes(problem: Problem) -> int:
    """The most that a transport over it keeps between calls: what all tokens of a rank take, packed, or the limit."""
    model, kernel = problem.config.model, problem.config.kernel
    if problem.device.kind != "cpu" or problem.ranks == 1:
        return 0
    top_k = problem.config.router.top_k
    copies = min(problem.ranks, top_k) * kernel.max_num_tokens
    return min(KEPT_BYTES, 2 * copies * packed_row_bytes(problem.dtype, model.hidden_size, top_k))


def new_rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, native: Native | None) -> Tensor:
    """Uninitialised rows that outlive the call: on large pages, where the kernels can ask for some."""
    rows = torch.empty(shape, dtype=dtype, device=device)
    num_bytes = rows.numel() * rows.element_size()
    if native is not None and device.type == "cpu" and num_bytes >= MAPPED_BYTES:
        native.functions["advise_huge"](rows.data_ptr(), num_bytes)
    return rows
