"""Keep, mend or replace an old placement, whichever gains most after the cost of its moves.

Mend a placement with few moves: replace a spare copy, drop one, or swap two; whichever pays most per move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_mk.placement.balance.moves import aligned_slots, num_arrivals
from moe_mk.placement.balance.policy import EplbPolicy, Policy, SlotPlacement, fresh
from moe_mk.placement.balance.request import PlacementRequest, split_shares
from moe_mk.placement.balance.topology import Doubles, InfeasiblePlacement, Ints, Sites


@dataclass(frozen=True)
class _Change:
    """Slot values to write, the largest time they leave, and how many weights must arrive."""

    peak: float
    arrivals: int
    slots: tuple[int, ...]
    experts: tuple[int, ...]


class Bench:
    """One layer on the bench: its slots, copies per expert and GPU, and GPU times with even shares."""

    def __init__(self, placed: Ints, load: Doubles, sites: Sites, *, least: int = 1, near_only: bool = False) -> None:
        self.placed, self.load, self.sites, self.least = placed.copy(), load, sites, least
        self.near_only = near_only
        self._node = np.unique(sites.node_W, return_inverse=True)[1].reshape(-1)
        self.recount()

    def recount(self) -> None:
        """Rebuild counts and times from the slots."""
        filled = self.placed >= 0
        self.copies = np.zeros((len(self.load), self.sites.num_gpus))
        np.add.at(self.copies, (self.placed[filled], self.sites.site_P[filled]), 1.0)
        self.count = self.copies.sum(1)
        self.each = self.load / np.maximum(self.count, 1)
        self.time = (self.copies * self.each[:, None]).sum(0) / self.sites.speed_W
        self.spare = np.flatnonzero(~filled | (self.count[np.maximum(self.placed, 0)] > self.least))
        here = np.zeros((len(self.load), int(self._node.max()) + 1), bool)
        where = np.nonzero(self.copies)
        here[where[0], self._node[where[1]]] = True
        self.allowed = (here[:, self._node] if self.near_only else True) & (self.copies == 0)

    def restore(self) -> None:
        """Bring back experts with too few copies, heavy first, over the spare copies that cost least."""
        missing = np.flatnonzero(self.count < self.least)
        for expert in missing[np.argsort(-self.load[missing], kind="stable")]:
            while self.count[expert] < self.least:
                open_ = self.spare[self.copies[expert, self.sites.site_P[self.spare]] == 0]
                if open_.size == 0:
                    raise InfeasiblePlacement(
                        f"expert {expert} has {int(self.count[expert])} of {self.least} copies and no spare slot is"
                        f" left among {self.sites.num_slots} living slots for {len(self.load)} experts",
                        asked=self.least, limit=int(self.count[expert]),
                    )  # fmt: skip
                peak = self._peaks_with(np.array([expert]), open_)[0]
                self.placed[open_[int(peak.argmin())]] = expert
                self.recount()

    def improve(self, goal: float, budget: int) -> int:
        """Change slots until the largest time is at most `goal`; stops at `budget` arrivals. Returns arrivals used."""
        used = 0
        while used < budget and self.time.max() > goal:
            top = float(self.time.max())
            changes = [change for change in (self._replace(), self._drop(), self._swap()) if change is not None]
            best = max(changes, key=lambda change: (top - change.peak) / change.arrivals, default=None)
            if best is None or best.peak >= top * (1 - 1e-6) or used + best.arrivals > budget:
                break
            self.placed[list(best.slots)] = best.experts
            self.recount()
            used += best.arrivals
        return used

    def _peaks_with(self, experts: Ints, slots: Ints) -> Doubles:
        """Largest time after one more copy of each expert in each slot, [experts, slots]."""
        sites = self.sites
        gone, gpu = self.placed[slots], sites.site_P[slots]
        more = self.load[experts] / (self.count[experts] + 1)
        grown = (more - self.each[experts] * (self.count[experts] > 0))[:, None] * self.copies[experts]
        less = np.where(gone >= 0, self.load[gone] / np.maximum(self.count[gone] - 1, 1), 0.0)
        shrunk = np.where(gone >= 0, less - self.each[gone], 0.0)[:, None] * np.where(
            gone[:, None] >= 0, self.copies[gone], 0.0
        )
        time = self.time + (grown[:, None] + shrunk[None]) / sites.speed_W
        index = np.arange(len(slots))
        time[:, index, gpu] += (more[:, None] - less) / sites.speed_W[gpu]
        peak: Doubles = time.max(2)
        peak[experts[:, None] == gone] = np.inf
        return peak

    def _replace(self) -> _Change | None:
        """One more copy of an expert of the busiest GPU, over a spare copy elsewhere."""
        hot = int(self.time.argmax())
        experts = np.flatnonzero(self.copies[:, hot])
        slots = self.spare[self.sites.site_P[self.spare] != hot]
        return self._best_copy(experts, slots)

    def _drop(self) -> _Change | None:
        """A spare copy on the busiest GPU gives way to another expert."""
        hot = int(self.time.argmax())
        slots = self.spare[self.sites.site_P[self.spare] == hot]
        return self._best_copy(np.flatnonzero(self.allowed[:, hot]), slots)

    def _best_copy(self, experts: Ints, slots: Ints) -> _Change | None:
        if experts.size == 0 or slots.size == 0:
            return None
        peak = self._peaks_with(experts, slots)
        peak[~self.allowed[experts][:, self.sites.site_P[slots]]] = np.inf
        best = int(peak.argmin())
        expert, slot = experts[best // len(slots)], slots[best % len(slots)]
        return _Change(float(peak.flat[best]), 1, (int(slot),), (int(expert),))

    def _swap(self) -> _Change | None:
        """An expert of the busiest GPU against a lighter one elsewhere."""
        sites = self.sites
        hot = int(self.time.argmax())
        mine = np.flatnonzero((sites.site_P == hot) & (self.placed >= 0))
        theirs = np.flatnonzero((sites.site_P != hot) & (self.placed >= 0))
        if mine.size == 0 or theirs.size == 0:
            return None
        gpu = sites.site_P[theirs]
        moved = self.each[self.placed[mine]][:, None] - self.each[self.placed[theirs]]
        after = np.maximum(self.time[hot] - moved / sites.speed_W[hot], self.time[gpu] + moved / sites.speed_W[gpu])
        after[~self.allowed[self.placed[mine]][:, gpu]] = np.inf
        after[:, ~self.allowed[self.placed[theirs], hot]] = np.inf
        best = int(after.argmin())
        one, two = int(mine[best // len(theirs)]), int(theirs[best % len(theirs)])
        return _Change(float(after.flat[best]), 2, (one, two), (int(self.placed[two]), int(self.placed[one])))


@dataclass(frozen=True)
class Budget:
    """When weights may move.

    min_gain: part of a layer's ideal time a change must save. move_cost: part of that time one moved expert costs.
    max_moves: most expert weights that may arrive anywhere in one plan, all layers together; None: no limit.
    """

    min_gain: float
    max_moves: int | None
    move_cost: float


def changed(
    old: Ints, old_shares: Doubles | None, name: Policy, policy: EplbPolicy, request: PlacementRequest, budget: Budget
) -> SlotPlacement:
    """Start from the old slots [X, P] (-1: empty): new shares everywhere, new weights only where they pay."""
    base = _kept(old, old_shares, request)
    times = request.times(base.experts, base.shares)
    speed_W = request.sites.speed_W
    # Not with BLAS: its rounding depends on the processor, and plans are the same on all.
    time, ideal = times.max(1), np.maximum((times * speed_W).sum(1) / speed_W.sum(), 1e-300)
    # Nothing beats the ideal: a layer within min_gain of it cannot be improved by that much.
    hopeful = np.flatnonzero((time > ideal * (1 + budget.min_gain)) & (time > 0))
    if hopeful.size == 0:
        return base
    part = request.rows(hopeful)
    new = fresh(name, policy, part)
    goal = part.times(new.experts, new.shares).max(1)
    # Where even a fresh plan saves less than min_gain, nothing is tried.
    worth = np.flatnonzero(time[hopeful] - goal > budget.min_gain * ideal[hopeful])
    if worth.size == 0:
        return base
    layers, part = hopeful[worth], part.rows(worth)
    current, renewed, best = _rows(base, layers), _rows(new, worth), goal[worth]
    # Mending stops near the fresh plan, but not before it has saved what makes moving worth while.
    enough = time[layers] - 1.02 * budget.min_gain * ideal[layers]
    mended = _mended(current, np.minimum(best * (1 + budget.min_gain), enough), policy, part, budget)
    aligned = _aligned(current, renewed, policy, part)
    offers: list[Offer] = []
    for placed in (mended, aligned):
        gain = (time[layers] - part.times(placed.experts, placed.shares).max(1)) / ideal[layers]
        arrivals = num_arrivals(current.experts, placed.experts, request.sites)
        net = gain - budget.move_cost * arrivals
        for at in np.flatnonzero((net > 0) & (gain >= budget.min_gain)).tolist():
            offers.append((int(layers[at]), float(net[at]), int(arrivals[at]), at, placed))
    _take_best(base, offers, budget, int(num_arrivals(old, base.experts, request.sites).sum()))
    return base


def _kept(old: Ints, old_shares: Doubles | None, request: PlacementRequest) -> SlotPlacement:
    """The old slots with experts that lost their last copies restored, and shares for today's load."""
    experts = old.copy()
    method = ["kept, shares re-solved"] * len(old)
    for layer in range(len(old)):
        bench = Bench(old[layer], request.load[layer], request.sites, least=request.least)
        if (bench.count < request.least).any():
            bench.restore()
            experts[layer], method[layer] = bench.placed, "lost experts restored"
    return SlotPlacement(experts, split_shares(experts, request, old_shares), method, np.zeros(len(old)))


