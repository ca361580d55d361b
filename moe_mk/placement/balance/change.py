"""What becomes of an old placement: kept, mended or replaced, whichever gains most after paying for its moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_mk.placement.balance.arrays import Doubles, Ints
from moe_mk.placement.balance.ask import Ask, split_shares
from moe_mk.placement.balance.moves import aligned_slots, num_arrivals
from moe_mk.placement.balance.policy import EplbPolicy, Placed, Policy, fresh
from moe_mk.placement.balance.repair import Bench
from moe_mk.placement.balance.shares import gpu_time


@dataclass(frozen=True)
class Budget:
    """When weights may move.

    min_gain: part of a layer's ideal time a change must save. move_cost: part of that time one moved expert costs.
    max_moves: most expert weights that may arrive anywhere in one plan, all layers together; None: no limit.
    """

    min_gain: float
    max_moves: int | None
    move_cost: float


@dataclass
class _Option:
    """One way to change some layers: the placement, what each layer would gain, and the arrivals it needs."""

    layers: Ints
    placed: Placed
    gain: Doubles
    arrivals: Ints


def changed(
    old: Ints, old_shares: Doubles | None, name: Policy, policy: EplbPolicy, ask: Ask, budget: Budget
) -> Placed:
    """Start from the old slots [X, P] (-1: empty): new shares everywhere, new weights only where they pay."""
    base, forced = _kept(old, old_shares, ask)
    times = gpu_time(base.experts, base.shares, ask.load, ask.sites, ask.cost)
    time, ideal = times.max(1), np.maximum(times @ ask.sites.speed_W / ask.sites.speed_W.sum(), 1e-300)
    # Nothing beats the ideal: a layer within min_gain of it cannot be improved by that much.
    hopeful = np.flatnonzero((time > ideal * (1 + budget.min_gain)) & (time > 0))
    if hopeful.size == 0:
        return base
    part = ask.rows(hopeful)
    new = fresh(name, policy, part)
    goal = gpu_time(new.experts, new.shares, part.load, ask.sites, ask.cost).max(1)
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
    options = [_option(layers, each, current, part, ideal[layers]) for each in (mended, aligned)]
    _take_best(base, options, budget, int(forced.sum()))
    return base


def _kept(old: Ints, old_shares: Doubles | None, ask: Ask) -> tuple[Placed, Ints]:
    """The old slots with experts that lost their last copies restored, and shares for today's load."""
    experts = old.copy()
    forced = np.zeros(len(old), np.int64)
    method = ["kept, shares re-solved"] * len(old)
    for layer in range(len(old)):
        bench = Bench(old[layer], ask.load[layer], ask.sites, least=ask.least)
        if (bench.count < ask.least).any():
            bench.restore()
            experts[layer], method[layer] = bench.placed, "lost experts restored"
    if not np.array_equal(experts, old):
        forced = num_arrivals(old, experts, ask.sites)
    shares = split_shares(experts, ask, old_shares)
    return Placed(experts, shares, method, np.zeros(len(old))), forced


def _rows(placed: Placed, layers: Ints) -> Placed:
    return Placed(
        placed.experts[layers].copy(),
        placed.shares[layers].copy(),
        [placed.method[i] for i in layers],
        placed.exported[layers].copy(),
    )


def _mended(current: Placed, goal: Doubles, policy: EplbPolicy, ask: Ask, budget: Budget) -> Placed:
    """Few changes to each layer, as far as its goal or an eighth of its slots."""
    limit = max(8, ask.sites.num_slots // 8)
    limit = limit if budget.max_moves is None else min(limit, budget.max_moves)
    experts = current.experts.copy()
    for layer in range(len(experts)):
        bench = Bench(experts[layer], ask.load[layer], ask.sites, least=ask.least, near_only=policy.mends_near)
        used = bench.improve(float(goal[layer]), limit)
        if bench.near_only:  # what changes inside nodes cannot mend, copies on other nodes may
            bench.near_only = False
            bench.recount()
            bench.improve(float(goal[layer]), limit - used)
        experts[layer] = bench.placed
    return Placed(experts, split_shares(experts, ask), ["mended"] * len(experts), current.exported)


def _aligned(current: Placed, new: Placed, policy: EplbPolicy, ask: Ask) -> Placed:
    """A fresh placement with its GPUs renamed so that most experts stay where they are."""
    source = aligned_slots(current.experts, new.experts, ask.sites, whole_nodes=policy.whole_nodes)
    experts, shares = np.take_along_axis(new.experts, source, 1), np.take_along_axis(new.shares, source, 1)
    return Placed(experts, shares, [f"new: {name}" for name in new.method], new.exported)


def _option(layers: Ints, placed: Placed, current: Placed, ask: Ask, ideal: Doubles) -> _Option:
    before, after = (
        gpu_time(each.experts, each.shares, ask.load, ask.sites, ask.cost).max(1) for each in (current, placed)
    )
    return _Option(layers, placed, (before - after) / ideal, num_arrivals(current.experts, placed.experts, ask.sites))


def _take_best(base: Placed, options: list[_Option], budget: Budget, used: int) -> None:
    """Give every layer its best paying option, most gain per move first, until the moves are used up."""
    offers = []
    for option in options:
        net = option.gain - budget.move_cost * option.arrivals
        for at in np.flatnonzero((net > 0) & (option.gain >= budget.min_gain)).tolist():
            offers.append((int(option.layers[at]), float(net[at]), int(option.arrivals[at]), at, option))
    best_net = {layer: max(net for other, net, *_ in offers if other == layer) for layer, *_ in offers}
    done: set[int] = set()
    # A layer's best option first; when it does not fit the budget any more, its smaller one may.
    offers.sort(key=lambda offer: (offer[1] < best_net[offer[0]], -offer[1] / max(offer[2], 1)))
    for layer, _, arrivals, index, option in offers:
        if layer in done or (budget.max_moves is not None and used + arrivals > budget.max_moves):
            continue
        done.add(layer)
        used += arrivals
        base.experts[layer], base.shares[layer] = option.placed.experts[index], option.placed.shares[index]
        base.exported[layer], base.method[layer] = option.placed.exported[index], option.placed.method[index]
