"""Window fill: GPUs filled to the brim one after the other, cutting at most one expert each.

Fact used: n experts, W GPUs of S slots and n <= W * (S - 1) + 1. Sort the experts; some run of S neighbours is the
first whose load reaches the capacity of a GPU; all of it but the surplus of its heaviest member goes there, the rest of
that member goes back. What is left obeys the same inequality with one GPU fewer, so every GPU is filled exactly
whatever the loads: balance 1 for any load as soon as slots >= experts + GPUs - 1.
"""

from __future__ import annotations

import numpy as np

from moe_mk.placement.balance.arrays import Bools, Doubles, Ints
from moe_mk.placement.balance.topology import Sites


def fill_limit(sites: Sites) -> int:
    """The most experts that equal GPUs can always take at perfect balance."""
    return int((sites.slots_W - 1).sum()) + 1


def window_fill(load: Doubles, expert: Ints, sites: Sites) -> tuple[Ints, Doubles, Bools]:
    """Cut and place the items of each row so that every GPU is filled to its capacity.

    load, expert: [X, n]; an expert of -1 is padding. Slow and small GPUs are served first.
    Returns expert per slot (-1 empty) and the load it takes there, both [X, P], and which rows fitted: with unequal
    GPUs the slots of a slow one may run out; such a row is not usable.
    """
    rows = len(load)
    items = _Items.sort(load, expert)
    capacity = sites.capacities(items.total())
    placed = np.full((rows, sites.num_slots), -1, np.int64)
    piece = np.zeros((rows, sites.num_slots))
    order = np.lexsort((sites.slots_W, sites.speed_W))
    for turn, gpu in enumerate(order):
        slots = sites.cell_WS[gpu][: sites.slots_W[gpu]]
        fits = items.count <= len(slots)  # that of the last one is returned
        taken, part = items.take(capacity[:, gpu], len(slots), everything=turn == len(order) - 1)
        placed[:, slots], piece[:, slots] = taken, part
    return placed, piece, fits


class _Items:
    """Rows of items in ascending order of load, padded with infinity."""

    def __init__(self, load: Doubles, expert: Ints, count: Ints) -> None:
        self.load, self.expert, self.count = load, expert, count

    @classmethod
    def sort(cls, load: Doubles, expert: Ints) -> _Items:
        padded = np.where(expert >= 0, load, np.inf)
        order = np.argsort(padded, axis=1, kind="stable")
        return cls(np.take_along_axis(padded, order, 1), np.take_along_axis(expert, order, 1), (expert >= 0).sum(1))

    def total(self) -> Doubles:
        sums: Doubles = np.where(np.isfinite(self.load), self.load, 0.0).sum(1)
        return sums

    def take(self, capacity: Doubles, num_slots: int, *, everything: bool) -> tuple[Ints, Doubles]:
        """Remove one GPU's pieces and return them as [X, num_slots]."""
        width = self.load.shape[1]
        start, whole, part = self._window(capacity, num_slots, everything)
        column = np.arange(num_slots)
        index = np.minimum(start[:, None] + column, max(width - 1, 0))
        cut_here = (column == whole[:, None]) & (part > 0)[:, None]
        used = (column < whole[:, None]) | cut_here
        taken = np.where(used, np.take_along_axis(self.expert, index, 1), -1)
        held = np.where(column < whole[:, None], np.take_along_axis(self.load, index, 1), 0.0)
        held = np.where(cut_here, part[:, None], held)
        self._remove(start, whole, part, capacity)
        return taken, held

    def _window(self, capacity: Doubles, num_slots: int, everything: bool) -> tuple[Ints, Ints, Doubles]:
        """First item, number of whole items, and the load cut from the item after them (0: none)."""
        rows, width = self.load.shape
        size = np.minimum(num_slots, self.count)
        if everything:
            return self.count - size, size, np.zeros(rows)
        prefix = np.zeros((rows, width + 1))
        np.cumsum(np.where(np.isfinite(self.load), self.load, 0.0), axis=1, out=prefix[:, 1:])
        begin = np.arange(width + 1)
        end = np.minimum(begin + size[:, None], width)
        window = np.take_along_axis(prefix, end, 1) - prefix
        inside = begin <= (self.count - size)[:, None]
        start = ((window < capacity[:, None]) & inside).sum(1)
        none = start > self.count - size  # even the heaviest items fit whole
        row = np.arange(rows)
        start = np.where(none, self.count - size, start)
        whole = np.where(none, size, np.maximum(size - 1, 0))
        before = prefix[row, start + whole] - prefix[row, start]
        over = ~none & (before > capacity)  # even the lightest few are too much
        if over.any():
            fitting = np.minimum((prefix[:, 1:] <= capacity[:, None]).sum(1), whole)
            whole = np.where(over, fitting, whole)
            before = np.where(over, prefix[row, whole], before)
        return start, whole, np.where(none | (self.count == 0), 0.0, capacity - before)

    def _remove(self, start: Ints, whole: Ints, part: Doubles, capacity: Doubles) -> None:
        """Drop whole items; put what is left of a cut item back where it belongs."""
        rows, width = self.load.shape
        if width == 0:
            return
        row = np.arange(rows)
        cut = np.minimum(start + whole, width - 1)
        rest = np.where(part > 0, self.load[row, cut] - part, 0.0)
        rest_expert = self.expert[row, cut]
        returns = (part > 0) & (rest > 1e-12 * capacity)
        dropped = whole + (part > 0)
        column = np.arange(width)
        source = column + np.where(column >= start[:, None], dropped[:, None], 0)
        gone = source >= width
        source = np.minimum(source, width - 1)
        load = np.where(gone, np.inf, np.take_along_axis(self.load, source, 1))
        expert = np.where(gone, -1, np.take_along_axis(self.expert, source, 1))
        at = (load < rest[:, None]).sum(1)
        shift = column - ((column > at[:, None]) & returns[:, None])
        load, expert = np.take_along_axis(load, shift, 1), np.take_along_axis(expert, shift, 1)
        back = np.flatnonzero(returns)
        load[back, at[back]], expert[back, at[back]] = rest[back], rest_expert[back]
        self.count = self.count - dropped + returns
        keep = int(self.count.max()) if rows else 0
        self.load, self.expert = load[:, :keep], expert[:, :keep]
