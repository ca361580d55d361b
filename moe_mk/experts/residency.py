"""Which experts of a model stay in memory where memory has fewer slots than its layers have experts.

A policy names the resident expert that makes room for one that must be read, and a pool divides its memory among the
layers by what their policies have counted. `moe-mk fit` runs the same classes over a recorded routing as layers run in
their calls.

    name      keeps
    lru       the experts that were used last
    lfu       the experts that were used most often
    decayed   as lfu, but a use counts half after HALF_LIFE further calls
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import TIMEOUT_MAX, Lock
from weakref import WeakValueDictionary

from moe_mk.comm.failure import Exclusive
from moe_mk.config.moe import KernelConfig
from moe_mk.errors import ConfigError, StoreError, expect_kind
from moe_mk.registry import Registry
from moe_mk.text import amount
from moe_mk.trace.clock import now

POLL_S = 0.0005
AGAIN = "; make the call again, and none in the handler of a signal"
READERS = 4
"""Threads that read: as many requests as keep a disk busy."""


@dataclass(frozen=True)
class ResidencyCounts:
    """The slots of one layer on one rank, and what its calls have read since it was loaded."""

    slots: int
    """Its share of the pool, which changes with what the layers use."""
    experts: int
    record_bytes: int
    uses: int
    """Distinct experts of all calls."""
    hits: int
    """Of these, the experts that were resident."""
    reads: int
    """Records read from the store."""

    @property
    def hit_rate(self) -> float:
        """Part of the uses that found their expert resident."""
        return self.hits / max(self.uses, 1)

    @property
    def read_bytes(self) -> int:
        return self.reads * self.record_bytes


class Policy(ABC):
    """Chooses the resident expert that makes room. One object serves one layer, one call at a time."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    @abstractmethod
    def used(self, experts: Sequence[int]) -> None:
        """Counts the distinct experts of one call, ascending, before any of them is read."""

    @abstractmethod
    def worth(self, expert: int) -> float:
        """How often a call is expected to use an expert, as of the last call; 0: never, also of resident ones."""

    def victim(self, resident: Collection[int]) -> int:
        """One of the resident experts that may make room: not empty, in any order, none that the call still needs."""
        return min(resident, key=lambda expert: (self.worth(expert), expert))


POLICIES: Registry[type[Policy]] = Registry("residency policy", Policy, "moe_mk.residency_policies")


@POLICIES.register("lru")
class LeastRecentlyUsed(Policy):
    """Evicts the least recently used expert."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self._last, self._calls = [0] * num_experts, 0

    def used(self, experts: Sequence[int]) -> None:
        """Stamps them with the number of the call."""
        self._calls += 1
        for expert in experts:
            self._last[expert] = self._calls

    def worth(self, expert: int) -> float:
        """One use in the calls since the last one."""
        return 1 / (1 + self._calls - self._last[expert]) if self._last[expert] else 0.0


@POLICIES.register("lfu")
class LeastFrequentlyUsed(Policy):
    """Evicts the expert with the fewest uses; never forgets one."""

    growth = 1.0
    """Weight of a use, as a multiple of that of a use one call earlier."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self._score, self._weight, self._total = [0.0] * num_experts, 1.0, 0.0

    def used(self, experts: Sequence[int]) -> None:
        """Adds the weight of this call to their scores."""
        self._weight *= self.growth
        self._total += self._weight
        for expert in experts:
            self._score[expert] += self._weight
        if self._weight > 1e100:
            scores = [score / self._weight for score in self._score]
            self._score, self._weight, self._total = (
                scores,
                1.0,
                self._total / self._weight,
            )  # an interrupt: all or none

    def worth(self, expert: int) -> float:
        """Its part of the weight of all calls."""
        return self._score[expert] / self._total if self._score[expert] else 0.0


HALF_LIFE = 128
"""Calls after which a use counts half."""


@POLICIES.register("decayed")
class DecayedFrequency(LeastFrequentlyUsed):
    """Evicts the expert with the lowest count of uses, where older uses count less."""

    growth = 2.0 ** (1 / HALF_LIFE)


