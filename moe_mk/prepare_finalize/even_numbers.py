"""Numbers of physical experts as libraries want them: equally many a rank, so that a division finds the rank.

Ranks that hold fewer experts than others leave gaps. Three ranks with 2, 1 and 2 experts, two numbers a rank:

    physical expert   0  1 | 2    | 3  4
    number            0  1 | 2    | 4  5        number // 2 = rank, number % 2 = slot
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.prepare_finalize.base import TransportContext


class EvenNumbers:
    """Between physical ids, numbers and slots of this rank. multiple: of what there must be numbers in all."""

    def __init__(self, context: TransportContext, multiple: int = 1) -> None:
        ranks = context.comm.size
        per_rank = max(context.expert_map.num_slots(rank) for rank in range(ranks))
        while ranks * per_rank % multiple:
            per_rank += 1
        self.per_rank, self.total, self.first = per_rank, ranks * per_rank, context.comm.rank * per_rank
        self._context = context

    def of(self, physical_TK: Tensor, nowhere: int = -1) -> Tensor:
        """int32 numbers of physical ids; `nowhere` for -1."""
        tables, at_TK = self._context.tables, physical_TK.clamp_min(0).long()
        number_TK = tables.rank_of_P[at_TK] * self.per_rank + tables.slot_of_P[at_TK]
        return torch.where(physical_TK >= 0, number_TK, nowhere).to(torch.int32)

    def slots(self, number_RK: Tensor) -> Tensor:
        """int32 slots of this rank; -1 for every other number."""
        slot_RK = number_RK - self.first
        mine_RK = (slot_RK >= 0) & (slot_RK < self._context.num_slots)
        return torch.where(mine_RK, slot_RK, -1).to(torch.int32)
