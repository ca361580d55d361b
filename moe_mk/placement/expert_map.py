"""Which rank holds which expert: one object for every placement, replicas and uneven ranks included.

Physical experts are numbered rank by rank: rank 0 owns physical 0 .. L0 - 1, rank 1 the next L1, and so on. A logical
expert may have several physical ones (replicas). Worked example, 8 experts on 4 ranks, round-robin:

    rank 0: 0 4   rank 1: 1 5   rank 2: 2 6   rank 3: 3 7
    physical_to_global = 0 4 1 5 2 6 3 7        global_to_physical = 0 2 4 6 1 3 5 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from moe_mk.errors import ConfigError
from moe_mk.placement.tables import PlacementTables, edges_of, seen_from

__all__ = ["ExpertMap", "PlacementTables"]


@dataclass(frozen=True)
class ExpertMap:
    """A placement of logical experts on the slots of ranks."""

    experts_of_rank: tuple[tuple[int, ...], ...]
    """experts_of_rank[r][l] is the logical expert in slot l of rank r."""
    num_experts: int
    """E, logical."""
    shares: tuple[float, ...] | None = None
    """What part of its expert's tokens each physical expert takes; sums to 1 per expert. None is equal parts."""
    lost: frozenset[int] = frozenset()
    """Experts that nobody holds since a rank died: their assignments go nowhere until they are repaired."""

    def __post_init__(self) -> None:
        seen = [e for experts in self.experts_of_rank for e in experts]
        foreign = sorted({e for e in seen if not 0 <= e < self.num_experts})
        absent = sorted(set(range(self.num_experts)) - set(seen) - self.lost)
        idle = [r for r, experts in enumerate(self.experts_of_rank) if not experts]
        twice = [r for r, experts in enumerate(self._serving()) if len(set(experts)) != len(experts)]
        problems = [] if foreign or self.shares is None else self._share_problems(self.shares)
        if foreign:
            problems.append(f"expert ids {foreign[:8]} lie outside [0, {self.num_experts})")
        if absent:
            problems.append(f"{len(absent)} of {self.num_experts} experts have no rank, for example {absent[:8]}")
        if idle:
            problems.append(f"ranks {idle[:8]} hold no expert; leave them out or give them replicas")
        if twice:
            problems.append(f"ranks {twice[:8]} hold the same expert twice, which balances nothing")
        if problems:
            raise ConfigError("placement cannot serve: " + "; ".join(problems))

    def _serving(self) -> list[list[int]]:
        """The experts of each rank without those that take no tokens there."""
        shares = iter(self.shares or [1.0] * self.num_physical)
        return [[e for e in experts if next(shares, 0.0) > 0] for experts in self.experts_of_rank]

    def _share_problems(self, shares: tuple[float, ...]) -> list[str]:
        if len(shares) != self.num_physical:
            return [f"{len(shares)} shares for {self.num_physical} physical experts"]
        if not all(0.0 <= share <= 1.0 + 1e-6 for share in shares):
            return [f"shares from {min(shares)} to {max(shares)} lie outside [0, 1]"]
        total = [0.0] * self.num_experts
        for expert, share in zip(self.physical_to_global(), shares, strict=True):
            total[expert] += share
        uneven = [e for e, part in enumerate(total) if e not in self.lost and abs(part - 1.0) > 1e-3]
        return [f"the shares of experts {uneven[:8]} sum to {[round(total[e], 4) for e in uneven[:8]]}, not 1"] * bool(
            uneven
        )

    @classmethod
    def linear(cls, num_experts: int, num_ranks: int) -> ExpertMap:
        """Consecutive experts together; the first ranks take one more where the numbers do not divide."""
        _need_enough(num_experts, num_ranks)
        size, extra = divmod(num_experts, num_ranks)
        ends = list(accumulate(size + (rank < extra) for rank in range(num_ranks)))
        return cls(tuple(tuple(range(end - size - (r < extra), end)) for r, end in enumerate(ends)), num_experts)

    @classmethod
    def round_robin(cls, num_experts: int, num_ranks: int) -> ExpertMap:
        """Expert e on rank e mod W."""
        _need_enough(num_experts, num_ranks)
        return cls(tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)), num_experts)

    @classmethod
    def from_physical(cls, logical_of_physical: Sequence[int], num_ranks: int, num_experts: int) -> ExpertMap:
        """Any permutation, replicas allowed: the logical expert of each physical one, equal slots a rank."""
        physical = [int(e) for e in logical_of_physical]
        _need_enough(len(physical), num_ranks)
        if len(physical) % num_ranks:
            raise ConfigError(
                f"{len(physical)} physical experts do not divide over {num_ranks} ranks; "
                f"add {-len(physical) % num_ranks} replicas or give experts_of_rank directly"
            )
        size = len(physical) // num_ranks
        return cls(tuple(tuple(physical[r * size : (r + 1) * size]) for r in range(num_ranks)), num_experts)

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.experts_of_rank)

    @property
    def num_physical(self) -> int:
        """P, replicas counted."""
        return sum(map(len, self.experts_of_rank))

    @property
    def has_replicas(self) -> bool:
        """Whether any expert lives in two slots."""
        return self.num_physical > self.num_experts

    def num_slots(self, rank: int) -> int:
        """L of one rank."""
        return len(self.experts_of_rank[rank])

    # The three routing tables by their known names.

    def global_to_physical(self) -> list[int]:
        """Table 1: the first physical expert of each logical one; -1 where it is lost."""
        return [replicas[0] if replicas else -1 for replicas in self.physical_of_logical]

    def physical_to_global(self) -> list[int]:
        """Table 2: the logical expert of each physical one."""
        return [e for experts in self.experts_of_rank for e in experts]

    def local_to_global(self, rank: int) -> list[int]:
        """Table 3: the logical expert of each slot of one rank; over all ranks this is table 2."""
        return list(self.experts_of_rank[rank])

    @property
    def is_identity(self) -> bool:
        """Whether physical and logical numbers are the same, so that no table is needed (linear placement)."""
        return self.physical_to_global() == list(range(self.num_experts))

    @cached_property
    def physical_of_logical(self) -> tuple[tuple[int, ...], ...]:
        """All replicas of each logical expert, lowest first."""
        replicas: list[list[int]] = [[] for _ in range(self.num_experts)]
        for physical, logical in enumerate(self.physical_to_global()):
            replicas[logical].append(physical)
        return tuple(map(tuple, replicas))

    @cached_property
    def rank_of_physical(self) -> tuple[int, ...]:
        """The rank of each physical expert."""
        return tuple(rank for rank, experts in enumerate(self.experts_of_rank) for _ in experts)

    def shares_of(self, expert: int) -> list[float]:
        """What part of an expert's tokens each of its replicas takes, in the order of `physical_of_logical`."""
        replicas = self.physical_of_logical[expert]
        return [1.0 / len(replicas) if self.shares is None else self.shares[p] for p in replicas]

    def without_rank(self, rank: int) -> ExpertMap:
        """The map of the ranks that are left, renumbered; shares of surviving replicas grow to make up for the lost."""
        rows = [experts for r, experts in enumerate(self.experts_of_rank) if r != rank]
        kept = [p for p, r in enumerate(self.rank_of_physical) if r != rank]
        logical = self.physical_to_global()
        parts = dict.fromkeys(range(self.num_experts), 0.0)
        number = dict.fromkeys(range(self.num_experts), 0)
        old = self.shares or tuple(1.0 / len(self.physical_of_logical[e]) for e in logical)
        for p in kept:
            parts[logical[p]] += old[p]
            number[logical[p]] += 1
        # Copies that took nothing while the lost one served share its tokens evenly.
        shares = tuple(old[p] / parts[e] if parts[e := logical[p]] > 0 else 1.0 / number[e] for p in kept)
        lost = self.lost | {e for e, count in number.items() if count == 0}
        return ExpertMap(tuple(rows), self.num_experts, shares, frozenset(lost))

    def tables(self, device: torch.device, rank: int | None = None, per_node: int = 1) -> PlacementTables:
        """The placement as small tensors on a device, for routing without a host round trip.

        rank: choose replicas as this rank should, near ones first, for ranks with different tokens. None: as all ranks
        with the same tokens must. per_node: ranks of a node.
        """
        edges: list[int] = []
        choices: list[int] = []
        for expert, replicas in enumerate(self.physical_of_logical):
            shares = self.shares_of(expert)
            if rank is not None and len(replicas) > 1:
                where = [self.rank_of_physical[p] for p in replicas]
                shares = seen_from(rank, shares, where, self.num_ranks, per_node)
            edges += edges_of(expert, shares or [1.0])
            choices += replicas or (-1,)
        slot_of = [slot for experts in self.experts_of_rank for slot in range(len(experts))]
        return PlacementTables(
            edges_X=torch.tensor(edges, dtype=torch.int64, device=device),
            choice_X=torch.tensor(choices, dtype=torch.int32, device=device),
            rank_of_P=torch.tensor(self.rank_of_physical, dtype=torch.int32, device=device),
            slot_of_P=torch.tensor(slot_of, dtype=torch.int32, device=device),
            one_to_one=len(choices) == self.num_experts,
        )


def _need_enough(num_experts: int, num_ranks: int) -> None:
    if num_ranks < 1 or num_experts < num_ranks:
        raise ConfigError(
            f"{num_experts} experts cannot be spread over {num_ranks} ranks: a rank would hold none; "
            f"use 1 to {num_experts} ranks"
        )
