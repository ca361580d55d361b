"""Groups stay at home; only the excess of hot nodes travels, as few large pieces.

Packing whole groups to nodes with equal slots each, as the hierarchical policy does, leaves hot nodes that no packing
inside them can repair; ignoring groups sends every token to more nodes. Here a hot node lends part of one expert.
X is the number of layers, N here the nodes, P the slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from moe_mk.placement.balance.arrays import Doubles, Ints
from moe_mk.placement.balance.fill import fill_limit, window_fill
from moe_mk.placement.balance.greedy import pack
from moe_mk.placement.balance.spread import imbalance, spread
from moe_mk.placement.balance.topology import Sites

_DUST = 1e-9


@dataclass
class NodeShelf:
    """What one node holds of each expert, and how much it may hold."""

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


def hybrid_limit(sites: Sites) -> int:
    """The most experts for which every node keeps a slot to spare for a piece from elsewhere."""
    return int((sites.slots_W - 1).sum()) + len(np.unique(sites.node_W))


def hybrid(load: Doubles, sites: Sites, groups: int, *, target: float) -> tuple[Ints, Doubles, Doubles]:
    """Place every row with groups at home. Returns expert and load per slot [X, P], and the exported part of the load.

    target: a node whose whole copies stay below this balance has its experts cut evenly instead.
    """
    layers = len(load)
    home = home_nodes(load, sites, groups)
    placed = np.full((layers, sites.num_slots), -1, np.int64)
    piece = np.zeros((layers, sites.num_slots))
    exported = np.zeros(layers)
    shelves: list[list[NodeShelf]] = []
    for layer in range(layers):
        shelves.append(_shelves(load[layer], home[layer], sites))
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
    home = np.empty((layers, num_experts), np.int64)
    np.put_along_axis(home, order, np.broadcast_to(node_of_turn, order.shape), 1)
    return home


def _shelves(load: Doubles, home: Ints, sites: Sites) -> list[NodeShelf]:
    total, speed = max(float(load.sum()), 1e-300), float(sites.speed_W.sum())
    shelves = []
    for node, name in enumerate(np.unique(sites.node_W)):
        here = sites.node_W == name
        room = int((sites.slots_W[here] - 1).sum()) + 1
        shelf = NodeShelf(room, total * float(sites.speed_W[here].sum()) / speed)
        shelf.held = {int(expert): float(load[expert]) for expert in np.flatnonzero(home == node)}
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
