"""The built-in placement policies: compat (DeepSeek's), flat, hybrid, and auto, which selects hybrid or flat.

flat ignores nodes; the best of its candidates is kept for every layer. With fewer spare slots than GPUs (decode: two
slots a GPU), GPUs are split into clusters that fill evenly: with q = W - (P - E) > 1 the graph "GPUs joined by shared
experts" has at least q parts. A part of k GPUs with S slots each holds k * (S - 1) + 1 experts, and inside a part the
window fill is exact: only the totals of the parts can differ.

hybrid keeps the experts of a group on one node, so that tokens are sent to few nodes, and exports only the excess load
of hot nodes, in few large pieces. Packing whole groups to nodes with equal slots each, as compat does, leaves hot nodes
that no packing inside them can repair; ignoring groups sends every token to more nodes.

X is the number of layers, N the nodes, P the slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from moe_mk.placement.balance.compat import rebalance_experts
from moe_mk.placement.balance.greedy import pack, replicate
from moe_mk.placement.balance.policy import EPLB_POLICIES, EplbPolicy, SlotPlacement
from moe_mk.placement.balance.request import PlacementRequest, split_shares
from moe_mk.placement.balance.shares import at_slots, balance_of, equal_shares, gpu_time, holders
from moe_mk.placement.balance.spread import (
    fill_empty,
    fill_limit,
    imbalance,
    num_twins,
    spread,
    swap_refined,
    window_fill,
)  # fmt: skip
from moe_mk.placement.balance.topology import Bools, Doubles, InfeasiblePlacement, Ints, Sites

_DUST = 1e-9


@dataclass
class NodeShelf:
    """Pieces of experts on one node, and its capacity."""

    room: int  # distinct pieces that can still be filled evenly
    capacity: float  # load at which all nodes finish together
    held: dict[int, float] = field(default_factory=dict)
    load: float = 0.0

    def put(self, expert: int, amount: float) -> None:
        self.held[expert] = self.held.get(expert, 0.0) + amount
        self.load += amount

    def take(self, expert: int, amount: float) -> None:
        left = self.held[expert] - amount
        self.load -= amount
        if left <= _DUST * self.capacity:
            del self.held[expert]
        else:
            self.held[expert] = left


def hybrid(load: Doubles, sites: Sites, groups: int, *, target: float) -> tuple[Ints, Doubles, Doubles]:
    """Place every row with groups kept on a node. Returns expert and load per slot [X, P], and the exported load part.

    target: a node whose whole copies stay below this balance has its experts cut evenly instead.
    """
    layers = len(load)
    node_of_expert = home_nodes(load, sites, groups)
    placed = np.full((layers, sites.num_slots), -1, np.int64)
    piece = np.zeros((layers, sites.num_slots))
    exported = np.zeros(layers)
    shelves: list[list[NodeShelf]] = []
    for layer in range(layers):
        shelves.append(_shelves(load[layer], node_of_expert[layer], sites))
        exported[layer] = export_excess(shelves[-1]) / max(float(load[layer].sum()), 1e-300)
    for nodes, part in _alike(sites):
        rows = [shelves[layer][node] for layer in range(layers) for node in nodes]
        ids, amounts = _inside(rows, part, target)
        for turn, node in enumerate(nodes):
            slots = np.flatnonzero(sites.node_W[sites.site_P] == np.unique(sites.node_W)[node])
            placed[:, slots], piece[:, slots] = ids[turn :: len(nodes)], amounts[turn :: len(nodes)]
    return placed, piece, exported


def home_nodes(load: Doubles, sites: Sites, groups: int) -> Ints:
    """Home of every expert [X, E], counted over living nodes.

    Equal nodes that divide the groups get equally many whole groups each, heavy ones first; otherwise nodes take
    consecutive runs of experts in proportion to their slots, so that a group spans as few nodes as it can.
    """
    layers, num_experts = load.shape
    size = num_experts // groups
    group_load = load.reshape(layers, groups, size).sum(2)
    _, node_of = np.unique(sites.node_W, return_inverse=True)
    slots_N = np.bincount(node_of, sites.slots_W)
    speed_N = np.bincount(node_of, sites.speed_W)
    if groups % len(slots_N) == 0 and np.ptp(slots_N) == 0 and np.ptp(speed_N) == 0:
        node, _ = pack(group_load, len(slots_N))
        return np.repeat(node, size, axis=1)
    bounds = np.round(np.cumsum(slots_N) / slots_N.sum() * num_experts).astype(np.int64)
    node_of_turn = np.searchsorted(bounds, np.arange(num_experts), side="right")
    inside = np.argsort(-load.reshape(layers, groups, size), axis=2, kind="stable")
    turn = np.argsort(-group_load, axis=1, kind="stable")
    order = np.take_along_axis(inside + np.arange(groups)[:, None] * size, turn[..., None], 1).reshape(
        layers, num_experts
    )
    node_of_expert = np.empty((layers, num_experts), np.int64)
    np.put_along_axis(node_of_expert, order, np.broadcast_to(node_of_turn, order.shape), 1)
    return node_of_expert


def _shelves(load: Doubles, node_of_expert: Ints, sites: Sites) -> list[NodeShelf]:
    total, speed = max(float(load.sum()), 1e-300), float(sites.speed_W.sum())
    shelves = []
    for node, name in enumerate(np.unique(sites.node_W)):
        here = sites.node_W == name
        room = int((sites.slots_W[here] - 1).sum()) + 1
        shelf = NodeShelf(room, total * float(sites.speed_W[here].sum()) / speed)
        shelf.held = {int(expert): float(load[expert]) for expert in np.flatnonzero(node_of_expert == node)}
        shelf.load = sum(shelf.held.values())
        shelves.append(shelf)
    return shelves


def export_excess(shelves: list[NodeShelf]) -> float:
    """Move load from nodes above their capacity to nodes below, cutting few experts; returns what moved."""
    exported = 0.0
    for _ in range(16 * len(shelves)):
        hot = max(shelves, key=lambda shelf: shelf.load / shelf.capacity)
        cold = min(shelves, key=lambda shelf: shelf.load / shelf.capacity)
        gap = min(hot.load - hot.capacity, cold.capacity - cold.load)
        if gap <= _DUST * hot.capacity:
            break
        moved = _lend(hot, cold, gap)
        if moved <= 0:
            break
        exported += moved
    return exported


def _lend(hot: NodeShelf, cold: NodeShelf, gap: float) -> float:
    """One export: more of a shared expert, or a piece of the smallest expert that covers the gap, or a trade."""
    shared = max(((amount, expert) for expert, amount in hot.held.items() if expert in cold.held), default=None)
    if shared is not None and shared[0] >= gap:
        hot.take(shared[1], gap)
        cold.put(shared[1], gap)
        return gap
    back, returned = 0.0, -1
    if len(cold.held) >= cold.room:  # no slot left: the coldest expert of that node goes the other way
        back, returned = min(((amount, e) for e, amount in cold.held.items() if e not in hot.held), default=(0.0, -1))
        if returned < 0:
            return 0.0
    lent = sorted((amount, expert) for expert, amount in hot.held.items() if expert not in cold.held)
    large = [item for item in lent if item[0] >= gap + back]
    grown = len(hot.held) + (returned >= 0)
    if large and (grown <= hot.room or large[0][0] - gap - back <= _DUST * hot.capacity):
        part, expert = gap + back, large[0][1]
    else:  # whole experts only; the largest that still fits the gap
        small = [item for item in lent if item[0] < gap + back]
        if not small:
            return 0.0
        part, expert = small[-1]
    if part - back <= _DUST * hot.capacity:
        return 0.0
    hot.take(expert, part)
    cold.put(expert, part)
    if returned >= 0:
        cold.take(returned, back)
        hot.put(returned, back)
    return part + back


def _alike(sites: Sites) -> Iterator[tuple[list[int], Sites]]:
    """Nodes with the same GPUs, to be filled in one go, and those GPUs."""
    kinds: dict[tuple[object, ...], tuple[list[int], Sites]] = {}
    for node, name in enumerate(np.unique(sites.node_W)):
        part = sites.subset(np.flatnonzero(sites.node_W == name))
        kind = (*part.slots_W.tolist(), *part.speed_W.tolist())
        kinds.setdefault(kind, ([], part))[0].append(node)
    yield from kinds.values()


def _inside(rows: list[NodeShelf], sites: Sites, target: float) -> tuple[Ints, Doubles]:
    """Place each node's pieces on its GPUs: whole copies refined by swaps; window fill where those stay uneven."""
    width = max(len(row.held) for row in rows)
    expert, amount = np.full((len(rows), width), -1, np.int64), np.zeros((len(rows), width))
    count = np.array([len(row.held) for row in rows])
    for index, row in enumerate(rows):
        expert[index, : count[index]] = list(row.held)
        amount[index, : count[index]] = list(row.held.values())
    placed, piece = np.empty((len(rows), sites.num_slots), np.int64), np.empty((len(rows), sites.num_slots))
    for pieces in np.unique(count):
        same = np.flatnonzero(count == pieces)
        local, part = spread(amount[same, :pieces], sites)
        ids = np.take_along_axis(expert[same], np.maximum(local, 0), 1)
        placed[same], piece[same] = np.where(local < 0, -1, ids), part
    uneven = np.flatnonzero((imbalance(piece, sites) > 1 / target) & (count <= fill_limit(sites)))
    if uneven.size:
        ids, part, fits = window_fill(amount[uneven], expert[uneven], sites)
        better = fits & (imbalance(part, sites) < imbalance(piece[uneven], sites))
        placed[uneven[better]], piece[uneven[better]] = ids[better], part[better]
    return placed, piece


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


