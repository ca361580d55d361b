"""One plan, whatever the policy: where every expert's copies lie, what part each takes, what must move, and why.

Compact maps from experts to slots whose shapes do not depend on the load, so that a graph can keep reading them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.placement.balance import policies as _built_in  # noqa: F401 (they register when imported)
from moe_mk.placement.balance.change import Budget, changed
from moe_mk.placement.balance.moves import Moves, plan_moves
from moe_mk.placement.balance.policy import Policy, SlotPlacement, fresh, resolve
from moe_mk.placement.balance.request import PlacementRequest, Split, balance, best_balance, split_shares
from moe_mk.placement.balance.shares import PER_TOKEN, Cost, at_slots, copies_of, holders
from moe_mk.placement.balance.topology import (
    Doubles,
    InfeasiblePlacement,
    Ints,
    Sites,
    Topology,
    check_divisions,
    tensor_of,
)

Small = NDArray[np.int16 | np.int32]


def small_type(largest: int) -> type[np.int16] | type[np.int32]:
    """The narrower integer that holds a number."""
    return np.int16 if largest <= np.iinfo(np.int16).max else np.int32


def csr_maps(phy2log: Ints, num_experts: int) -> tuple[Small, Small]:
    """Offsets [X, E + 1] and slots [X, P] of the same experts, slot by slot ascending.

    Expert e of a layer has the slots slots[offsets[e] : offsets[e + 1]]; -1 for empty ones stands at the end.
    int16 where it suffices.
    """
    layers, num_slots = phy2log.shape
    dtype = small_type(max(num_slots, num_experts + 1))
    offsets: Small = np.zeros((layers, num_experts + 1), dtype)
    np.cumsum(copies_of(phy2log, num_experts), 1, out=offsets[:, 1:])
    empty = phy2log < 0
    keys = np.where(empty, num_experts, phy2log) if empty.any() else phy2log
    slots: Small = np.argsort(keys.astype(dtype), axis=1, kind="stable").astype(dtype)
    slots[np.arange(num_slots) >= offsets[:, -1:]] = -1
    return offsets, slots


def dense_of_csr(offsets: Small, slots: Small) -> Ints:
    """The padded form: slots of every expert [X, E, most copies], -1 where there are fewer."""
    begin = offsets[:, :-1].astype(np.int64)
    count = np.diff(offsets.astype(np.int64), axis=1)
    column = np.arange(int(count.max()))
    index = np.minimum(begin[..., None] + column, slots.shape[1] - 1)
    found = np.take_along_axis(slots.astype(np.int64)[:, None], index, 2)
    dense: Ints = np.where(column < count[..., None], found, -1)
    return dense


def lost_with_gpu(phy2log: Ints, load: Doubles, gpu_P: Ints, num_gpus: int) -> Doubles:
    """Part of each layer's load that would go with a GPU, [X, W]: its experts exist nowhere else."""
    holds = holders(phy2log, gpu_P, load.shape[1], num_gpus)
    alone = holds & (holds.sum(2, keepdims=True) == 1)
    total = load.sum(1)
    part = np.einsum("xe,xew->xw", load, alone.astype(np.float64))
    lost: Doubles = np.divide(part, total[:, None], out=np.zeros_like(part), where=total[:, None] > 0)
    return lost


Load = Tensor | NDArray[np.generic]


@dataclass(frozen=True)
class PlacementPlan:
    """Where the copies of every expert lie and what part of its load each takes. X layers, E experts, P slots, W GPUs.

    phy2log [X, P]: expert of each slot; -1 on a dead GPU, and on one that came back until filling it pays.
    offsets [X, E + 1], slots [X, P]: the slots of expert e are slots[offsets[e] : offsets[e + 1]]; their shapes never
    change, so a captured graph can keep them.
    share [X, P]: part of its expert's tokens a slot takes; sums to 1 per expert.
    balance_X: ideal / largest predicted GPU time. before_X: the same for the old placement, NaN without one.
    bound_X: no placement on these slots can do better. lost_XW: load that would vanish with a GPU.
    exported_X: part of the load exported from the node of its group. method: the algorithm used for each layer.
    """

    topology: Topology
    policy: Policy
    split: Split
    phy2log: Ints
    offsets: Small
    slots: Small
    share: NDArray[np.float32]
    balance_X: Doubles
    before_X: Doubles
    bound_X: Doubles
    lost_XW: Doubles
    exported_X: Doubles
    moves: Moves
    method: tuple[str, ...]
    expert_bytes: int
    reason: str

    @property
    def log2phy(self) -> Ints:
        """Slots of every expert, [X, E, most copies], -1 where an expert has fewer."""
        return dense_of_csr(self.offsets, self.slots)

    @property
    def logcnt(self) -> Ints:
        """Copies of every expert, [X, E]."""
        offsets = self.offsets.astype(np.int64)
        return offsets[:, 1:] - offsets[:, :-1]

    @property
    def slots_per_gpu(self) -> Ints:
        """Physical experts on every GPU, [W]; none on dead ones."""
        return self.topology.slots_W * self.topology.alive_W

    @property
    def map_bytes(self) -> int:
        """Bytes of the maps a device needs: offsets, slots, and shares in half precision."""
        return int(self.offsets.nbytes + self.slots.nbytes + self.share.size * 2)


