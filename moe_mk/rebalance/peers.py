"""The ranks that must decide together: EP ranks hold different experts, the TP ranks of each hold slices of the same.

             tp 0            tp 1
    ep 0     leader          its slices of the same experts        experts move along a column: every TP rank
    ep 1     ...             ...                                   sends its own slice to the receiving EP rank

All of them vote and receive the same votes, so a slice that is missing on one rank stops all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.comm.agreement import digest
from moe_mk.comm.communicator import Communicator
from moe_mk.flight import Flight


@dataclass(frozen=True)
class Peers:
    """The communicators of one rank."""

    ep: Communicator
    tp: Communicator

    @property
    def leads(self) -> bool:
        """Whether this rank makes the plans."""
        return self.ep.rank == 0 and self.tp.rank == 0

    @property
    def epochs(self) -> tuple[int, int]:
        """How often each group has recovered."""
        return self.ep.status.epoch, self.tp.status.epoch

    def fail(self, error: BaseException, epochs: Iterable[int] | None = None) -> None:
        """Report to both groups that a flight of this rank has ended early, see `Communicator.fail`."""
        for comm, epoch in zip((self.ep, self.tp), epochs or self.epochs, strict=True):
            comm.fail(error, epoch)

    def gather(self, number: int, phase: str) -> Flight[list[int]]:
        """All-gather a number; returns, equal on all ranks, the largest among the slices of each EP rank."""
        if self.tp.size > 1:
            number = max((yield from self.tp.gather_count(number, phase)))
        return (yield from self.ep.gather_count(number, phase))

    def gather_texts(self, text: str, phase: str) -> Flight[list[str]]:
        """All-gather a text; returns the texts by EP rank, those of its slices joined by line breaks."""
        if self.tp.size > 1:
            text = "\n".join(filter(None, dict.fromkeys((yield from self.tp.gather_texts(text, phase)))))
        return (yield from self.ep.gather_texts(text, phase))

    def from_leader(self, mine: Tensor | None, size: int, device: torch.device, phase: str) -> Flight[Tensor]:
        """Broadcast the leader's column of `size` bytes: first over its TP group, then over every EP group.

        mine: the column on the leader, None elsewhere.
        """
        column = torch.empty((0, 1), dtype=torch.uint8, device=device) if mine is None else mine.to(device)
        if self.tp.size > 1:
            column = yield from _spread(self.tp, column, size if self.ep.rank == 0 else 0, phase)
        return (yield from _spread(self.ep, column, size, phase))

    def agree(self, text: bytes, phase: str) -> Flight[bool]:
        """Whether all ranks have the same bytes."""
        mine = int.from_bytes(digest({"": text.hex()})[:7], "big")
        for comm in (self.tp, self.ep):
            if comm.size > 1 and len(set((yield from comm.gather_count(mine, phase)))) > 1:
                mine = -1  # reported to the other group as well
        return mine >= 0


def _spread(comm: Communicator, column: Tensor, size: int, phase: str) -> Flight[Tensor]:
    """Broadcast the first rank's column in a group; nothing is sent if the size is 0."""
    first = comm.rank == 0 and size > 0
    rows = column.repeat(comm.size, 1) if first else column[:0]
    send = [size if first else 0] * comm.size
    return (yield from comm.all_to_all(rows, send, [size] + [0] * (comm.size - 1), phase))