def _swap_members(member: Ints, total: Doubles, gpus: Ints, load: Doubles) -> None:
    """Best swap between the cluster with most load per GPU and any other, until none helps; in place."""
    for _ in range(200):
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


_NODE_TARGET = 0.9985


@EPLB_POLICIES.register("auto")
class Auto(EplbPolicy):
    """Hybrid where groups can be kept on one node, else flat."""

    summary = "hybrid where groups can be kept on one node, else flat"

    def reasons_against(self, request: PlacementRequest) -> list[str]:
        return []

    def place(self, request: PlacementRequest) -> SlotPlacement:
        return EPLB_POLICIES[self.stands_for(request)[0]]().place(request)

    def stands_for(self, request: PlacementRequest) -> tuple[str, str]:
        """Which of the two it is here, and why."""
        if against := Hybrid().reasons_against(request):
            return "flat", "auto chose flat: " + "; ".join(against)
        return "hybrid", f"auto chose hybrid: {request.groups} groups on {request.nodes} nodes leave room for exports"


@EPLB_POLICIES.register("compat")
class Compat(EplbPolicy):
    """The placement of DeepSeek's EPLB, slot by slot."""

    summary = "DeepSeek's placement, slot by slot"

    def reasons_against(self, request: PlacementRequest) -> list[str]:
        wrong = []
        if not request.sites.is_uniform:
            wrong.append("compat knows neither unequal speeds nor unequal slots; use 'flat'")
        if request.least > 1:
            wrong.append(f"compat cannot promise {request.least} copies of every expert; use 'flat'")
        if np.ptp(per_node := np.unique(request.sites.node_W, return_counts=True)[1]):
            wrong.append(f"compat needs equally many living GPUs a node, there are {per_node.tolist()}; use 'flat'")
        return wrong

    def place(self, request: PlacementRequest) -> SlotPlacement:
        return _compat(request, request.groups, request.nodes)