DIVIDED_EVERY = 32
"""Calls of each layer after which a pool is divided anew."""


class PoolMember:
    """The slots of one layer on one rank, and the experts in them.

    An interrupted call needs no repair: a slot is free unless an expert is entered or a read is under way in it. Which
    experts are in slots is changed by a call of the layer and, between its calls, by holders of the lock of the pool.
    """

    def __init__(
        self, pool: ResidencyPool, record_bytes: int, policy: Policy, *, limit_s: float = KernelConfig().timeout_s
    ) -> None:
        """limit_s: of every wait for another call. Raises ConfigError for a pool of less than one expert of each layer,
        StoreError where calls of other layers leave no slot in time.
        """
        self.pool, self.record_bytes, self.policy = pool, record_bytes, policy
        self.limit_s = min(limit_s, TIMEOUT_MAX)
        self.share = self.calls = 0
        """Slots that the layer may have, and its calls since the pool was divided."""
        self.slots, self.slot_of = set[int](), dict[int, int]()
        """Slots that it has, and those of resident experts."""
        self._lock, self._process = Lock(), os.getpid()
        pool.join(self)

    def new_memory(self) -> set[int]:
        """For the slots of all layers with records of this size: those that take memory. Adding one allocates it."""
        return set()

    def being_read(self) -> list[int]:
        """Slots that a thread writes to, or will, also after the call that has asked for it."""
        return []

    @property
    def free(self) -> list[int]:
        """Its slots without an expert that no read is under way to, ascending."""
        reading = self.being_read()
        if len(self.slots) == len(self.slot_of) + len(reading):
            return []
        return sorted(self.slots.difference(self.slot_of.values(), reading))

    def exclusive(self) -> Exclusive:
        """A context of one call. Raises StoreError where another call is inside for too long."""
        text = f"a call waited {self.limit_s:g} s [kernel.timeout_s] for another call of its layer to end"
        return Exclusive(self._own_lock(), partial(StoreError, text + AGAIN), self.limit_s)

    def _own_lock(self) -> Lock:
        if self._process != os.getpid():
            self._lock, self._process = Lock(), os.getpid()
            self.forked()
        return self._lock

    def forked(self) -> None:
        """In a forked child, which has neither the reading threads nor a call of another thread."""

    @property
    def in_call(self) -> bool:
        return self._own_lock().locked()

    def settle(self) -> None:
        """Give up the reads of a call that did not end, whose slots are free as soon as no thread writes to them."""

    def return_slot(self) -> bool:
        """Leave one slot: a free one, or that of the expert that makes room; False where all are written to.

        Called with the lock of the pool, outside of the calls of this layer.
        """
        self.settle()
        free = self.free
        if not free and not self.slot_of:
            return False
        self.slots.discard(free[-1] if free else self.slot_of.pop(self.policy.victim(self.slot_of)))
        return True


