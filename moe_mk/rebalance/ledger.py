"""Which slot of which rank holds what, in the numbers of the whole machine: dead ranks keep theirs and stay empty.

A living rank may have slots that are not allocated yet (-1), after another rank was lost: always its last ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_mk.errors import ConfigError
from moe_mk.placement.eplb import Topology
from moe_mk.placement.expert_map import ExpertMap


@dataclass
class Ledger:
    """Slots and shares [X layers, P slots] as they serve now, and the machines they lie on."""

    topology: Topology
    num_experts: int
    phy2log: NDArray[np.int64]
    share: NDArray[np.float32]

    @classmethod
    def of(cls, maps: Sequence[ExpertMap], nodes: int, speeds: tuple[float, ...] | None) -> Ledger:
        """Take the maps of all layers; ConfigError unless they agree on ranks, slots and experts."""
        sizes = {(m.num_experts, tuple(map(len, m.experts_of_rank))) for m in maps}
        if len(sizes) != 1:
            raise ConfigError(
                f"{len(maps)} layers have {len(sizes)} different sizes (experts, slots of each rank): "
                f"{sorted(sizes)[:4]}; give each kind of layer a manager of its own"
            )
        num_experts, slots = sizes.pop()
        return cls.of_rows(Topology(len(slots), nodes, slots, speeds), num_experts, []).placed(maps)

    @property
    def living(self) -> list[int]:
        """The ranks that serve, in the order of the group's ranks."""
        return [int(rank) for rank in np.flatnonzero(self.topology.alive_W)]

    def map_of(self, slots_P: NDArray[np.int64], share_P: NDArray[np.float32]) -> ExpertMap:
        """The map of one layer over the living ranks."""
        gpu_P = self.topology.gpu_P
        rows = tuple(tuple(slots_P[(gpu_P == rank) & (slots_P >= 0)].tolist()) for rank in self.living)
        shares = tuple(part for rank in self.living for part in share_P[(gpu_P == rank) & (slots_P >= 0)].tolist())
        lost = frozenset(range(self.num_experts)).difference(*rows)
        return ExpertMap(rows, self.num_experts, shares, lost)

    @classmethod
    def of_rows(cls, topology: Topology, num_experts: int, rows_XWL: Sequence[Sequence[Sequence[int]]]) -> Ledger:
        """Layers on these machines. rows_XWL: experts of each living rank; copies of one share evenly.

        Slots of a rank beyond its row hold -1: they are not allocated yet, and always its last ones.
        """
        phy2log = np.full((len(rows_XWL), topology.num_slots), -1, np.int64)
        made = cls(topology, num_experts, phy2log, np.zeros(phy2log.shape, np.float32))
        for x, rows_WL in enumerate(rows_XWL):
            for rank, row in zip(made.living, rows_WL, strict=True):
                first = made.first_slot(rank)
                phy2log[x, first : first + len(row)] = row
            copies_E = np.bincount(phy2log[x][phy2log[x] >= 0], minlength=num_experts)
            made.share[x] = np.where(phy2log[x] >= 0, 1.0 / np.maximum(copies_E[np.maximum(phy2log[x], 0)], 1), 0.0)
        return made

    def placed(self, maps: Sequence[ExpertMap]) -> Ledger:
        """Return a ledger with placements that a caller has chosen, with as many slots a rank as the longest needs.

        While experts are lost, no slot is given up.
        """
        slots_W, living = self.topology.slots_W.copy(), self.living
        needed_L = np.max([list(map(len, m.experts_of_rank)) for m in maps], axis=0)
        slots_W[living] = np.maximum(needed_L, slots_W[living] if any(m.lost for m in maps) else 0)
        machine = replace(self.topology, slots=slots_W.tolist())
        made = self.of_rows(machine, self.num_experts, [m.experts_of_rank for m in maps])
        for x, each in enumerate(maps):
            held_P = np.flatnonzero(made.phy2log[x] >= 0)
            for expert, replicas in enumerate(each.physical_of_logical):
                made.share[x, held_P[list(replicas)]] = each.shares_of(expert)
        return made

    def first_slot(self, rank: int) -> int:
        """The number of a rank's first slot."""
        return int(self.topology.slots_W[:rank].sum())

    def only_on(self, ranks: Iterable[int]) -> int:
        """Number of experts, over all layers, whose only copies are on these ranks."""
        theirs_P = np.isin(self.topology.gpu_P, list(ranks))
        return sum(len(set(row[theirs_P & (row >= 0)].tolist()) - set(row[~theirs_P].tolist())) for row in self.phy2log)
