"""The ranks that must decide together: EP ranks hold different experts, the TP ranks of each hold slices of the same.

             tp 0            tp 1
    ep 0     leader          its slices of the same experts        experts move along a column: every TP rank
    ep 1     ...             ...                                   sends its own slice to the receiving EP rank

All of them vote and receive the same votes, so a slice that is missing on one rank stops all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_mk.comm.agreement import digest
from moe_mk.comm.collective import CallGroups
from moe_mk.comm.communicator import Communicator
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight
from moe_mk.layer.moe_layer import MoELayer


class Peers(CallGroups):
    """The communicators of one rank."""

    @property
    def leads(self) -> bool:
        """Whether this rank makes the plans."""
        return self.ep.rank == 0 and self.tp.rank == 0

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


def expect_equal_groups(layers: Sequence[MoELayer]) -> None:
    """Raise ConfigError unless all layers have groups of the same sizes."""
    if not layers:
        raise ConfigError("no layers were passed; pass at least one")
    slices = {layer.tp.size for layer in layers}
    if len(slices) > 1:
        raise ConfigError(
            f"experts of the layers are cut into {sorted(slices)} slices; use equal tensor-parallel sizes"
        )
    ranks = {layer.expert_map.num_ranks for layer in layers} | {layer.ep.size for layer in layers}
    if len(ranks) > 1:
        raise ConfigError(f"layers and their groups have {sorted(ranks)} ranks; they must all have the same")