class ResidencyPool:
    """Memory for the experts of all layers that are built with it, divided by what they use.

    The share of a layer is the number of its experts among those that the policies of all layers expect to be used
    most, at least one. Before it reads, a call with missing experts takes slots up to its share from layers that have
    more than theirs and are in no call. Layers may be called by several threads.
    """

    def __init__(self, num_bytes: int) -> None:
        """num_bytes: for all layers of this process. Raises ConfigError for what is no number of at least 1."""
        expect_kind("num_bytes", num_bytes, int)
        if num_bytes < 1:
            raise ConfigError(f"num_bytes is {num_bytes}; give at least the bytes of one expert of each layer")
        self.num_bytes, self._calls, self._lock, self._process = num_bytes, 0, Lock(), os.getpid()
        self._num_divided = 0
        self._members: WeakValueDictionary[int, PoolMember] = WeakValueDictionary()
        self.memory: dict[int, set[int]] = {}
        """By size of the records: the slots that take memory."""

    def __reduce__(self) -> tuple[type[ResidencyPool], tuple[int]]:
        return type(self), (self.num_bytes,)  # the layers of the copy join it

    def expect_room(self, record_bytes: int) -> None:
        """Raise ConfigError unless one expert of each layer fits, with those of another layer."""
        sizes = Counter([record_bytes, *(member.record_bytes for member in self._members.values())])
        if self.num_bytes < (least := sum(size * count for size, count in sizes.items())):
            each = ", ".join(f"{count} x {amount(size)}" for size, count in sizes.items())
            text = f"{self.num_bytes} bytes for experts are less than one expert of each layer ({each})"
            raise ConfigError(f"{text}; give at least {least}")

    def join(self, member: PoolMember) -> None:
        """Give a layer its share, and its first slot, for which it waits. Raises ConfigError, and StoreError."""
        with self.guard(member):
            self.expect_room(member.record_bytes)
            if member.record_bytes not in self.memory:
                self.memory[member.record_bytes] = member.new_memory()
            self._members[max(self._members, default=0) + 1] = member
            self._divide()
        until = now() + member.limit_s
        while not self.grow(member):
            if now() > until:
                text = f"calls of other layers of the pool left no slot within {member.limit_s:g} s [kernel.timeout_s]"
                raise StoreError(f"{text}; load the layer again when they have ended")
            time.sleep(POLL_S)

    def called(self, member: PoolMember) -> None:
        """Count a call, after its policy has; every `DIVIDED_EVERY` calls, and when a layer is gone, divide anew."""
        with self.guard(member):
            member.calls, self._calls = member.calls + 1, self._calls + 1
            if self._calls % (DIVIDED_EVERY * len(self._members)) == 0 or len(self._members) != self._num_divided:
                self._divide()

    def grow(self, member: PoolMember) -> bool:
        """Give a layer one more slot, up to its share; False: there is none that is in no call."""
        with self.guard(member):
            while len(member.slots) < member.share:
                if self._take(member):
                    return True
                others = [one for one in self._members.values() if len(one.slots) > one.share and not one.in_call]
                others.sort(key=lambda one: (one.share - len(one.slots)) * one.record_bytes)
                if not any(one.return_slot() for one in others):
                    return False
        return False

    def _take(self, member: PoolMember) -> bool:
        """Give a layer a slot that no layer has, or memory that none has; False: there is neither."""
        unused = {size: set(held) for size, held in self.memory.items()}
        for one in self._members.values():
            unused[one.record_bytes] -= one.slots
        size, slots = member.record_bytes, unused.pop(member.record_bytes)
        if not slots:
            left = self.num_bytes - sum(len(held) * each for each, held in self.memory.items())
            for other, spare in unused.items():
                while left < size and spare:
                    self.memory[other].remove(spare.pop())
                    left += other
            if left < size:
                return False
            slots = {next(slot for slot in count() if slot not in self.memory[size])}
            self.memory[size].add(*slots)
        member.slots.add(min(slots))
        return True

    def _divide(self) -> None:
        """Set the shares: one expert of each layer, then those with the most expected uses; of equal ones by turns."""
        members, ranked = list(self._members.values()), list[tuple[float, int, int]]()
        self._num_divided = 0  # an interrupted division is made again by the next call
        for index, one in enumerate(members):
            uses = sorted(-one.policy.worth(expert) * one.calls for expert in range(one.policy.num_experts))
            ranked += [(each, rank, index) for rank, each in enumerate(uses)]
            one.share, one.calls = 1, 0
        left = self.num_bytes - sum(one.record_bytes for one in members)
        for _, rank, index in sorted(ranked):
            if rank and members[index].record_bytes <= left:
                members[index].share, left = members[index].share + 1, left - members[index].record_bytes
        self._num_divided = len(members)

    def guard(self, member: PoolMember) -> Exclusive:
        """A context that holds the lock of shares and slots; no thread of a forked child holds it.

        A call of a layer takes it before it looks at the slots, with the lock of the layer: from then on no other
        thread changes them. Raises StoreError where it is held too long.
        """
        if self._process != os.getpid():
            self._lock, self._process = Lock(), os.getpid()
        text = f"the pool of experts was in use for {member.limit_s:g} s [kernel.timeout_s]"
        return Exclusive(self._lock, partial(StoreError, text + AGAIN), member.limit_s)
