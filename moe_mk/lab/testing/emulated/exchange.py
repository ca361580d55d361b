"""How emulated ranks reach each other: over the group that the library would have been given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.threads import ThreadCommunicator


class Exchange(Protocol):
    """One rank's view of a group whose calls wait for all ranks."""

    rank: int
    size: int

    def swap(self, parts: Sequence[Sequence[Tensor]], phase: str) -> list[list[Tensor]]:
        """Give peer p the tensors parts[p]; return what each peer gave, by rank.

        All lists have one length; tensor k has one dtype and the same trailing sizes for all pairs of ranks, and any
        number of rows.
        """


def exchange_over(group: object) -> Exchange:
    """The exchange of a process group, or of the threads that stand in for one.

    Raises TypeError for anything else, as a library would.
    """
    if isinstance(group, ThreadCommunicator):
        return group
    if isinstance(group, dist.ProcessGroup):
        return ProcessExchange(group)
    raise TypeError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")


class ProcessExchange:
    """Over gloo, or whatever carries CPU tensors in the group. A late peer ends in the group's own timeout."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def swap(self, parts: Sequence[Sequence[Tensor]], phase: str) -> list[list[Tensor]]:
        """See `Exchange.swap`; `phase` is for the messages of other exchanges."""
        del phase
        rows = torch.tensor([[len(tensor) for tensor in part] for part in parts], dtype=torch.int64, device="cpu")
        theirs = torch.empty_like(rows)
        dist.all_to_all_single(theirs, rows, group=self.group)
        received: list[list[Tensor]] = [[] for _ in parts]
        for column, counts in zip(zip(*parts, strict=True), theirs.unbind(1), strict=True):
            for mail, tensor in zip(received, self._swap_one(column, counts.tolist()), strict=True):
                mail.append(tensor)
        return received

    def _swap_one(self, outgoing: Sequence[Tensor], counts: list[int]) -> list[Tensor]:
        like, trailing = outgoing[0], outgoing[0].shape[1:]
        row_bytes = like.element_size() * trailing.numel()
        flat = [tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8) for tensor in outgoing]
        sizes = [count * row_bytes for count in counts]
        arrived = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        dist.all_to_all_single(arrived, torch.cat(flat), sizes, [len(part) for part in flat], group=self.group)
        # Cloned: a dtype view must start at a multiple of its size.
        parts = [part.clone() for part in torch.split(arrived, sizes)]
        shaped = [part.view(like.dtype).view(n, *trailing) for part, n in zip(parts, counts, strict=True)]
        return [part.to(like.device) for part in shaped]
