"""How much of an expert's load each of its copies takes: even, or poured like water so that GPUs finish together.

X is the number of layers, P the slots, W the GPUs (sites). A slot that holds -1 is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_mk.placement.balance.topology import Bools, Doubles, Ints, Sites

_NEVER = 1e250
_STIFFNESS = 1e-6


@dataclass(frozen=True)
class Cost:
    """Cost of a GPU: for every token, and for every expert it must read because at least one token came.

    per_token=1, per_expert=0 is compute-bound prefill; per_token=0, per_expert=1 is memory-bound decode, where a
    second copy that takes tokens means a second read of the weights (the point made by METRO, arXiv 2512.09277).
    """

    per_token: float = 1.0
    per_expert: float = 0.0


PER_TOKEN = Cost()


def copies_of(phy2log: Ints, num_experts: int) -> Ints:
    """Copies of every expert, [X, E]; empty slots do not count."""
    layers = len(phy2log)
    keyed = phy2log + np.arange(layers)[:, None] * num_experts
    counted = np.bincount(keyed[phy2log >= 0], minlength=layers * num_experts)
    return counted.reshape(layers, num_experts)


def holders(phy2log: Ints, gpu_P: Ints, num_experts: int, num_gpus: int) -> Bools:
    """Whether an expert is on a GPU, [X, E, W]; empty slots do not count."""
    holds = np.zeros((len(phy2log), num_experts + 1, num_gpus), bool)
    holds[np.arange(len(phy2log))[:, None], phy2log, gpu_P] = True  # empty slots are -1, the last row
    return holds[:, :num_experts]


def at_slots(values_XE: NDArray[np.generic], phy2log: Ints) -> Doubles:
    """The value of the expert in each slot, 0 in empty slots."""
    found = np.take_along_axis(values_XE, np.maximum(phy2log, 0), 1).astype(np.float64)
    found[phy2log < 0] = 0.0
    return found


def equal_shares(phy2log: Ints, num_experts: int) -> Doubles:
    """Every copy takes the same part."""
    count = at_slots(copies_of(phy2log, num_experts), phy2log)
    return np.divide(1.0, count, out=np.zeros_like(count), where=count > 0)


def gpu_time(phy2log: Ints, share: Doubles, load: Doubles, sites: Sites, cost: Cost = PER_TOKEN) -> Doubles:
    """Time of every GPU [X, W] in units of load on a GPU of speed 1."""
    tokens = at_slots(load, phy2log) * share
    paid = cost.per_token * tokens + (cost.per_expert * (tokens > 0) if cost.per_expert else 0.0)
    return by_gpu(paid, sites) / sites.speed_W


def by_gpu(slot_values: Doubles, sites: Sites) -> Doubles:
    """Sums over the slots of every GPU."""
    first = np.cumsum(sites.slots_W) - sites.slots_W
    sums: Doubles = np.add.reduceat(slot_values, first, axis=1)
    return sums


def balance_of(time_XW: Doubles, speed_W: Doubles) -> Doubles:
    """Least possible largest time / largest time, per layer; 1 is perfect, and so is a layer without load."""
    ideal = (time_XW * speed_W).sum(1) / speed_W.sum()
    worst = time_XW.max(1)
    result: Doubles = np.divide(ideal, worst, out=np.ones_like(worst), where=worst > 0)
    return result


_SWEEPS, _TOLERANCE = 60, 1e-6
"""The most sweeps of `poured_shares`, and the part of the largest time that is not worth another one."""


def poured_shares(phy2log: Ints, load: Doubles, sites: Sites, *, start: Doubles | None = None) -> Doubles:
    """Shares that make the largest GPU time least for this placement; no weight moves.

    One replicated expert after the other pours its load over its GPUs, lowest first, until nothing changes: block
    descent on the sum of squared GPU times, whose end also has the least largest time.
    start: shares to start from, for instance those of the last window. A second copy on one GPU gets share 0.
    """
    num_experts = load.shape[1]
    share = equal_shares(phy2log, num_experts) if start is None else normalised(phy2log, start, num_experts)
    copies = _CopyTable.build(phy2log, share, load, sites)
    if copies is None:
        return share
    copies.pour()
    first = _first_on_gpu(phy2log, sites)
    return normalised(phy2log, np.where(first, copies.shares(share), 0.0), num_experts)


def normalised(phy2log: Ints, share: Doubles, num_experts: int) -> Doubles:
    """Shares scaled to sum to 1 per expert; an expert whose copies all have 0 gets equal ones."""
    layers = len(phy2log)
    keyed = np.maximum(phy2log, 0) + np.arange(layers)[:, None] * num_experts
    share = np.where(phy2log >= 0, share, 0.0)
    total = np.bincount(keyed.ravel(), share.ravel(), minlength=layers * num_experts)[keyed]
    scaled = np.divide(share, total, out=np.zeros_like(share), where=total > 0)
    lost = (total <= 0) & (phy2log >= 0)
    return np.where(lost, equal_shares(phy2log, num_experts), scaled) if lost.any() else scaled


@dataclass
class _CopyTable:
    """Replicated experts of all layers, heavy first: table[k] is the k-th of each layer, [X, copies].

    Missing copies point to a dummy GPU that is too loaded for water ever to run there.
    """

    slot: list[Ints]
    gpu: list[Ints]
    held: list[Doubles]
    load: list[Doubles]
    time: Doubles
    speed: Doubles | None
    layers: int
    num_gpus: int

    @classmethod
    def build(cls, phy2log: Ints, share: Doubles, load: Doubles, sites: Sites) -> _CopyTable | None:
        layers, num_slots = phy2log.shape
        held = at_slots(load, phy2log) * share
        first = _first_on_gpu(phy2log, sites)
        count = copies_of(np.where(first, phy2log, -1), load.shape[1])
        active = (count > 1) & (load > 0)
        num_active = int(active.sum(1).max()) if layers else 0
        if num_active == 0:
            return None
        held = _gathered(phy2log, held, first, load.shape[1])
        order = np.argsort(np.where(first, phy2log, load.shape[1]), axis=1, kind="stable")
        begin = np.cumsum(count, 1) - count
        heavy = np.argsort(np.where(active, -load, 1.0), axis=1, kind="stable")[:, :num_active]
        gpu_load = np.append(by_gpu(held, sites).ravel(), _NEVER)
        table = cls([], [], [], [], gpu_load, None, layers, sites.num_gpus)
        if np.ptp(sites.speed_W) > 0:
            table.speed = np.append(np.tile(sites.speed_W, layers), 1.0)
        row = np.arange(layers)
        for expert in heavy.T:
            live = active[row, expert]
            width = np.where(live, count[row, expert], 0)
            column = np.arange(int(width.max()))
            there = column < width[:, None]
            slot = np.take_along_axis(order, np.minimum(begin[row, expert][:, None] + column, num_slots - 1), 1)
            table.slot.append(np.where(there, slot + row[:, None] * num_slots, layers * num_slots))
            table.gpu.append(
                np.where(there, sites.site_P[slot] + row[:, None] * sites.num_gpus, layers * sites.num_gpus)
            )
            table.held.append(np.where(there, np.take_along_axis(held, slot, 1), 0.0))
            table.load.append(np.where(live, load[row, expert], 0.0))
        return table

    def pour(self) -> None:
        """Sweep over the experts, forth and back, until no layer's largest time moves by more than the tolerance."""
        before = self._largest()
        turns, quiet = list(range(len(self.slot))), 0
        for sweep in range(_SWEEPS):
            for turn in turns if sweep % 2 == 0 else reversed(turns):
                self._pour_one(turn)
            if sweep % 4 == 3:
                after = self._largest()
                quiet = quiet + 1 if (np.abs(before - after) <= _TOLERANCE * after).all() else 0
                if quiet == 2:  # once may be chance: a step can lower the squares and leave the largest where it was
                    return
                before = after
                if sweep + 4 < _SWEEPS:
                    self._level_chains()

    def _largest(self) -> Doubles:
        time = self.time[:-1] if self.speed is None else self.time[:-1] / self.speed[:-1]
        largest: Doubles = time.reshape(self.layers, self.num_gpus).max(1)
        return largest

    def _pour_one(self, turn: int) -> None:
        gpu = self.gpu[turn]
        others = self.time[gpu] - self.held[turn]
        if self.speed is None:
            filled = np.cumsum(np.sort(others, 1), 1) + self.load[turn][:, None]
            level = (filled / np.arange(1, gpu.shape[1] + 1)).min(1)[:, None]
        else:
            speed = self.speed[gpu]
            order = np.argsort(others / speed, 1)
            filled = np.cumsum(np.take_along_axis(others, order, 1), 1) + self.load[turn][:, None]
            level = (filled / np.cumsum(np.take_along_axis(speed, order, 1), 1)).min(1)[:, None] * speed
        poured = np.maximum(level - others, 0.0)
        poured[self.load[turn] == 0] = 0.0
        self.held[turn] = poured
        self.time[gpu] = others + poured

    def _level_chains(self) -> None:
        """One damped Newton step on all experts together, for chains of GPUs that share experts two by two.

        Copies move in proportion to what they hold, so none turns negative: held += -held * (tau - mean tau) / eps with
        tau the GPU times after the step, which solve (I + K / speed / eps) load' = load.
        """
        load = self.time[:-1].reshape(self.layers, self.num_gpus)
        scale = np.maximum(load.mean(1), 1e-300)
        speed = np.ones(self.num_gpus) if self.speed is None else self.speed[: self.num_gpus]
        system = self._coupling() / (_STIFFNESS * scale[:, None, None] * speed)
        system += np.eye(self.num_gpus)
        # An even load has no flow at all: without that part the answer keeps its digits near the end.
        uneven = load - (load.sum(1) / speed.sum())[:, None] * speed
        flow = np.linalg.solve(system, uneven[..., None])[..., 0]
        grain = np.ldexp(1.0, np.frexp(np.abs(flow).max(1))[1] - 32)[:, None]
        flow = np.rint(flow / grain) * grain  # the last bits of LAPACK depend on the processor, plans must not
        tau = np.append(flow / speed / (_STIFFNESS * scale[:, None]), 0.0)
        steps, reach = [], np.ones(self.layers)
        for gpu, held, whole in zip(self.gpu, self.held, self.load, strict=True):
            mean = (held * tau[gpu]).sum(1) / np.where(whole > 0, whole, 1.0)
            step = -held * (tau[gpu] - mean[:, None])
            steps.append(step)
            limit = np.divide(0.9 * held, -step, out=np.ones_like(step), where=step < 0)
            np.minimum(reach, limit.min(1), out=reach)
        for turn, step in enumerate(steps):
            step *= reach[:, None]
            self.held[turn] = self.held[turn] + step
            self.time[self.gpu[turn]] += np.where(self.gpu[turn] < self.layers * self.num_gpus, step, 0.0)

    def _coupling(self) -> Doubles:
        """Sum over experts of diag(held) - held held^T / load, [X, W, W]: how load can flow between GPUs."""
        wide = self.num_gpus
        flat = np.zeros(self.layers * wide * wide + 1)
        for gpu, held, whole in zip(self.gpu, self.held, self.load, strict=True):
            there = (gpu[:, :, None] < self.layers * wide) & (gpu[:, None, :] < self.layers * wide)
            index = np.where(there, gpu[:, :, None] * wide + gpu[:, None, :] % wide, self.layers * wide * wide)
            outer = -held[:, :, None] * held[:, None, :] / np.where(whole > 0, whole, 1.0)[:, None, None]
            diagonal = np.arange(held.shape[1])
            outer[:, diagonal, diagonal] += held
            flat[index] += outer  # no GPU twice within one expert, so plain indexing adds every entry
        return flat[:-1].reshape(self.layers, wide, wide)

    def shares(self, share: Doubles) -> Doubles:
        """The shares this split means, written over the given ones for replicated experts."""
        flat = np.append(share.ravel(), 0.0)
        for slot, held, load in zip(self.slot, self.held, self.load, strict=True):
            flat[slot] = held / np.where(load > 0, load, 1.0)[:, None]
        result: Doubles = flat[:-1].reshape(share.shape)
        return result


