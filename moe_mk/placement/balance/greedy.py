"""The two greedy steps of expert placement, for all rows at once: replicate the heaviest, pack into equal packs.

Both answers are exact, ties included; no loop runs over rows. X is the number of rows (layers, or layers x nodes).
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import numpy as np
import torch

from moe_mk.placement.balance.topology import Bools, Floats, Ints

_LOW_16 = 0xFFFF


def replicate(weight_XE: Floats, num_extra: int) -> tuple[Ints, Ints, Ints]:
    """Give each extra copy to the expert that is heaviest per copy; equal weights go to the lower expert.

    Returns the expert of each extra copy in the order they are given [X, num_extra], which copy of that expert it is
    [X, num_extra] (1 is the first extra), and the copies of every expert [X, E].
    The copies handed out are the `num_extra` largest quotients weight / k, so one sort answers for all of them.
    """
    rows, num_experts = weight_XE.shape
    count_XE = np.ones((rows, num_experts), np.int64)
    if num_extra == 0 or rows == 0:
        none = np.zeros((rows, 0), np.int64)
        return none, none, count_XE
    heavy = _heaviest(weight_XE, min(num_extra, num_experts))
    top = cast(Floats, np.take_along_axis(weight_XE, heavy, 1))
    position, divisor = _winnable(num_extra, heavy.shape[1])
    expert = heavy[:, position]
    quotient = top[:, position] / divisor.astype(weight_XE.dtype)
    order = np.lexsort((expert, -quotient), axis=1)[:, :num_extra]
    given = np.take_along_axis(expert, order, 1)
    copy = divisor[order]
    for row in np.flatnonzero(_blurred(top)):
        given[row], copy[row] = _one_by_one(weight_XE[row], num_extra)
    flat = given + np.arange(rows)[:, None] * num_experts
    count_XE += np.bincount(flat.ravel(), minlength=rows * num_experts).reshape(rows, num_experts)
    return given, copy, count_XE


def _heaviest(weight_XE: Floats, how_many: int) -> Ints:
    """The `how_many` heaviest experts of each row, heaviest first, ties to the lower expert."""
    if how_many >= weight_XE.shape[1] // 2:
        return np.argsort(-weight_XE, axis=1, kind="stable")[:, :how_many]
    part = np.argpartition(-weight_XE, how_many - 1, axis=1)[:, :how_many]
    threshold = np.take_along_axis(weight_XE, part, 1).min(1)
    part.sort(1)
    order = np.argsort(np.negative(np.take_along_axis(weight_XE, part, 1)), axis=1, kind="stable")
    heavy = np.take_along_axis(part, order, 1)
    tied = (weight_XE >= threshold[:, None]).sum(1) != how_many
    if tied.any():
        heavy[tied] = np.argsort(-weight_XE[tied], axis=1, kind="stable")[:, :how_many]
    return heavy


@lru_cache(maxsize=64)
def _winnable(num_extra: int, how_many: int) -> tuple[Ints, Ints]:
    """Pairs (j, k) such that the j-th heaviest expert can win its k-th extra copy: (j + 1) * k <= num_extra."""
    pairs = [(j, k) for j in range(how_many) for k in range(1, num_extra // (j + 1) + 1)]
    position, divisor = np.array(pairs, np.int64).T
    return position, divisor


def _blurred(top: Floats) -> Bools:
    """Rows where division may round two weights to one quotient, or to zero: the sort is not trusted there."""
    gap = top[:, :-1] - top[:, 1:]
    close = (gap > 0) & (gap <= 8 * np.finfo(top.dtype).eps * top[:, :-1])
    tiny = np.finfo(top.dtype).tiny * top.shape[1] * 1e4
    faint: Bools = (top[:, 0] > 0) & (top[:, 0] < tiny)
    blurred: Bools = close.any(1) | faint
    return blurred


def _one_by_one(weight_E: Floats, num_extra: int) -> tuple[Ints, Ints]:
    """The definition: pass after pass, one more copy for the heaviest per copy."""
    count = np.ones(len(weight_E), np.int64)
    given, copy = np.empty(num_extra, np.int64), np.empty(num_extra, np.int64)
    for turn in range(num_extra):
        expert = int((weight_E / count.astype(weight_E.dtype)).argmax())
        given[turn], copy[turn] = expert, count[expert]
        count[expert] += 1
    return given, copy


def descending(weight: Floats) -> Ints:
    """Each row from heavy to light as `torch.sort` orders it: where it puts equal weights is part of the result."""
    order: Ints = torch.from_numpy(np.ascontiguousarray(weight, np.float32)).sort(-1, descending=True).indices.numpy()
    return order


def pack(weight: Floats, num_packs: int, order: Ints | None = None) -> tuple[Ints, Ints]:
    """Put n weighted items a row into packs of n / num_packs each: heaviest first, into the lightest pack with room.

    Returns pack and rank inside the pack, both [X, n]. With one item a pack, item i goes to pack i.
    Ties between packs go to the lower pack. Sums are made in the dtype of `weight`, in the order of placing.
    """
    rows, num_items = weight.shape
    per_pack = num_items // num_packs
    if per_pack == 1 or rows == 0:
        identity = np.broadcast_to(np.arange(num_items), (rows, num_items))
        return identity, np.zeros((rows, num_items), np.int64)
    order = descending(weight) if order is None else order
    falling = np.ascontiguousarray(np.take_along_axis(weight, order, 1).T)
    steps = _pack_float32 if weight.dtype == np.float32 else _pack_any
    pack_at, rank_at = steps(falling, num_packs, per_pack)
    packs, ranks = np.empty((rows, num_items), np.int64), np.empty((rows, num_items), np.int64)
    np.put_along_axis(packs, order, pack_at.T, 1)
    np.put_along_axis(ranks, order, rank_at.T, 1)
    return packs, ranks


def _pack_float32(falling: Floats, num_packs: int, per_pack: int) -> tuple[Ints, Ints]:
    """Pack with one 64-bit key per pack: load bits, pack, items. The least key names the lightest pack and its count.

    Non-negative float32 numbers sort like their bits, so one `min` over keys finds load, pack and count together.
    """
    num_items, rows = falling.shape
    keys = np.empty((num_packs, rows), np.int64)
    chosen = np.empty((num_items, rows), np.int64)
    keys[:] = (np.arange(num_packs) << 16)[:, None]
    start = 0
    if falling[num_packs - 1].min() > 0:  # the first items meet empty packs: one each, in order
        start = num_packs
        chosen[:start] = keys
        keys.view(np.float32)[:, 1::2] = falling[:start]
        keys += 1
    flat, column = keys.reshape(-1), np.arange(rows)
    key = np.empty(rows, np.int64)
    load, place = key.view(np.float32)[1::2], key.view(np.uint16)[1::4]
    count = key.view(np.uint16)[0::4]
    index = np.empty(rows, np.int64)
    for item in range(start, num_items):
        np.minimum.reduce(keys, 0, out=key)
        chosen[item] = key
        np.add(load, falling[item], out=load)
        key += 1
        if item >= per_pack - 1:
            np.putmask(load, count == per_pack, np.float32(np.inf))
        np.multiply(place, rows, out=index, dtype=np.int64)
        index += column
        flat[index] = key
    return (chosen >> 16) & _LOW_16, chosen & _LOW_16


def _pack_any(falling: Floats, num_packs: int, per_pack: int) -> tuple[Ints, Ints]:
    """Pack as `_pack_float32` does, for any dtype: the sums are kept as they are, full packs are hidden."""
    num_items, rows = falling.shape
    load, count = np.zeros((rows, num_packs), falling.dtype), np.zeros((rows, num_packs), np.int64)
    pack_at, rank_at = np.empty((num_items, rows), np.int64), np.empty((num_items, rows), np.int64)
    column = np.arange(rows)
    for item in range(num_items):
        open_load = np.where(count < per_pack, load.astype(np.float64), np.inf)
        place = open_load.argmin(1)
        pack_at[item], rank_at[item] = place, count[column, place]
        load[column, place] += falling[item]
        count[column, place] += 1
    return pack_at, rank_at