def plan(
    load: Load,
    topology: Topology,
    *,
    groups: int = 1,
    policy: Policy = "auto",
    split: Split = "weighted",
    old: PlacementPlan | Load | None = None,
    min_gain: float = 0.025,
    max_moves: int | None = None,
    move_cost: float = 5e-4,
    min_copies: int = 1,
    target: float = 0.995,
    cost: Cost = PER_TOKEN,
    expert_bytes: int = 0,
    seed: int | None = None,
) -> PlacementPlan:
    """Choose copies, GPUs and shares of every expert, moving little from an old placement.

    load: tokens per expert [layers, experts], or a window of them [steps, layers, experts], which is summed.
    groups: expert groups that routing keeps together.
    policy: "compat" is DeepSeek's; "flat" ignores nodes; "hybrid" keeps groups on a node and exports the rest; "auto"
    is hybrid where it can be, else flat; other wheels add more (`EPLB_POLICIES`). split: "weighted" shares let copies
    take unequal parts.
    old: what serves now; without it everything is placed anew. min_gain: part of a layer's ideal time that must be
    saved before weights move; one moved expert costs `move_cost` of it. max_moves: most arrivals in all layers
    together; experts that lost their last copy are counted, and return even where that is exceeded.
    min_copies: 2 keeps every expert through the loss of any one GPU.
    target: a layer that whole copies leave below this balance is cut to measure instead, which is even but drifts away
    sooner; 1.0 cuts every layer. seed: breaks ties at random, the same way each time.
    Raises InfeasiblePlacement with the next feasible number of slots, UnsupportedError with every reason.
    """
    load_XE = _checked_load(load, seed)
    sites = topology.live_sites()
    _check_feasible(load_XE.shape[1], sites, groups, min_copies, min_gain, move_cost, max_moves)
    request = PlacementRequest(load_XE, sites, groups, len(np.unique(sites.node_W)), split, cost, min_copies, target)
    chosen, way, why = resolve(policy, request)
    before = np.full(len(load_XE), np.nan)
    serving = None if old is None else _old_slots(old, load_XE, topology)
    if serving is None:
        placed = fresh(chosen, way, request)
    else:
        slots = serving[:, sites.slot_P]
        shares = old.share[:, sites.slot_P].astype(np.float64) if isinstance(old, PlacementPlan) else None
        before = balance(slots, split_shares(slots, request, shares) if shares is None else shares, request)
        placed = changed(slots, shares, chosen, way, request, Budget(min_gain, max_moves, move_cost))
    return _finished(placed, serving, request, topology, chosen, before, expert_bytes, why)


def resplit(placement: PlacementPlan | Load, load: Load, topology: Topology | None = None) -> NDArray[np.float32]:
    """Shares [X, P] for a new load: no weight moves, and the busiest GPU is as idle as these slots allow.

    topology is needed, and only allowed, where the placement is a bare phy2log map. Dead GPUs of it get share 0.
    """
    load_XE = _checked_load(load, None)
    if isinstance(placement, PlacementPlan):
        if topology is not None:
            raise ConfigError("resplit got a PlacementPlan and a topology; the plan brings its own, leave topology out")
        topology, start = placement.topology, placement.share.astype(np.float64)
    elif topology is None:
        raise ConfigError("resplit got a phy2log map without topology=; pass one, or a PlacementPlan")
    else:
        start = None
    serving = _old_slots(placement, load_XE, topology)
    sites = topology.live_sites()
    request = PlacementRequest(load_XE, sites, 1, 1, "weighted", PER_TOKEN, 1)
    share = np.zeros(serving.shape, np.float32)
    share[:, sites.slot_P] = split_shares(
        serving[:, sites.slot_P], request, None if start is None else start[:, sites.slot_P]
    )
    return share


def _checked_load(load: Load, seed: int | None) -> Doubles:
    if seed is not None and seed < 0:
        raise ConfigError(f"seed={seed} must be at least 0")
    tensor = tensor_of(load)
    if tensor.dim() not in (2, 3) or tensor.numel() == 0:
        raise ShapeError(
            f"load has shape {tuple(tensor.shape)}, expected [layers, experts] or [steps, layers, experts]"
        )
    values: Doubles = tensor.detach().cpu().double().numpy()
    values = values.sum(0) if values.ndim == 3 else values.copy()
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ShapeError(f"load has values from {values.min()} to {values.max()}, expected finite loads of at least 0")
    if seed is not None:  # small enough to order equal loads and nothing else
        values *= 1 + 1e-6 * np.random.default_rng(seed).random(values.shape)
    return values


