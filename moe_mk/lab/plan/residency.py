"""Simulate experts larger than memory over a recorded routing: hit rates and time of policies, prefetch and page cache.

Each layer has `slots` of its own for its experts, or a share of a `ResidencyPool`. A call of a layer computes the
experts that are resident while one disk reads the missing ones, in the order in which they arrive:

    disk      | read e7        | read e2        | prefetch for the next layer ...
    compute   | e1 e4 |          e7 |             e2 |

    name         what makes room
    belady       the expert with the furthest next use: the fewest misses that any policy can have
    page cache   pages, the least recently used of all layers; a missing one is read when touched, nothing meanwhile

A prefetch reads experts of the next layer while the disk is idle; a read that has begun is finished. The first half of
the steps fills the slots and trains the tables, the second half is counted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_mk.errors import ConfigError
from moe_mk.experts.residency import POLICIES, READERS, Policy, PoolMember, ResidencyPool
from moe_mk.lab.trace.routing import RoutingTrace, TraceError

Step = list[tuple[int, ...]]
"""The distinct experts of each layer in one step, ascending."""
PIECES = 8
"""Parts of an expert that the page cache keeps and evicts on their own."""
BLOCKS = 10
"""Parts of the counted steps of which the spread of the time is estimated."""
PREFETCHES = ("none", "frequent", "table", "gate", "known")


@dataclass(frozen=True)
class Machine:
    """Rates of reads and of products, in bytes per second."""

    expert_bytes: int
    disk: float
    memory: float
    """Rate at which resident experts are multiplied: few tokens are bound by reading weights from memory."""
    other_s: float = 0.0
    """Seconds of each layer outside its experts."""
    faults: float | None = None
    """Rate at which page faults read; None: as `disk`."""

    @property
    def read_s(self) -> float:
        """Seconds to read one expert."""
        return self.expert_bytes / self.disk

    @property
    def compute_s(self) -> float:
        """Seconds to multiply one expert."""
        return self.expert_bytes / self.memory


@dataclass
class Outcome:
    """Counts of the second half of the steps."""

    name: str
    uses: int = 0
    hits: int = 0
    reads: float = 0.0
    """Experts read, prefetched ones included; of the page cache in parts."""
    wasted: int = 0
    """Prefetched experts that were evicted unused."""
    predicted: int = 0
    right: int = 0
    """Of the predicted experts, those that were used."""
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    by_step: list[tuple[int, int, float]] = field(default_factory=list)
    """Uses, hits and reads of each step."""

    @property
    def counted(self) -> tuple[int, int, float]:
        """Uses, hits and reads so far."""
        return self.uses, self.hits, self.reads

    def end_step(self, seconds: float, before: tuple[int, int, float]) -> None:
        """Note a counted step. before: `counted` when it began."""
        self.seconds.append(seconds)
        self.by_step.append((self.uses - before[0], self.hits - before[1], self.reads - before[2]))

    @property
    def hit_rate(self) -> float:
        """Part of the uses that found their expert resident, or on its way."""
        return self.hits / max(self.uses, 1)

    @property
    def step_s(self) -> float:
        return float(np.mean(self.seconds))

    @property
    def error(self) -> float:
        """Relative standard error of the mean time, from the spread over `BLOCKS` runs of consecutive steps."""
        means = [float(np.mean(part)) for part in np.array_split(self.seconds, min(BLOCKS, len(self.seconds)))]
        return float(np.std(means, ddof=1)) / math.sqrt(len(means)) / self.step_s if len(means) > 1 else math.nan


def steps_of(trace: RoutingTrace, tokens: int) -> list[Step]:
    """The steps of a trace of whole forwards, each cut into steps of `tokens` consecutive tokens.

    Raises TraceError where a layer is missing in a step, or has other tokens than the others.
    """
    layers = trace.layers
    calls: dict[tuple[int, int], list[tuple[int, NDArray[np.int64]]]] = {}
    for each in trace.forwards():
        calls.setdefault((each.step, each.rank), []).append((each.layer, each.ids_TK.numpy().astype(np.int64)))
    steps: list[Step] = []
    for (step, rank), found in calls.items():
        found.sort(key=lambda each: each[0])  # of traces that were joined layer by layer too
        of_layers = [ids for _, ids in found]
        counts = {len(ids) for ids in of_layers}
        if [layer for layer, _ in found] != layers or len(counts) != 1:
            raise TraceError(
                f"step {step} of rank {rank} has {len(of_layers)} forwards of {sorted(counts)} tokens, expected one of "
                f"each of the {len(layers)} layers with the same tokens; filter the trace, or record whole steps"
            )
        for start in range(0, counts.pop(), tokens):
            parts = (np.unique(ids[start : start + tokens]) for ids in of_layers)
            steps.append([tuple(part[part >= 0].tolist()) for part in parts])
    if len(steps) < 2:
        raise TraceError(f"the trace has {len(steps)} steps of {tokens} tokens; at least 2 are needed")
    return steps


class Belady(Policy):
    """The clairvoyant optimum: evicts the expert with the furthest next use."""

    def __init__(self, num_experts: int, steps: Sequence[tuple[int, ...]]) -> None:
        super().__init__(num_experts)
        self._uses: list[list[int]] = [[] for _ in range(num_experts)]
        for number, experts in enumerate(steps):
            for expert in experts:
                self._uses[expert].append(number)
        self._now = -1

    def used(self, experts: Sequence[int]) -> None:
        self._now += 1

    def worth(self, expert: int) -> float:
        """One use in the calls until the next one."""
        uses = self._uses[expert]
        at = bisect_right(uses, self._now)
        return 1 / (uses[at] - self._now) if at < len(uses) else 0.0


class BeladyOfAll(Belady):
    """The optimum of a pool: of one layer with the experts and calls of all."""


@dataclass(frozen=True)
class Recorded:
    """A trace in steps, and what predicts it."""

    steps: list[Step]
    num_experts: int
    top_k: int
    early: list[Step] | None = None
    """What the gates choose from the input of the layer before, step by step."""

    @property
    def half(self) -> int:
        """The first counted step."""
        return len(self.steps) // 2

    def predictor(self, name: str) -> Callable[[int, int], Sequence[int]]:
        """Experts of a layer, likeliest first, from the step and the routing of the layer before."""
        if name == "known":
            return lambda step, layer: self.steps[step][layer]
        if name == "gate":
            early = self.early
            if early is None:
                raise ConfigError("prefetch 'gate' needs what the gates choose one layer early; give --gate-trace")
            return lambda step, layer: early[step][layer]
        table_LEE = np.zeros((len(self.steps[0]), self.num_experts, self.num_experts))
        for step in self.steps[: self.half]:
            for layer in range(1, len(step)):
                table_LEE[layer][np.ix_(step[layer - 1], step[layer])] += 1
        if name == "frequent":
            table_LEE[:] = table_LEE.sum(1, keepdims=True)

        def likeliest(step: int, layer: int) -> Sequence[int]:
            score_E = table_LEE[layer][list(self.steps[step][layer - 1])].sum(0)
            count = len(self.steps[step][layer])
            found: list[int] = np.argsort(-score_E, kind="stable")[:count].tolist()
            return found

        return likeliest


class _Slots(PoolMember):
    """The resident experts of one layer, with the time at which each has arrived."""

    def __init__(self, pool: ResidencyPool, record_bytes: int, policy: Policy) -> None:
        super().__init__(pool, record_bytes, policy)
        self.ready: dict[int, float] = {}
        self.unused: set[int] = set()
        """Prefetched experts that no call has used."""

    def enter(self, expert: int, arrival: float, needed: Collection[int], done: Collection[int] = ()) -> int:
        """Give an expert a slot from its arrival on; returns how many experts were evicted unused.

        As in a call of a layer: slots of the pool, and what the call does not need; then, of its experts, those that
        have been computed (`done`), or the first that arrives. The optimum of a pool chooses among all of them.
        """
        wasted = 0
        if not (free := self.free) and self.pool.grow(self):
            free = self.free
        if not free:
            others = [each for each in self.slot_of if each not in needed]
            if not others or isinstance(self.policy, BeladyOfAll):
                others += [each for each in self.slot_of if each in needed and each in done]
            victim = self.policy.victim(others) if others else next(iter(self.slot_of))
            free = [self.slot_of.pop(victim)]
            wasted = int(victim in self.unused)
            self.unused.discard(victim)
        self.slot_of[expert], self.ready[expert] = free[-1], arrival
        return wasted


def _members(recorded: Recorded, machine: Machine, slots: int, policy: str, pool: int | None) -> list[_Slots]:
    """The slots of each layer; of the optimum of a pool the same for all."""
    size, columns, experts = machine.expert_bytes, list(zip(*recorded.steps, strict=True)), recorded.num_experts
    if policy == "belady":
        if pool is None:
            return [_Slots(ResidencyPool(slots * size), size, Belady(experts, column)) for column in columns]
        calls = [_of_all(layer, call, experts) for step in recorded.steps for layer, call in enumerate(step)]
        return [_Slots(ResidencyPool(pool * size), size, BeladyOfAll(experts * len(columns), calls))] * len(columns)
    one = None if pool is None else ResidencyPool(pool * size)
    return [_Slots(one or ResidencyPool(slots * size), size, POLICIES[policy](experts)) for _ in columns]


def _of_all(layer: int, experts: Sequence[int], each: int) -> tuple[int, ...]:
    """The numbers of experts of a layer among those of all layers, `each` a layer."""
    return tuple(layer * each + expert for expert in experts)


def simulate(
    recorded: Recorded,
    machine: Machine,
    slots: int,
    policy: str,
    prefetch: str = "none",
    *,
    pool: int | None = None,
) -> Outcome:
    """Run a trace with `slots` resident experts a layer. policy: a registered name, or "belady".

    pool: slots of all layers together, in a `ResidencyPool`; None: each layer has its own. Raises ConfigError for
    unknown names and for less than one slot a layer.
    """
    if slots < 1:
        raise ConfigError(f"{slots} slots a layer: at least one expert must be resident; give more memory")
    if prefetch not in PREFETCHES:
        raise ConfigError(f"prefetch {prefetch!r} is unknown; use one of {', '.join(PREFETCHES)}")
    outcome = Outcome(policy + ", pool" * (pool is not None) + f", prefetch {prefetch}" * (prefetch != "none"))
    predict = None if prefetch == "none" else recorded.predictor(prefetch)
    layers, now, disk = _members(recorded, machine, slots, policy, pool), 0.0, 0.0
    for number, step in enumerate(recorded.steps):
        if number == recorded.half:
            outcome.uses, outcome.hits, outcome.reads, outcome.wasted, outcome.predicted, outcome.right = (0,) * 6
        began, before_step = now, outcome.counted
        for layer, needed in enumerate(step):
            held, start = layers[layer], now
            if isinstance(held.policy, BeladyOfAll):
                needed = _of_all(layer, needed, recorded.num_experts)
            held.policy.used(needed)
            held.pool.called(held)
            there = [expert for expert in needed if expert in held.slot_of]
            missing = [expert for expert in needed if expert not in held.slot_of]
            outcome.uses, outcome.hits = outcome.uses + len(needed), outcome.hits + len(there)
            held.unused.difference_update(there)
            arrivals, wanted, done = [max(start, held.ready[expert]) for expert in there], set(needed), set(there)
            for index, expert in enumerate(missing):
                done.update(missing[max(index - READERS, 0) : max(index - READERS + 1, 0)])
                disk = max(disk, start) + machine.read_s
                outcome.wasted += held.enter(expert, disk, wanted, done)
                arrivals.append(disk)
                outcome.reads += 1
            for arrival in sorted(arrivals):
                now = max(now, arrival) + machine.compute_s
            now += machine.other_s
            if predict is not None and layer + 1 < len(step):
                following, asked = layers[layer + 1], predict(number, layer + 1)[:slots]
                outcome.predicted += len(asked)
                outcome.right += len(set(asked) & set(step[layer + 1]))
                for expert in asked:
                    if max(disk, start) >= now:
                        break
                    if expert not in following.slot_of:
                        disk = max(disk, start) + machine.read_s
                        outcome.wasted += following.enter(expert, disk, asked)
                        following.unused.add(expert)
                        outcome.reads += 1
        if number >= recorded.half:
            outcome.end_step(now - began, before_step)
    return outcome


def simulate_page_cache(recorded: Recorded, machine: Machine, slots: int) -> Outcome:
    """Simulate a page cache of as much memory for all layers, evicted least recently used first; reads what is used."""
    outcome = Outcome("page cache")
    pages: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    room, rate = slots * len(recorded.steps[0]) * PIECES, machine.faults or machine.disk
    for number, step in enumerate(recorded.steps):
        if number == recorded.half:
            outcome.uses, outcome.hits, outcome.reads = 0, 0, 0.0
        missed, before_step = 0, outcome.counted
        for layer, needed in enumerate(step):
            for expert in needed:
                before = missed
                for piece in range(PIECES):
                    page = layer, expert, piece
                    if page in pages:
                        pages.move_to_end(page)
                        continue
                    missed += 1
                    pages[page] = None
                    if len(pages) > room:
                        pages.popitem(last=False)
                outcome.uses, outcome.hits = outcome.uses + 1, outcome.hits + (missed == before)
        outcome.reads += missed / PIECES
        if number >= recorded.half:
            computed = sum(len(needed) for needed in step) * machine.compute_s + len(step) * machine.other_s
            outcome.end_step(computed + missed / PIECES * machine.expert_bytes / rate, before_step)
    return outcome


def compare(
    recorded: Recorded, machine: Machine, slots: int, policies: Sequence[str], pool: int | None = None
) -> list[Outcome]:
    """The page cache, every policy and the optimum, with a pool as well if given, and prefetches with the first one."""
    outcomes = [simulate_page_cache(recorded, machine, slots)]
    for name in (*policies, "belady"):
        outcomes += [simulate(recorded, machine, slots, name, pool=each) for each in dict.fromkeys((None, pool))]
    for prefetch in PREFETCHES[1:]:
        if prefetch != "gate" or recorded.early is not None:
            outcomes.append(simulate(recorded, machine, slots, policies[0], prefetch))
    return outcomes
