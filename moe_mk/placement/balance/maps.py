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
    sharing = _neighbours(node_W, ranks)
    for copies in np.unique(count[count > 1]):
        layer, expert = np.nonzero(count == copies)
        choices = slots[layer[:, None], begin[layer, expert][:, None] + np.arange(copies)]  # [pairs, copies]
        # In the order of rank 0's turns, so that the same columns are a rank's turn for every expert.
        choices = np.take_along_axis(choices, (np.arange(copies) + expert[:, None]) % copies, 1)
        nearest[layer, :, expert] = _nearest_of(choices, gpu_P, node_W, ranks, sharing)
    return nearest


def _neighbours(node_W: Ints, ranks: Ints) -> Ints:
    """Places in `ranks` of the ranks of each node, [nodes, most of one node], len(ranks) where there are fewer."""
    node = node_W[ranks]
    order = np.argsort(node, kind="stable")
    count = np.bincount(node, minlength=int(node_W.max()) + 1)
    column = np.arange(int(count.max()))
    place = np.minimum((np.cumsum(count) - count)[:, None] + column, len(ranks) - 1)
    padded: Ints = np.where(column < count[:, None], order[place], len(ranks))
    return padded


def _nearest_of(choices: Small, gpu_P: Ints, node_W: Ints, ranks: Ints, sharing: Ints) -> Small:
    """Of an expert's slots [pairs, copies] the one each rank takes, [pairs, ranks]: the nearest; among equals by turns.

    Far from all copies a rank takes the one whose turn it is; only ranks that share a node with a copy compare.
    """
    pairs, copies = choices.shape
    turn, rank = np.append(ranks % copies, 0), np.append(ranks, -1)  # the last one pads `sharing`
    taken: Small = np.take(choices, turn, axis=1)
    # Distance first, then the place in the queue that starts at this rank's turn: one number per copy, least wins.
    best = np.full(taken.shape, 2 * copies, np.int32)
    row, gpu = np.arange(pairs)[:, None], gpu_P[choices]
    for copy in range(copies):
        here = gpu[:, copy, None]
        near = sharing[node_W[here[:, 0]]]  # [pairs, ranks of its node]
        score = np.where(rank[near] == here, 0, copies) + (copy - turn[near]) % copies
        closer = score < best[row, near]
        at, place = np.nonzero(closer)[0], near[closer]
        taken[at, place], best[at, place] = choices[at, copy], score[closer]
    return taken[:, :-1]


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
