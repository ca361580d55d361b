"""Fresh placements: one function per policy, one result type. The best of its candidates is kept for every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.placement.balance.arrays import Doubles, Ints
from moe_mk.placement.balance.clusters import cluster_fill
from moe_mk.placement.balance.compat import rebalance_experts
from moe_mk.placement.balance.fill import fill_limit, window_fill
from moe_mk.placement.balance.hybrid import hybrid, hybrid_limit
from moe_mk.placement.balance.shares import (
    Cost,
    at_slots,
    balance_of,
    copies_of,
    equal_shares,
    gpu_time,
    normalised,
    poured_shares,
)
from moe_mk.placement.balance.spread import fill_empty, num_twins, spread, swap_refined
from moe_mk.placement.balance.topology import InfeasiblePlacement, Sites
from moe_mk.registry import did_you_mean

Policy = Literal["auto", "compat", "flat", "hybrid"]
Split = Literal["weighted", "equal"]
_NODE_TARGET = 0.9985


@dataclass
class Placed:
    """Expert and share of every living slot [X, P], how each layer came about, and the load sent away from home [X]."""

    experts: Ints
    shares: Doubles
    method: list[str]
    exported: Doubles

    def keep_better(self, other: Placed, load: Doubles, sites: Sites, cost: Cost) -> None:
        """Take over the layers in which the other placement is faster."""
        mine = gpu_time(self.experts, self.shares, load, sites, cost).max(1)
        theirs = gpu_time(other.experts, other.shares, load, sites, cost).max(1)
        self.replace(np.flatnonzero(theirs < mine), other)

    def replace(self, layers: Ints, other: Placed) -> None:
        """Take some layers from another placement of the same size."""
        self.experts[layers], self.shares[layers] = other.experts[layers], other.shares[layers]
        self.exported[layers] = other.exported[layers]
        for layer in layers:
            self.method[layer] = other.method[layer]


@dataclass(frozen=True)
class Ask:
    """What a fresh placement is made for."""

    load: Doubles
    sites: Sites
    groups: int
    nodes: int
    split: Split
    cost: Cost
    least: int
    target: float = 0.995  # layers whose whole copies stay below this balance are cut evenly

    def rows(self, layers: Ints) -> Ask:
        """The same for some of the layers."""
        return replace(self, load=self.load[layers])


def resolve(policy: Policy, ask: Ask) -> tuple[Policy, str]:
    """The policy that runs, and why; raises UnsupportedError with every reason where the wish cannot be met."""
    for name, value, known in (("policy", policy, get_args(Policy)), ("split", ask.split, get_args(Split))):
        if value not in known:
            raise ConfigError(f"{name}={value!r} is not known{did_you_mean(str(value), known)}")
    against = reasons_against_hybrid(ask) if policy in ("auto", "hybrid") else []
    if policy == "auto":
        if against:
            return "flat", "auto chose flat: " + "; ".join(against)
        return "hybrid", f"auto chose hybrid: {ask.groups} groups on {ask.nodes} nodes leave room for exports"
    if policy == "hybrid" and against:
        raise UnsupportedError("policy 'hybrid' cannot serve this topology; use 'flat' or 'auto'", against)
    if policy == "compat":
        wrong = []
        if not ask.sites.is_uniform:
            wrong.append("compat knows neither unequal speeds nor unequal slots; use 'flat'")
        if ask.least > 1:
            wrong.append(f"compat cannot promise {ask.least} copies of every expert; use 'flat'")
        if np.ptp(per_node := np.unique(ask.sites.node_W, return_counts=True)[1]):
            wrong.append(f"compat needs equally many living GPUs a node, there are {per_node.tolist()}; use 'flat'")
        if wrong:
            raise UnsupportedError("policy 'compat' cannot serve this topology", wrong)
    return policy, f"policy {policy} as asked"


def reasons_against_hybrid(ask: Ask) -> list[str]:
    """Why groups cannot stay at home here."""
    experts, limit = ask.load.shape[1], hybrid_limit(ask.sites)
    wrong = []
    if len(np.unique(ask.sites.node_W)) < 2:
        wrong.append("there is only one node")
    if ask.groups < 2:
        wrong.append(f"groups={ask.groups}: nothing to keep together")
    if ask.split == "equal":
        wrong.append("split='equal' cannot lend part of an expert to another node")
    if ask.least > 1:
        wrong.append(f"{ask.least} copies of every expert on different GPUs are planned flat")
    if experts > limit:
        missing = experts - limit
        wrong.append(
            f"{experts} experts on {ask.sites.num_slots} slots leave no slot for exports: {missing} more are needed"
        )
    return wrong


def fresh(policy: Policy, ask: Ask) -> Placed:
    """Place every layer anew."""
    if policy == "compat":
        return _compat(ask, ask.groups, ask.nodes)
    if policy == "hybrid":
        return _hybrid(ask)
    return _flat(ask)


def split_shares(experts: Ints, ask: Ask, start: Doubles | None = None) -> Doubles:
    """Shares for given slots: even, poured, or one copy per expert where reading weights is what costs."""
    if ask.split == "equal":
        return equal_shares(experts, ask.load.shape[1])
    shares = poured_shares(experts, ask.load, ask.sites, start=start)
    if ask.cost.per_expert > 0:
        single = one_copy_shares(experts, ask.load, ask.sites, ask.cost)
        slower = gpu_time(experts, shares, ask.load, ask.sites, ask.cost).max(1)
        faster = gpu_time(experts, single, ask.load, ask.sites, ask.cost).max(1) < slower
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


def _from_pieces(experts: Ints, piece: Doubles, ask: Ask, method: str, exported: Doubles | None = None) -> Placed:
    """A placement whose shares start from the load each slot was planned for."""
    filled = fill_empty(experts, ask.load, ask.sites)
    whole = at_slots(ask.load, filled)
    start = np.divide(piece, whole, out=np.zeros_like(piece), where=whole > 0)
    shares = split_shares(filled, ask, start)
    away = np.zeros(len(experts)) if exported is None else exported
    return Placed(filled, shares, [method] * len(experts), away)


def _compat(ask: Ask, groups: int, nodes: int) -> Placed:
    load, sites = torch.from_numpy(ask.load), ask.sites
    experts = rebalance_experts(load, sites.num_slots, groups, nodes, sites.num_gpus)[0].numpy()
    shares = split_shares(experts, ask)
    return Placed(experts, shares, ["compat"] * len(experts), np.zeros(len(experts)))


def _flat(ask: Ask) -> Placed:
    experts, piece = spread(ask.load, ask.sites, least=ask.least)
    best = _from_pieces(experts, piece, ask, "flat: copies packed and swapped")
    if ask.least > 1:
        _check_copies(best.experts, ask)
        return best
    twins = num_twins(best.experts, ask.sites) > 0
    if ask.sites.is_uniform and (
        ask.sites.num_slots <= ask.load.shape[1] + ask.sites.num_gpus or twins.any() or ask.split == "equal"
    ):
        best.keep_better(_flat_compat(ask), ask.load, ask.sites, ask.cost)
    time = gpu_time(best.experts, best.shares, ask.load, ask.sites)
    uneven = np.flatnonzero(balance_of(time, ask.sites.speed_W) < ask.target)
    if ask.split == "weighted" and uneven.size:
        _fill_rows(best, uneven, ask)
    return best


def _check_copies(experts: Ints, ask: Ask) -> None:
    """Raise InfeasiblePlacement where an expert found fewer different GPUs than asked for."""
    layers, num_experts = ask.load.shape
    holds = np.zeros((layers, num_experts, ask.sites.num_gpus), bool)
    holds[np.arange(layers)[:, None], experts, ask.sites.site_P] = True
    fewest = int(holds.sum(2).min())
    if fewest < ask.least:
        raise InfeasiblePlacement(
            f"min_copies={ask.least}: with slots {sorted(set(ask.sites.slots_W.tolist()))} a GPU some expert finds only"
            f" {fewest} different GPUs; use more even slots",
            asked=ask.least, limit=fewest, next_feasible=fewest,
        )  # fmt: skip


def _flat_compat(ask: Ask) -> Placed:
    """The compatible policy without nodes, then swaps: never behind it."""
    plain = _compat(ask, 1, 1)
    held = at_slots(ask.load, plain.experts) * equal_shares(plain.experts, ask.load.shape[1])
    experts, _ = swap_refined(plain.experts, held, ask.sites)
    shares = split_shares(experts, ask)
    swapped = Placed(experts, shares, ["flat: compat packed and swapped"] * len(experts), plain.exported)
    plain.keep_better(swapped, ask.load, ask.sites, ask.cost)
    return plain


def _fill_rows(best: Placed, layers: Ints, ask: Ask) -> None:
    """Try window fill, or clusters where slots are short, on the layers whole copies leave uneven."""
    part = ask.rows(layers)
    experts = np.broadcast_to(np.arange(ask.load.shape[1]), part.load.shape)
    if ask.load.shape[1] <= fill_limit(ask.sites):
        placed, piece, fits = window_fill(part.load, experts, ask.sites)
        name = "flat: window fill"
    else:
        placed, piece, fits = cluster_fill(part.load, ask.sites)
        name = "flat: clusters"
    if not fits.any():
        return
    part, layers = part.rows(np.flatnonzero(fits)), layers[fits]
    filled = _from_pieces(placed[fits], piece[fits], part, name)
    mine = gpu_time(best.experts[layers], best.shares[layers], part.load, ask.sites, ask.cost).max(1)
    theirs = gpu_time(filled.experts, filled.shares, part.load, ask.sites, ask.cost).max(1)
    for index in np.flatnonzero(theirs < mine):
        layer = layers[index]
        best.experts[layer], best.shares[layer] = filled.experts[index], filled.shares[index]
        best.method[layer] = name


def _hybrid(ask: Ask) -> Placed:
    experts, piece, exported = hybrid(ask.load, ask.sites, ask.groups, target=max(ask.target, _NODE_TARGET))
    return _from_pieces(experts, piece, ask, "hybrid: groups at home", exported)


def best_balance(ask: Ask) -> Doubles:
    """An upper bound on the balance [X] of any placement of these loads on these slots, whatever the shares.

    Counts tokens only; with a cost per expert nothing is claimed. If no GPU is busier than t, a slot carries at most
    t * the fastest speed: sum(ceil(load / that)) slots are needed.
    """
    total, speed = ask.load.sum(1), ask.sites.speed_W
    if ask.cost.per_expert > 0:
        return np.ones(len(total))
    ideal = total / speed.sum()
    fits = _slots_needed(ask, ideal) <= ask.sites.num_slots
    low, high = ideal.copy(), np.maximum(ask.load.max(1) / speed.max(), ideal)
    for _ in range(50):
        middle = (low + high) / 2
        enough = _slots_needed(ask, middle) <= ask.sites.num_slots
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    bound: Doubles = np.divide(ideal, high, out=np.ones_like(ideal), where=(high > 0) & ~fits)
    return np.minimum(bound * (1 + 1e-12), 1.0)


def _slots_needed(ask: Ask, time: Doubles) -> Doubles:
    """Slots each layer needs so that none is busy for longer than the time given."""
    carried = np.where(time > 0, time, 1.0)[:, None] * ask.sites.speed_W.max()
    needed: Doubles = np.maximum(np.ceil(ask.load / carried - 1e-9), 1.0).sum(1)
    return needed


def balance(experts: Ints, shares: Doubles, ask: Ask) -> Doubles:
    """Balance of each layer, with the cost asked for."""
    return balance_of(gpu_time(experts, shares, ask.load, ask.sites, ask.cost), ask.sites.speed_W)
