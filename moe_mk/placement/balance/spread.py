"""Copies on GPUs: whole ones, spread and evened out by swaps, or pieces that fill GPUs to the brim.

Spread: unlike the compatible policy, no GPU holds an expert twice, and GPUs may differ in speed and slots.

Window fill: one GPU after the other, cutting at most one expert each. Fact used: n experts, W GPUs of S slots and
n <= W * (S - 1) + 1. Sort the experts; some run of S neighbours is the first with a load of a GPU's capacity or more;
all of it but the surplus of its heaviest member goes there, the rest of that member goes back. What is left obeys the
same inequality with one GPU fewer, so every GPU is filled exactly whatever the loads: balance 1 for any load as soon as
slots >= experts + GPUs - 1.

X is the number of rows, P the slots, W the GPUs.
"""

from __future__ import annotations

import numpy as np

from moe_mk.placement.balance.greedy import descending, pack, replicate
from moe_mk.placement.balance.shares import by_gpu
from moe_mk.placement.balance.topology import Bools, Doubles, Ints, Sites


def copy_counts(load: Doubles, num_slots: int, *, least: int, most: int) -> Ints:
    """Copies of every expert [X, E] so that the heaviest copy is as light as it can be, within least and most."""
    rows, num_experts = load.shape
    extra = num_slots - num_experts * least
    assert extra >= 0, (num_slots, num_experts, least)  # `plan` has checked it
    if least == 1 and extra > 0:
        _, _, count = replicate(load, extra)
        if (count <= most).all():
            return count
    floor = load / np.arange(least, most)[:, None, None] if most > least else np.zeros((0, rows, num_experts))
    quotient = np.moveaxis(floor, 0, 2).reshape(rows, -1)  # [X, E x further copies]
    count = np.full((rows, num_experts), least, np.int64)
    extra = min(extra, quotient.shape[1])
    if extra:
        chosen = np.argsort(-quotient, axis=1, kind="stable")[:, :extra] // (most - least)
        np.add.at(count, (np.arange(rows)[:, None], chosen), 1)
    return count


def expand(load: Doubles, count: Ints, num_slots: int) -> tuple[Ints, Doubles]:
    """One item per copy: its expert and its even part of the load, both [X, num_slots]; -1 and 0 beyond the copies."""
    num_experts = load.shape[1]
    ends = np.cumsum(count, 1)
    position = np.arange(num_slots)
    owner = np.stack([np.searchsorted(row, position, side="right") for row in ends])
    expert = np.where(owner < num_experts, owner, -1)
    part = np.take_along_axis(load / np.maximum(count, 1), np.minimum(owner, num_experts - 1), 1)
    return expert, np.where(expert >= 0, part, 0.0)


def spread(load: Doubles, sites: Sites, *, least: int = 1) -> tuple[Ints, Doubles]:
    """Replicate, pack heaviest first and refine by swaps. Returns expert and even load of every slot, [X, P].

    least: copies every expert gets on different GPUs. Rows without load get an even spread of copies.
    """
    total = load.sum(1, keepdims=True)
    # Experts without load still need turns: a trace of load spreads their copies instead of piling them on expert 0.
    weighed = load + np.where(total > 0, total * 1e-12, 1.0) / load.shape[1]
    count = copy_counts(weighed, sites.num_slots, least=least, most=sites.num_gpus)
    expert, part = expand(weighed, count, sites.num_slots)
    return swap_refined(*_packed(expert, part, sites), sites)


def _packed(expert: Ints, part: Doubles, sites: Sites) -> tuple[Ints, Doubles]:
    """Every copy on a GPU: the fast packer where GPUs are alike, the careful one for rows it leaves with twins."""
    placed, piece = np.empty_like(expert), np.empty_like(part)
    careful = np.arange(len(expert))
    if sites.is_uniform:
        gpu, rank = pack(part.astype(np.float32), sites.num_gpus)
        slot = gpu * int(sites.slots_W[0]) + rank
        np.put_along_axis(placed, slot, expert, 1)
        np.put_along_axis(piece, slot, part, 1)
        careful = np.flatnonzero(num_twins(placed, sites))
    if careful.size:
        placed[careful], piece[careful] = _dealt(expert[careful], part[careful], sites)
        for row in careful[num_twins(placed[careful], sites) > 0]:
            _part_twins(placed[row], piece[row], sites)
    return placed, piece


def num_twins(placed: Ints, sites: Sites) -> Ints:
    """Slots of each row that hold an expert their GPU already holds."""
    keyed = np.where(placed >= 0, placed * sites.num_gpus + sites.site_P, -1 - np.arange(placed.shape[1]))
    keyed = np.sort(keyed, 1)
    repeated: Ints = (keyed[:, 1:] == keyed[:, :-1]).sum(1)
    return repeated


def _dealt(expert: Ints, part: Doubles, sites: Sites) -> tuple[Ints, Doubles]:
    """Heaviest first to the GPU that would finish earliest, has room and does not hold the expert yet."""
    rows, num_slots = expert.shape
    order = descending(part)
    row = np.arange(rows)
    load = np.zeros((rows, sites.num_gpus))
    used = np.zeros((rows, sites.num_gpus), np.int64)
    holds = np.zeros((rows, int(expert.max()) + 1, sites.num_gpus), bool)
    placed, piece = np.full((rows, sites.num_slots), -1, np.int64), np.zeros((rows, sites.num_slots))
    for turn in range(num_slots):
        item = order[:, turn]
        who, weight = expert[row, item], part[row, item]
        open_ = used < sites.slots_W
        free = open_ & ~holds[row, who]
        allowed = np.where(free.any(1, keepdims=True), free, open_)
        gpu = np.where(allowed, (load + weight[:, None]) / sites.speed_W, np.inf).argmin(1)
        real = who >= 0
        slot = sites.cell_WS[gpu, np.minimum(used[row, gpu], sites.cell_WS.shape[1] - 1)]
        placed[row[real], slot[real]], piece[row[real], slot[real]] = who[real], weight[real]
        load[row, gpu] += np.where(real, weight, 0.0)
        used[row, gpu] += real
        holds[row[real], who[real], gpu[real]] = True
    return placed, piece