def _check_feasible(
    experts: int, sites: Sites, groups: int, copies: int, min_gain: float, move_cost: float, max_moves: int | None
) -> None:
    check_divisions(("experts", experts, "groups", groups))
    living, slots, needed = sites.num_gpus, sites.num_slots, experts * copies
    if copies < 1 or copies > living:
        raise InfeasiblePlacement(
            f"min_copies={copies} needs as many different living GPUs, there are {living}",
            asked=copies, limit=living, next_feasible=min(max(copies, 1), living),
        )  # fmt: skip
    if slots < needed:
        per_gpu = -(-needed // living)
        raise InfeasiblePlacement(
            f"{slots} slots on {living} living GPUs cannot hold {experts} experts x {copies} copies"
            f" = {needed}; {per_gpu} slots a GPU would do",
            asked=slots, limit=needed, next_feasible=per_gpu * living,
        )  # fmt: skip
    if min_gain < 0 or move_cost < 0 or (max_moves is not None and max_moves < 0):
        raise ConfigError(f"min_gain={min_gain}, move_cost={move_cost} and max_moves={max_moves} must not be negative")


def _old_slots(old: PlacementPlan | Load, load: Doubles, topology: Topology) -> Ints:
    if isinstance(old, PlacementPlan):
        slots = old.phy2log
    else:
        slots = (old.detach().cpu().numpy() if isinstance(old, Tensor) else np.asarray(old)).astype(np.int64)
    expected = (len(load), topology.num_slots)
    if slots.shape != expected:
        raise ShapeError(
            f"the old placement has shape {slots.shape}, load and topology need [layers, slots] = {expected}"
        )
    if slots.min() < -1 or slots.max() >= load.shape[1]:
        raise ShapeError(
            f"the old placement names experts {slots.min()}..{slots.max()}, load has 0..{load.shape[1] - 1}"
        )
    return slots


def _finished(
    placed: SlotPlacement,
    serving: Ints | None,
    request: PlacementRequest,
    topology: Topology,
    policy: Policy,
    before: Doubles,
    expert_bytes: int,
    why: str,
) -> PlacementPlan:
    layers, num_experts = request.load.shape
    phy2log = np.full((layers, topology.num_slots), -1, np.int64)
    share = np.zeros((layers, topology.num_slots), np.float32)
    phy2log[:, request.sites.slot_P], share[:, request.sites.slot_P] = placed.experts, placed.shares
    offsets, slots = csr_maps(phy2log, num_experts)
    nothing = phy2log if serving is None else serving
    moves = plan_moves(nothing, phy2log, topology)
    after = balance(placed.experts, placed.shares, request)
    bound = best_balance(request)
    lost = lost_with_gpu(phy2log, request.load, topology.gpu_P, topology.gpus)
    reason = _reason(why, placed, moves, after, before, bound, request)
    return PlacementPlan(
        topology, policy, request.split, phy2log, offsets, slots, share, after, before, bound, lost, placed.exported,
        moves, tuple(placed.method), expert_bytes, reason,
    )  # fmt: skip


def _reason(
    why: str,
    placed: SlotPlacement,
    moves: Moves,
    after: Doubles,
    before: Doubles,
    bound: Doubles,
    request: PlacementRequest,
) -> str:
    """Sentences for a log: what ran, what it gives, what it costs, and what stands in the way of more."""
    methods = ", ".join(f"{name} x{count}" for name, count in Counter(placed.method).most_common())
    lines = [why, f"layers: {methods}", f"balance mean {after.mean():.4f}, worst {after.min():.4f}"]
    if not np.isnan(before).all():
        lines.append(
            f"was mean {np.nanmean(before):.4f}; {moves.transfers} experts arrive in {moves.rounds} rounds a layer"
        )
    if bound.min() < 0.999:
        lines.append(
            f"no placement on {request.sites.num_slots} slots beats mean {bound.mean():.4f}, worst {bound.min():.4f}"
        )
    wanted = request.load.shape[1] + request.sites.num_gpus - 1
    if request.sites.num_slots < wanted and after.min() < 0.999:
        per_gpu = -(-wanted // request.sites.num_gpus)
        lines.append(f"{per_gpu} slots a GPU ({per_gpu * request.sites.num_gpus} in all) would make any load even")
    return "; ".join(lines)


def slot_loads(plan: PlacementPlan, load: Load) -> Doubles:
    """Tokens every slot takes under a load, [X, P]."""
    tokens: Doubles = at_slots(_checked_load(load, None), plan.phy2log) * plan.share
    return tokens
