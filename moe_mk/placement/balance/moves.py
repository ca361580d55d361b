"""From one placement to the next: relabel GPUs so that little moves, choose near sources, schedule in rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_mk.placement.balance.shares import holders
from moe_mk.placement.balance.topology import Bools, Doubles, Ints, Sites, Topology


@dataclass(frozen=True)
class Moves:
    """Expert weights to copy, one entry per slot that changes; all fields have the same length.

    src, dst: GPUs; src -1 means that no living GPU has the expert: fetch it from host memory or the checkpoint.
    src == dst is a copy inside a GPU. slot: the slot that is overwritten. round: within its layer; in one round every
    GPU sends at most once and receives at most once; -1 for what needs no link. crosses: source on another node.
    """

    layer: Ints
    expert: Ints
    src: Ints
    dst: Ints
    slot: Ints
    round: Ints
    crosses: Bools

    def __len__(self) -> int:
        return len(self.layer)

    @property
    def transfers(self) -> int:
        """Weights that must arrive on a GPU that does not hold them."""
        return int((self.src != self.dst).sum())

    @property
    def rounds(self) -> int:
        """Rounds of the layer that needs most."""
        return int(self.round.max(initial=-1)) + 1


def aligned_slots(old: Ints, new: Ints, sites: Sites, *, whole_nodes: bool) -> Ints:
    """For every slot the slot of `new` whose content it should take, [X, P], so that most experts stay where they are.

    GPUs trade names only with GPUs of the same speed and slots; with whole_nodes only inside a node, and whole nodes
    with nodes of the same GPUs.
    """
    before, after = (held.astype(np.float64) for held in _held_by_both(old, new, sites))
    overlap_XWW = before.transpose(0, 2, 1) @ after  # experts that GPU a holds now and GPU b would hold
    if whole_nodes:
        gpu_XW = [_by_nodes(overlap, sites) for overlap in overlap_XWW]
    else:
        gpu_XW = [*_by_kind(overlap_XWW, _kinds(sites))]
    source = np.empty(old.shape, np.int64)
    for layer, gpus in enumerate(gpu_XW):
        for mine, theirs in enumerate(gpus):
            count = sites.slots_W[mine]
            source[layer, sites.cell_WS[mine, :count]] = sites.cell_WS[theirs, :count]
    return _stay_in_slot(old, new, source, sites)


def _kinds(sites: Sites) -> Ints:
    """A number of each GPU, equal for those of the same slots and speed, [W]."""
    kinds = np.stack([sites.slots_W.astype(np.float64), sites.speed_W], 1)
    kind_W: Ints = np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1)
    return kind_W


def _by_kind(overlap_BNN: Doubles, kind_N: Ints) -> Ints:
    """Best relabellings of N GPUs for each of B overlaps, each GPU within its kind, [B, N]."""
    answer = np.empty(overlap_BNN.shape[:2], np.int64)
    for kind in np.unique(kind_N):
        same = np.flatnonzero(kind_N == kind)
        answer[:, same] = same[assign(-overlap_BNN[:, same[:, None], same])]
    return answer


def _by_nodes(overlap: Doubles, sites: Sites) -> Ints:
    """Best relabelling of whole nodes, with the best relabelling of GPUs inside each pair of nodes."""
    members = [np.flatnonzero(sites.node_W == node) for node in np.unique(sites.node_W)]
    kind_W, alike = _kinds(sites), dict[tuple[int, ...], list[int]]()
    for node, gpus in enumerate(members):
        alike.setdefault(tuple(kind_W[gpus]), []).append(node)
    answer = np.empty(sites.num_gpus, np.int64)
    for kinds, nodes in alike.items():
        held = np.stack([members[node] for node in nodes])
        count, size = held.shape
        pairs = overlap[held[:, None, :, None], held[None, :, None, :]].reshape(-1, size, size)
        inside = _by_kind(pairs, np.array(kinds))
        worth = np.take_along_axis(pairs, inside[:, :, None], 2).sum((1, 2)).reshape(count, count)
        other = assign(-worth[None])[0]
        for one, two in enumerate(other):
            answer[held[one]] = held[two, inside[one * count + two]]
    return answer


def assign(cost_BNN: Doubles) -> Ints:
    """For each of B problems the column of every row, [B, N], so that the sum of the costs is least.

    Shortest augmenting paths (Jonker and Volgenant 1987), one step of all problems at a time.
    """
    count, size = cost_BNN.shape[:2]
    row_price, price, column_of = np.zeros((count, size)), cost_BNN.min(1), np.full((count, size), -1)
    row_of, cheapest, each = np.full((count, size), -1), cost_BNN.argmin(1), np.arange(count)
    for column in range(size):  # a row keeps the first column in which it is cheapest
        free = each[column_of[each, cheapest[:, column]] < 0]
        column_of[free, cheapest[free, column]], row_of[free, column] = column, cheapest[free, column]
    while len(live := np.flatnonzero((column_of < 0).any(1))):
        _augment(cost_BNN, row_price, price, column_of, row_of, live)
    return column_of


def _augment(cost_BNN: Doubles, row_price: Doubles, price: Doubles, column_of: Ints, row_of: Ints, live: Ints) -> None:
    """Assign the first free row of each live problem along the path of least reduced cost, and update the prices."""
    count, size = len(live), cost_BNN.shape[1]
    start = (column_of[live] < 0).argmax(1)
    distance, before = np.full((count, size), np.inf), np.empty((count, size), np.int64)
    done, row, far, end = np.zeros((count, size), bool), start.copy(), np.zeros(count), np.empty(count, np.int64)
    active = np.arange(count)
    while len(active):
        b, r = live[active], row[active]
        reach = (far[active] - row_price[b, r])[:, None] + cost_BNN[b, r] - price[b]
        nearer = (reach < distance[active]) & ~done[active]
        at, column = np.nonzero(nearer)
        distance[active[at], column], before[active[at], column] = reach[at, column], r[at]
        left = np.where(done[active], np.inf, distance[active])
        far[active] = left.min(1)
        nearest = left == far[active][:, None]
        unowned = nearest & (row_of[b] < 0)
        end[active] = column = np.where(unowned.any(1), unowned.argmax(1), nearest.argmax(1))
        owner = row_of[b, column]
        active, column, owner = active[owner >= 0], column[owner >= 0], owner[owner >= 0]
        done[active, column], row[active] = True, owner
    at, column = np.nonzero(done)
    slack = far[at] - distance[at, column]
    price[live[at], column] -= slack
    row_price[live[at], row_of[live[at], column]] += slack
    row_price[live, start] += far
    at, column = np.arange(count), end
    while len(at):  # along the path, every row takes the column that reached it
        b, r = live[at], before[at, column]
        replaced = column_of[b, r]
        column_of[b, r], row_of[b, column] = column, r
        at, column = at[r != start[at]], replaced[r != start[at]]


def _stay_in_slot(old: Ints, new: Ints, source: Ints, sites: Sites) -> Ints:
    """Reorder inside every GPU so that an expert that stays keeps its slot."""
    layers = len(old)
    width = sites.cell_WS.shape[1]
    padded_old = np.append(old, np.full((layers, 1), -2), 1)[:, sites.cell_WS].reshape(-1, width)
    incoming = np.append(source, np.full((layers, 1), -1), 1)[:, sites.cell_WS].reshape(-1, width)
    content = np.append(new, np.full((layers, 1), -3), 1)[
        np.repeat(np.arange(layers), sites.num_gpus)[:, None], incoming
    ]
    row = np.arange(len(incoming))
    used = incoming < 0
    taken = np.full_like(incoming, -1)
    for slot in range(width):
        match = (content == padded_old[:, slot : slot + 1]) & ~used
        where = match.argmax(1)
        hit = match[row, where]
        taken[hit, slot] = incoming[hit, where[hit]]
        used[row[hit], where[hit]] = True
    rest = np.argsort(used, 1, kind="stable")
    real = np.tile(sites.cell_WS < sites.num_slots, (layers, 1))
    holes = np.argsort(~(real & (taken < 0)), 1, kind="stable")
    left = (~used).sum(1)
    for turn in range(int(left.max(initial=0))):
        some = np.flatnonzero(left > turn)
        taken[some, holes[some, turn]] = incoming[some, rest[some, turn]]
    result = np.empty_like(source)
    cells = sites.cell_WS[sites.cell_WS < sites.num_slots]
    result[:, cells] = taken.reshape(layers, -1)[:, (sites.cell_WS < sites.num_slots).ravel()]
    return result


def num_arrivals(old: Ints, new: Ints, sites: Sites) -> Ints:
    """Weights of each layer [X] that must arrive on a GPU that does not hold them."""
    before, after = _held_by_both(old, new, sites)
    arrivals: Ints = (after & ~before).sum((1, 2))
    return arrivals


def _held_by_both(old: Ints, new: Ints, sites: Sites) -> tuple[Bools, Bools]:
    experts = int(max(old.max(initial=0), new.max(initial=0))) + 1
    before, after = (holders(each, sites.site_P, experts, sites.num_gpus) for each in (old, new))
    return before, after


def plan_moves(old: Ints, new: Ints, topology: Topology) -> Moves:
    """List what must be copied between two placements [X, P], nearest source first, in as few rounds as can be.

    Every GPU sends and receives one expert a round; the rounds of a layer are as many as its busiest sender or receiver
    has transfers (bipartite edge colouring), which is the least possible for these sources.
    """
    gpu_P, node_W, alive = topology.gpu_P, topology.node_W, topology.alive_W
    layer, slot = np.nonzero((old != new) & (new >= 0) & alive[gpu_P])
    expert, dst = new[layer, slot], gpu_P[slot]
    src = np.empty(len(layer), np.int64)
    turn = np.full(len(layer), -1, np.int64)
    for each in np.unique(layer):
        mine = np.flatnonzero(layer == each)
        src[mine] = _sources(old[each], expert[mine], dst[mine], topology)
        linked = mine[(src[mine] >= 0) & (src[mine] != dst[mine])]
        turn[linked] = colour_rounds(src[linked], dst[linked])
    crosses = (src >= 0) & (node_W[src] != node_W[dst])
    return Moves(layer, expert, src, dst, slot, turn, crosses)


def _sources(old: Ints, expert: Ints, dst: Ints, topology: Topology) -> Ints:
    """A source for each arrival: its own GPU, else on its node, else anywhere; among those the one that sends least."""
    gpu_P, node_W, alive = topology.gpu_P, topology.node_W, topology.alive_W
    sends = np.zeros(topology.gpus, np.int64)
    src = np.full(len(expert), -1, np.int64)
    holders = {int(e): np.unique(gpu_P[(old == e) & alive[gpu_P]]) for e in np.unique(expert)}
    by_choice = np.argsort([len(holders[int(e)]) for e in expert], kind="stable")
    for index in by_choice:  # arrivals with one source first: the others can choose around them
        gpus, target = holders[int(expert[index])], dst[index]
        if gpus.size == 0:
            continue
        if target in gpus:
            src[index] = target
            continue
        near = gpus[node_W[gpus] == node_W[target]]
        gpus = near if near.size else gpus
        src[index] = gpus[sends[gpus].argmin()]
        sends[src[index]] += 1
    return src


def colour_rounds(src: Ints, dst: Ints) -> Ints:
    """Colour the transfers so that no GPU sends twice or receives twice in a round; uses max-degree rounds (Koenig)."""
    if len(src) == 0:
        return np.zeros(0, np.int64)
    width = int(max(src.max(), dst.max())) + 1
    degree = int(max(np.bincount(src).max(), np.bincount(dst).max()))
    at: list[list[int]] = [
        [-1] * degree for _ in range(2 * width)
    ]  # edge of each node and colour; receivers after senders
    colour = np.full(len(src), -1, np.int64)
    ends = [(int(s), int(d) + width) for s, d in zip(src, dst, strict=True)]
    for edge, (sender, receiver) in enumerate(ends):
        free = next((c for c in range(degree) if at[sender][c] < 0 and at[receiver][c] < 0), -1)
        if free < 0:
            free, other = at[sender].index(-1), at[receiver].index(-1)
            _flip(receiver, free, other, at, ends, colour)
        at[sender][free] = at[receiver][free] = edge
        colour[edge] = free
    return colour


def _flip(start: int, one: int, two: int, at: list[list[int]], ends: list[tuple[int, int]], colour: Ints) -> None:
    """Swap two colours along the path that leaves `start` with colour `one`, so that `one` becomes free there."""
    path, node, seek = [], start, one
    while (edge := at[node][seek]) >= 0:
        path.append(edge)
        node = ends[edge][0] if ends[edge][1] == node else ends[edge][1]
        seek = two if seek == one else one
    for edge in path:
        for end in ends[edge]:
            at[end][colour[edge]] = -1
    for edge in path:
        colour[edge] = two if colour[edge] == one else one
        for end in ends[edge]:
            at[end][colour[edge]] = edge
