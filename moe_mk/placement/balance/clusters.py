"""Placement with fewer spare slots than GPUs (decode: two slots a GPU): split the GPUs into clusters that fill evenly.

With q = W - (P - E) > 1 the graph "GPUs joined by shared experts" has at least q parts. A part of k GPUs with S slots
each holds k * (S - 1) + 1 experts, and inside a part the window fill is perfect: only the parts' totals can differ.
"""

from __future__ import annotations

import numpy as np

from moe_mk.placement.balance.arrays import Bools, Doubles, Ints
from moe_mk.placement.balance.fill import window_fill
from moe_mk.placement.balance.greedy import replicate
from moe_mk.placement.balance.topology import Sites


def cluster_fill(load: Doubles, sites: Sites) -> tuple[Ints, Doubles, Bools]:
    """Cluster and fill every row; expert and load per slot [X, P], and which rows fitted. Equal GPUs only."""
    rows, num_experts = load.shape
    placed = np.full((rows, sites.num_slots), -1, np.int64)
    piece = np.zeros((rows, sites.num_slots))
    fits = np.zeros(rows, bool)
    slots = int(sites.slots_W[0])
    if not sites.is_uniform or slots < 2:
        return placed, piece, fits
    _, _, copies = replicate(load, sites.num_slots - num_experts)
    for row in range(rows):
        parts = clusters_of(load[row], copies[row], sites.num_gpus, slots)
        fits[row] = parts is not None
        first = 0
        for experts, gpus in parts or ():
            place = np.arange(first * slots, (first + gpus) * slots)
            if gpus == 1:
                place = place[: len(experts)]
                placed[row, place], piece[row, place] = experts, load[row, experts]
            else:
                part = sites.subset(np.arange(first, first + gpus))
                ids, amounts, fit = window_fill(load[row, experts][None], experts[None], part)
                placed[row, place], piece[row, place] = ids[0], amounts[0]
                fits[row] &= bool(fit[0])
            first += gpus
    return placed, piece, fits


def clusters_of(load: Doubles, copies: Ints, num_gpus: int, slots: int) -> list[tuple[Ints, int]] | None:
    """Experts and number of GPUs of each cluster: one per replicated expert, single GPUs for the rest."""
    seeds = np.flatnonzero(copies > 1)
    num_single = num_gpus - int(copies[seeds].sum())
    if num_single < 0:
        return None
    gpus = np.concatenate([copies[seeds], np.ones(num_single, np.int64)])
    room = gpus * (slots - 1) + 1
    if room.sum() != len(load):
        return None
    member = np.full(len(load), -1)
    member[seeds] = np.arange(len(seeds))
    total = np.bincount(member[seeds], load[seeds], minlength=len(gpus)).astype(np.float64)
    used = np.bincount(member[seeds], minlength=len(gpus))
    for expert in np.argsort(-load, kind="stable"):
        if member[expert] < 0:
            target = int(np.where(used < room, (total + load[expert]) / gpus, np.inf).argmin())
            member[expert] = target
            total[target] += load[expert]
            used[target] += 1
    _swap_members(member, total, gpus, load)
    return [(np.flatnonzero(member == part), int(gpus[part])) for part in range(len(gpus))]


def _swap_members(member: Ints, total: Doubles, gpus: Ints, load: Doubles, rounds: int = 200) -> None:
    """Best swap between the cluster with most load per GPU and any other, until none helps; in place."""
    for _ in range(rounds):
        worst = int((total / gpus).argmax())
        mine = np.flatnonzero(member == worst)
        moved = load[mine][:, None] - load[None]
        after = np.maximum((total[worst] - moved) / gpus[worst], (total[member] + moved) / gpus[member])
        after[:, mine] = np.inf
        best = int(after.argmin())
        if after.flat[best] >= total[worst] / gpus[worst] * (1 - 1e-9):
            return
        one, other = int(mine[best // len(load)]), best % len(load)
        change, target = load[one] - load[other], member[other]
        total[worst] -= change
        total[target] += change
        member[one], member[other] = target, worst