@EPLB_POLICIES.register("flat")
class Flat(EplbPolicy):
    """Evenest of all: nodes and groups do not matter."""

    summary = "evenest of all; nodes and groups do not matter"
    whole_nodes = False

    def reasons_against(self, request: PlacementRequest) -> list[str]:
        return []

    def place(self, request: PlacementRequest) -> SlotPlacement:
        experts, piece = spread(request.load, request.sites, least=request.least)
        best = _from_pieces(experts, piece, request, "flat: copies packed and swapped")
        if request.least > 1:
            _check_copies(best.experts, request)
            return best
        twins = num_twins(best.experts, request.sites) > 0
        if request.sites.is_uniform and (
            request.sites.num_slots <= request.load.shape[1] + request.sites.num_gpus
            or twins.any()
            or request.split == "equal"
        ):
            best.keep_better(_flat_compat(request), request)
        time = gpu_time(best.experts, best.shares, request.load, request.sites)
        uneven = np.flatnonzero(balance_of(time, request.sites.speed_W) < request.target)
        if request.split == "weighted" and uneven.size:
            _fill_rows(best, uneven, request)
        return best


@EPLB_POLICIES.register("hybrid")
class Hybrid(EplbPolicy):
    """Keep each group on one node and export the excess load of hot experts to other nodes."""

    summary = "groups stay on their node, which lends its excess to others"
    mends_near = True

    def reasons_against(self, request: PlacementRequest) -> list[str]:
        """The reasons for which groups cannot be kept on one node."""
        experts, nodes = request.load.shape[1], request.nodes
        limit = int((request.sites.slots_W - 1).sum()) + nodes  # a slot of each node for pieces from elsewhere
        wrong = []
        if nodes < 2:
            wrong.append("there is only one node")
        if request.groups < 2:
            wrong.append(f"groups={request.groups}: nothing to keep together")
        if request.split == "equal":
            wrong.append("split='equal' cannot lend part of an expert to another node")
        if request.least > 1:
            wrong.append(f"{request.least} copies of every expert on different GPUs are planned flat")
        if experts > limit:
            missing = experts - limit
            wrong.append(
                f"{experts} experts on {request.sites.num_slots} slots leave none for exported copies; "
                f"{missing} more are needed"
            )
        return wrong

    def place(self, request: PlacementRequest) -> SlotPlacement:
        experts, piece, exported = hybrid(
            request.load, request.sites, request.groups, target=max(request.target, _NODE_TARGET)
        )
        return _from_pieces(experts, piece, request, "hybrid: groups at home", exported)