def _first_on_gpu(phy2log: Ints, sites: Sites) -> Bools:
    """Slots that hold the first copy of their expert on their GPU."""
    padded = np.concatenate([phy2log, np.full((len(phy2log), 1), -1)], 1)
    grid = padded[:, sites.cell_WS]
    first = grid >= 0
    for later in range(1, grid.shape[2]):
        first[:, :, later] &= (grid[:, :, :later] != grid[:, :, later : later + 1]).all(2)
    flags: Bools = first[:, sites.cell_WS < sites.num_slots]
    return flags


def _gathered(phy2log: Ints, held: Doubles, first: Bools, num_experts: int) -> Doubles:
    """Load of second copies on a GPU handed to a first copy of the same expert, so that the sum stays."""
    if first[phy2log >= 0].all():
        return held
    kept = np.where(first, held, 0.0)
    layers = len(phy2log)
    keyed = np.maximum(phy2log, 0) + np.arange(layers)[:, None] * num_experts
    whole, part = (np.bincount(keyed.ravel(), each.ravel(), minlength=layers * num_experts) for each in (held, kept))
    per_copy = np.bincount(keyed[first], minlength=layers * num_experts)
    missing = np.divide(whole - part, per_copy, out=np.zeros_like(whole), where=per_copy > 0)
    return np.where(first, kept + missing[keyed], 0.0)
