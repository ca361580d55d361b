"""Compact maps from experts to slots whose shapes do not depend on the load, so that a graph can keep reading them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_mk.placement.balance.arrays import Doubles, Ints
from moe_mk.placement.balance.shares import copies_of

Small = NDArray[np.int16 | np.int32]


def small_type(largest: int) -> type[np.int16] | type[np.int32]:
    """The narrower integer that holds a number."""
    return np.int16 if largest <= np.iinfo(np.int16).max else np.int32


def csr_maps(phy2log: Ints, num_experts: int) -> tuple[Small, Small]:
    """Offsets [X, E + 1] and slots [X, P] of the same experts, slot by slot ascending.

    Expert e of a layer has the slots slots[offsets[e] : offsets[e + 1]]; -1 for empty ones stands at the end.
    int16 where it suffices.
    """
    layers, num_slots = phy2log.shape
    dtype = small_type(max(num_slots, num_experts + 1))
    offsets: Small = np.zeros((layers, num_experts + 1), dtype)
    np.cumsum(copies_of(phy2log, num_experts), 1, out=offsets[:, 1:])
    empty = phy2log < 0
    keys = np.where(empty, num_experts, phy2log) if empty.any() else phy2log
    slots: Small = np.argsort(keys.astype(dtype), axis=1, kind="stable").astype(dtype)
    slots[np.arange(num_slots) >= offsets[:, -1:]] = -1
    return offsets, slots


def dense_of_csr(offsets: Small, slots: Small) -> Ints:
    """The padded form: slots of every expert [X, E, most copies], -1 where there are fewer."""
    begin = offsets[:, :-1].astype(np.int64)
    count = np.diff(offsets.astype(np.int64), axis=1)
    column = np.arange(int(count.max()))
    index = np.minimum(begin[..., None] + column, slots.shape[1] - 1)
    found = np.take_along_axis(slots.astype(np.int64)[:, None], index, 2)
    dense: Ints = np.where(column < count[..., None], found, -1)
    return dense


def nearest_slots(offsets: Small, slots: Small, gpu_P: Ints, node_W: Ints, ranks: Ints) -> Small:
    """The slot each rank sends an expert to, [X, ranks, E]: on its own GPU, else on its node, else anywhere.

    Ranks that have several equally near copies take turns by rank and expert, so that no copy is everyone's first.
    """
    layers, num_experts = len(offsets), offsets.shape[1] - 1
    begin = offsets[:, :-1].astype(np.int64)
    first = np.take_along_axis(slots, np.minimum(begin, slots.shape[1] - 1), 1)
    count = np.diff(offsets.astype(np.int64), axis=1)
    nearest = np.empty((layers, len(ranks), num_experts), slots.dtype)
    nearest[:] = np.where(count > 0, first, -1)[:, None]
    for copies in np.unique(count[count > 1]):
        layer, expert = np.nonzero(count == copies)
        choices = slots[layer[:, None], begin[layer, expert][:, None] + np.arange(copies)]  # [pairs, copies]
        gpu = gpu_P[choices]
        chosen = _turn_of_nearest(
            gpu.astype(np.int32), node_W.astype(np.int32), ranks.astype(np.int32), expert.astype(np.int32)
        )
        nearest[layer, :, expert] = np.take_along_axis(choices, chosen, 1)
    return nearest


def _turn_of_nearest(
    gpu: NDArray[np.int32], node_W: NDArray[np.int32], ranks: NDArray[np.int32], expert: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Which of the copies [pairs, ranks] each rank takes: the nearest; among equals by turns."""
    copies = gpu.shape[1]
    turn = (ranks + expert[:, None]) % copies
    # Distance first, then the place in the queue that starts at this rank's turn: one number per copy, least wins.
    best = np.full(turn.shape, 3 * copies, np.int32)
    chosen = np.zeros(turn.shape, np.int64)
    for copy in range(copies):
        here = gpu[:, copy : copy + 1]
        distance = np.where(here == ranks, 0, np.where(node_W[here] == node_W[ranks], copies, 2 * copies))
        score = distance + (copy - turn) % copies
        closer = score < best
        chosen[closer] = copy
        np.minimum(best, score, out=best, casting="same_kind")
    return chosen


def lost_with_gpu(phy2log: Ints, load: Doubles, gpu_P: Ints, num_gpus: int) -> Doubles:
    """Part of each layer's load that would go with a GPU, [X, W]: its experts exist nowhere else."""
    layers, num_experts = load.shape
    holds = np.zeros((layers, num_experts + 1, num_gpus), bool)
    holds[np.arange(layers)[:, None], phy2log, gpu_P] = True  # empty slots land in the extra row
    holds = holds[:, :num_experts]
    alone = holds & (holds.sum(2, keepdims=True) == 1)
    total = load.sum(1)
    part = np.einsum("xe,xew->xw", load, alone.astype(np.float64))
    lost: Doubles = np.divide(part, total[:, None], out=np.zeros_like(part), where=total[:, None] > 0)
    return lost