def _rows(placed: SlotPlacement, layers: Ints) -> SlotPlacement:
    method = [placed.method[i] for i in layers]
    return SlotPlacement(placed.experts[layers], placed.shares[layers], method, placed.exported[layers])


def _mended(
    current: SlotPlacement, goal: Doubles, policy: EplbPolicy, request: PlacementRequest, budget: Budget
) -> SlotPlacement:
    """Few changes to each layer, as far as its goal or an eighth of its slots."""
    limit = max(8, request.sites.num_slots // 8)
    limit = limit if budget.max_moves is None else min(limit, budget.max_moves)
    experts = current.experts.copy()
    for layer in range(len(experts)):
        bench = Bench(
            experts[layer], request.load[layer], request.sites, least=request.least, near_only=policy.mends_near
        )
        used = bench.improve(float(goal[layer]), limit)
        if bench.near_only:  # what changes inside nodes cannot mend, copies on other nodes may
            bench.near_only = False
            bench.recount()
            bench.improve(float(goal[layer]), limit - used)
        experts[layer] = bench.placed
    return SlotPlacement(experts, split_shares(experts, request), ["mended"] * len(experts), current.exported)


def _aligned(
    current: SlotPlacement, new: SlotPlacement, policy: EplbPolicy, request: PlacementRequest
) -> SlotPlacement:
    """A fresh placement with its GPUs renamed so that most experts stay where they are."""
    source = aligned_slots(current.experts, new.experts, request.sites, whole_nodes=policy.whole_nodes)
    experts, shares = np.take_along_axis(new.experts, source, 1), np.take_along_axis(new.shares, source, 1)
    return SlotPlacement(experts, shares, [f"new: {name}" for name in new.method], new.exported)


Offer = tuple[int, float, int, int, SlotPlacement]
"""A layer, what changing it gains after its arrivals are paid for, those arrivals, and its row of a placement."""


def _take_best(base: SlotPlacement, offers: list[Offer], budget: Budget, used: int) -> None:
    """Give every layer its best paying offer, most gain per move first, until the moves are used up."""
    best_net = {layer: max(net for other, net, *_ in offers if other == layer) for layer, *_ in offers}
    done: set[int] = set()
    # A layer's best offer first; when it does not fit the budget any more, its smaller one may.
    offers.sort(key=lambda offer: (offer[1] < best_net[offer[0]], -offer[1] / max(offer[2], 1)))
    for layer, _, arrivals, row, placed in offers:
        if layer in done or (budget.max_moves is not None and used + arrivals > budget.max_moves):
            continue
        done.add(layer)
        used += arrivals
        base.replace(np.array([layer]), placed, np.array([row]))
