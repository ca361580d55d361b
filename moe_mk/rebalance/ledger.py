"""Which slot of which rank holds what, in the numbers of the whole machine: dead ranks keep theirs and stay empty.

A living rank may have slots that are not allocated yet (-1), after another rank was lost: always its last ones.
`measure_balance` states how even a load is under it, among experts and among ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError
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


@dataclass(frozen=True)
class Balance:
    """Evenness of every layer under one placement."""

    expert_cv_X: NDArray[np.float64]
    """Coefficient of variation of expert loads: what the router does, 0 is even."""
    rank_max_over_mean_X: NDArray[np.float64]
    """Time of the busiest rank over the ideal one: what placement makes of it, 1 is even."""
    step_over_ideal: float
    """Time of all layers, each as slow as its busiest rank, over the time with even ranks."""

    def as_dict(self) -> dict[str, float]:
        cv, peak = self.expert_cv_X, self.rank_max_over_mean_X
        return {
            "balance.expert_cv": float(cv.mean()),
            "balance.expert_cv_worst": float(cv.max()),
            "balance.rank_max_over_mean": float(peak.mean()),
            "balance.rank_max_over_mean_worst": float(peak.max()),
            "balance.step_over_ideal": self.step_over_ideal,
        }


def measure_balance(load_XE: NDArray[np.float64], ledger: Ledger) -> Balance:
    """Judge a load of tokens [layers, experts] under a placement; layers without load count as even."""
    time_XW, speed_W = rank_times(load_XE, ledger), ledger.topology.speed_W[ledger.living]
    # In units of a rank of mean speed, so that equal speeds give plain max over mean.
    ideal_X = (time_XW * speed_W).sum(1) / speed_W.sum()
    busiest_X = time_XW.max(1)
    peak_X = np.divide(busiest_X, ideal_X, out=np.ones_like(ideal_X), where=ideal_X > 0)
    cv = [float(coefficient_of_variation(torch.tensor(row, dtype=torch.float64, device="cpu"))) for row in load_XE]
    total = float(ideal_X.sum())
    return Balance(np.asarray(cv), peak_X, float(busiest_X.sum()) / total if total > 0 else 1.0)


def coefficient_of_variation(values: Tensor) -> Tensor:
    """Population standard deviation over mean of values >= 0: 0 when all are equal, zeros included."""
    return values.std(correction=0) / values.mean().clamp(min=torch.finfo(values.dtype).tiny)


def rank_times(load_XE: NDArray[np.float64], ledger: Ledger) -> NDArray[np.float64]:
    """Tokens over speed of every living rank [layers, ranks], when replicas take exactly their shares."""
    expected = (len(ledger.phy2log), ledger.num_experts)
    if load_XE.shape != expected:
        raise ShapeError(f"load has shape {load_XE.shape}, the placement has [layers, experts] = {expected}")
    taken_XP = np.take_along_axis(load_XE, np.maximum(ledger.phy2log, 0), 1) * ledger.share
    gpu_P, living = ledger.topology.gpu_P, ledger.living
    times = np.stack([taken_XP[:, gpu_P == rank].sum(1) / ledger.topology.speed_W[rank] for rank in living], 1)
    return times.astype(np.float64)