def _from_pieces(
    experts: Ints, piece: Doubles, request: PlacementRequest, method: str, exported: Doubles | None = None
) -> SlotPlacement:
    """A placement whose shares start from the load each slot was planned for."""
    filled = fill_empty(experts, request.load, request.sites)
    whole = at_slots(request.load, filled)
    start = np.divide(piece, whole, out=np.zeros_like(piece), where=whole > 0)
    shares = split_shares(filled, request, start)
    away = np.zeros(len(experts)) if exported is None else exported
    return SlotPlacement(filled, shares, [method] * len(experts), away)


def _compat(request: PlacementRequest, groups: int, nodes: int) -> SlotPlacement:
    load, sites = torch.from_numpy(request.load), request.sites
    experts = rebalance_experts(load, sites.num_slots, groups, nodes, sites.num_gpus)[0].numpy()
    return SlotPlacement.of(experts, request, "compat")


def _check_copies(experts: Ints, request: PlacementRequest) -> None:
    """Raise InfeasiblePlacement where an expert found fewer different GPUs than asked for."""
    held = holders(experts, request.sites.site_P, request.load.shape[1], request.sites.num_gpus)
    fewest = int(held.sum(2).min())
    if fewest < request.least:
        raise InfeasiblePlacement(
            f"min_copies={request.least}: with slots {sorted(set(request.sites.slots_W.tolist()))} a GPU some expert "
            f"fits on only {fewest} different GPUs; use more even slots",
            asked=request.least, limit=fewest, next_feasible=fewest,
        )  # fmt: skip


def _flat_compat(request: PlacementRequest) -> SlotPlacement:
    """The compatible policy without nodes, then swaps: never behind it."""
    plain = _compat(request, 1, 1)
    held = at_slots(request.load, plain.experts) * equal_shares(plain.experts, request.load.shape[1])
    experts, _ = swap_refined(plain.experts, held, request.sites)
    plain.keep_better(SlotPlacement.of(experts, request, "flat: compat packed and swapped"), request)
    return plain


def _fill_rows(best: SlotPlacement, layers: Ints, request: PlacementRequest) -> None:
    """Try window fill, or clusters where slots are short, on the layers whole copies leave uneven."""
    part = request.rows(layers)
    experts = np.broadcast_to(np.arange(request.load.shape[1]), part.load.shape)
    if request.load.shape[1] <= fill_limit(request.sites):
        placed, piece, fits = window_fill(part.load, experts, request.sites)
        name = "flat: window fill"
    else:
        placed, piece, fits = cluster_fill(part.load, request.sites)
        name = "flat: clusters"
    if not fits.any():
        return
    part, layers = part.rows(np.flatnonzero(fits)), layers[fits]
    best.keep_better(_from_pieces(placed[fits], piece[fits], part, name), part, layers)
