"""Which experts of a layer stay in memory where memory has fewer slots than the layer has experts.

A policy names the resident expert that makes room for one that must be read. `moe-mk fit` runs the same classes over a
recorded routing as a layer runs in a call.

    name      keeps
    lru       the experts that were used last
    lfu       the experts that were used most often
    decayed   as lfu, but a use counts half after HALF_LIFE further calls
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moe_mk.registry import Registry

READERS = 4
"""Threads that read: as many requests as keep a disk busy."""


@dataclass(frozen=True)
class ResidencyCounts:
    """The slots of one layer on one rank, and what its calls have read since it was loaded."""

    slots: int
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
        """Bytes read from the store."""
        return self.reads * self.record_bytes


class Policy(ABC):
    """Chooses the resident expert that makes room. One object serves one layer, one call at a time."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    @abstractmethod
    def used(self, experts: Sequence[int]) -> None:
        """Counts the distinct experts of one call, ascending, before any of them is read."""

    @abstractmethod
    def victim(self, resident: Collection[int]) -> int:
        """One of the resident experts that may make room: not empty, none that the call still needs."""


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

    def victim(self, resident: Collection[int]) -> int:
        """The oldest stamp."""
        return min(resident, key=self._last.__getitem__)


@POLICIES.register("lfu")
class LeastFrequentlyUsed(Policy):
    """Evicts the expert with the fewest uses; never forgets one."""

    growth = 1.0
    """Weight of a use, as a multiple of that of a use one call earlier."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self._score, self._weight = [0.0] * num_experts, 1.0

    def used(self, experts: Sequence[int]) -> None:
        """Adds the weight of this call to their scores."""
        self._weight *= self.growth
        for expert in experts:
            self._score[expert] += self._weight
        if self._weight > 1e100:
            self._score = [score / self._weight for score in self._score]
            self._weight = 1.0

    def victim(self, resident: Collection[int]) -> int:
        """The lowest score."""
        return min(resident, key=self._score.__getitem__)


HALF_LIFE = 128
"""Calls after which a use counts half."""


@POLICIES.register("decayed")
class DecayedFrequency(LeastFrequentlyUsed):
    """Evicts the expert with the lowest count of uses, where older uses count less."""

    growth = 2.0 ** (1 / HALF_LIFE)
