"""The input of a placement policy, and how the load of an expert is split over its replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moe_mk.placement.balance.shares import (
    Cost,
    balance_of,
    copies_of,
    equal_shares,
    gpu_time,
    normalised,
    poured_shares,
)
from moe_mk.placement.balance.topology import Doubles, Ints, Sites

Split = Literal["weighted", "equal"]


@dataclass(frozen=True)
class PlacementRequest:
    """The loads, GPUs and constraints that a policy places experts for."""

    load: Doubles
    """Tokens of every expert, [X layers, E]."""
    sites: Sites
    """The GPUs that live, renumbered from 0, and their slots."""
    groups: int
    nodes: int
    split: Split
    cost: Cost
    least: int
    """Copies that every expert must have on different GPUs."""
    target: float = 0.995
    """Layers whose whole copies stay below this balance are cut evenly."""

    def rows(self, layers: Ints) -> PlacementRequest:
        """Return the request for some of the layers."""
        return replace(self, load=self.load[layers])

    def times(self, experts: Ints, shares: Doubles) -> Doubles:
        """Time of every GPU [X, W], with the cost asked for."""
        return gpu_time(experts, shares, self.load, self.sites, self.cost)


def split_shares(experts: Ints, request: PlacementRequest, start: Doubles | None = None) -> Doubles:
    """Shares for given slots: even, poured, or one copy per expert where reading weights is what costs."""
    if request.split == "equal":
        return equal_shares(experts, request.load.shape[1])
    shares = poured_shares(experts, request.load, request.sites, start=start)
    if request.cost.per_expert > 0:
        single = one_copy_shares(experts, request.load, request.sites, request.cost)
        faster = request.times(experts, single).max(1) < request.times(experts, shares).max(1)
        shares = np.where(faster[:, None], single, shares)
    return shares


def one_copy_shares(experts: Ints, load: Doubles, sites: Sites, cost: Cost) -> Doubles:
    """All tokens of an expert to one of its copies: the GPU that would finish first, experts with few copies first."""
    shares = np.zeros(experts.shape)
    count = copies_of(experts, load.shape[1])
    for row in range(len(experts)):
        time = np.zeros(sites.num_gpus)
        active = np.flatnonzero((load[row] > 0) & (count[row] > 0))
        for expert in active[np.lexsort((-load[row, active], count[row, active]))]:
            slots = np.flatnonzero(experts[row] == expert)
            gpu = sites.site_P[slots]
            paid = cost.per_token * load[row, expert] + cost.per_expert
            best = int((time[gpu] + paid / sites.speed_W[gpu]).argmin())
            time[gpu[best]] += paid / sites.speed_W[gpu[best]]
            shares[row, slots[best]] = 1.0
    return normalised(experts, shares, load.shape[1])


def best_balance(request: PlacementRequest) -> Doubles:
    """An upper bound on the balance [X] of any placement of these loads on these slots, whatever the shares.

    Counts tokens only; with a cost per expert it is no bound. If no GPU is busier than t, a slot takes at most
    t * the fastest speed: sum(ceil(load / that)) slots are needed.
    """
    total, speed = request.load.sum(1), request.sites.speed_W
    if request.cost.per_expert > 0:
        return np.ones(len(total))
    ideal = total / speed.sum()
    fits = _slots_needed(request, ideal) <= request.sites.num_slots
    low, high = ideal.copy(), np.maximum(request.load.max(1) / speed.max(), ideal)
    for _ in range(50):
        middle = (low + high) / 2
        enough = _slots_needed(request, middle) <= request.sites.num_slots
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    bound: Doubles = np.divide(ideal, high, out=np.ones_like(ideal), where=(high > 0) & ~fits)
    return np.minimum(bound * (1 + 1e-12), 1.0)


def _slots_needed(request: PlacementRequest, time: Doubles) -> Doubles:
    """Slots each layer needs so that none is busy for longer than the time given."""
    carried = np.where(time > 0, time, 1.0)[:, None] * request.sites.speed_W.max()
    needed: Doubles = np.maximum(np.ceil(request.load / carried - 1e-9), 1.0).sum(1)
    return needed


def balance(experts: Ints, shares: Doubles, request: PlacementRequest) -> Doubles:
    """Balance of each layer, with the cost asked for."""
    return balance_of(request.times(experts, shares), request.sites.speed_W)