def _part_twins(placed: Ints, piece: Doubles, sites: Sites) -> None:
    """Swap second copies away from GPUs that hold the expert, where some swap parts them; in place, one row."""
    for slot in range(len(placed)):
        gpu, expert = sites.site_P[slot], placed[slot]
        if expert < 0 or (placed[sites.site_P == gpu] == expert).sum() < 2:
            continue
        held = placed[sites.site_P == gpu]
        without = np.array([not (placed[sites.site_P == other] == expert).any() for other in range(sites.num_gpus)])
        able = np.flatnonzero(without[sites.site_P] & ~np.isin(placed, held))
        if able.size:
            other = able[np.abs(piece[able] - piece[slot]).argmin()]
            for values in (placed, piece):
                values[slot], values[other] = values[other], values[slot]


def swap_refined(placed: Ints, piece: Doubles, sites: Sites) -> tuple[Ints, Doubles]:
    """Swap, at most 64 times, the pair of slots that lowers the busiest GPU most; all rows at once.

    Never puts an expert on a GPU that holds it. Empty slots (-1) take part as items without load.
    """
    cells = sites.cell_WS
    valid = cells < sites.num_slots
    grid = np.where(valid, np.append(placed, np.full((len(placed), 1), -1), 1)[:, cells], -2)
    held = np.where(valid, np.append(piece, np.zeros((len(piece), 1)), 1)[:, cells], 0.0)
    load = held.sum(2)
    active = np.arange(len(placed))
    for _ in range(64):
        time = load[active] / sites.speed_W
        mean = load[active].sum(1) / sites.speed_W.sum()
        active = active[time.max(1) > mean * (1 + 1e-4)]
        if active.size == 0:
            break
        active = active[_swap_once(active, grid, held, load, sites)]
    placed, piece = placed.copy(), piece.copy()
    placed[:, cells[valid]], piece[:, cells[valid]] = grid[:, valid], held[:, valid]
    return placed, piece


def _swap_once(active: Ints, grid: Ints, held: Doubles, load: Doubles, sites: Sites) -> Bools:
    """Make the best swap of the busiest GPU of each active row; returns which rows found one."""
    row, speed = np.arange(active.size), sites.speed_W
    time = load[active] / speed
    hot = time.argmax(1)
    top = time[row, hot]
    theirs, hers = held[active], held[active, hot]
    moved = hers[:, :, None, None] - theirs[:, None]  # [A, slot of the hot GPU, GPU, slot there]
    after = np.maximum(
        (load[active, hot][:, None, None, None] - moved) / speed[hot][:, None, None, None],
        (load[active][:, None, :, None] + moved) / speed[:, None],
    )
    ids, mine = grid[active], grid[active, hot]
    same = (mine[:, :, None, None] == ids[:, None]) & (mine >= 0)[:, :, None, None]
    forbidden = same.any(3, keepdims=True) | same.any(1, keepdims=True)
    forbidden |= (mine == -2)[:, :, None, None] | (ids == -2)[:, None]
    after[np.broadcast_to(forbidden, after.shape)] = np.inf
    after[row, :, hot] = np.inf
    flat = after.reshape(active.size, -1)
    best = flat.argmin(1)
    found: Bools = flat[row, best] < top * (1 - 1e-6)
    slot, other, there = np.unravel_index(best, after.shape[1:])
    for values in (grid, held):
        mine_values, other_values = values[active, hot, slot].copy(), values[active, other, there].copy()
        values[active[found], hot[found], slot[found]] = other_values[found]
        values[active[found], other[found], there[found]] = mine_values[found]
    change = moved[row, slot, other, there]
    load[active[found], hot[found]] -= change[found]
    load[active[found], other[found]] += change[found]
    return found


def fill_empty(placed: Ints, load: Doubles, sites: Sites) -> Ints:
    """Give every empty slot a spare copy of the expert that is heaviest per copy and not on that GPU yet."""
    rows = np.flatnonzero((placed < 0).any(1))
    result = placed.copy()
    for row in rows:
        count = np.bincount(placed[row][placed[row] >= 0], minlength=load.shape[1])
        for slot in np.flatnonzero(placed[row] < 0):
            here = result[row][sites.site_P == sites.site_P[slot]]
            worth = load[row] / np.maximum(count, 1)
            worth[here[here >= 0]] = -1.0
            expert = int(worth.argmax())
            result[row, slot] = expert
            count[expert] += 1
    return result


def imbalance(piece: Doubles, sites: Sites) -> Doubles:
    """Largest GPU time over its least possible value, per row; 1 is perfect."""
    loads = by_gpu(piece, sites)
    ideal = loads.sum(1) / sites.speed_W.sum()
    worst = (loads / sites.speed_W).max(1)
    result: Doubles = np.divide(worst, ideal, out=np.ones_like(worst), where=ideal > 0)
    return result


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
