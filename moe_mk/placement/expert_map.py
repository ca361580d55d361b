"""Which rank holds which expert: one object for every placement, replicas and uneven ranks included.

Physical experts are numbered rank by rank: rank 0 owns physical 0 .. L0 - 1, rank 1 the next L1, and so on. A logical
expert may have several physical ones (replicas), also on one rank, where DeepSeek's EPLB may place two. Worked
example, 8 experts on 4 ranks, round-robin:

    rank 0: 0 4   rank 1: 1 5   rank 2: 2 6   rank 3: 3 7
    physical_to_global = 0 4 1 5 2 6 3 7        global_to_physical = 0 2 4 6 1 3 5 7

A placement as small tensors on a device, and the choice among replicas without a host round trip.

Replicas of an expert own stretches of [0, 1) as long as their shares. A hash of (token, rank, expert) falls into one:

    expert 3 in slots 4, 9, 11 with shares .5 .3 .2    edges  3.5  3.8  4.0    key 3.62 -> slot 9

All experts' edges lie in one ascending tensor of fixed shape, so that one binary search serves a whole batch. Fixed
point in int64, 24 bits after the point: the same choice on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from moe_mk.errors import ConfigError, expect_kind

MOST = 1 << 24
"""Experts and ranks, of a placement and of a router alike."""
POINT = 24
"""Bits after the point of an edge; shares are resolved to 6e-8."""
MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class PlacementTables:
    """An `ExpertMap` on a device."""

    edges_X: Tensor
    """int64, ascending: where the stretch of each choice ends, expert by expert; expert e ends at e + 1."""
    choice_X: Tensor
    """int32. The physical expert of each stretch; -1 for an expert without a live copy."""
    rank_of_P: Tensor
    """int32."""
    slot_of_P: Tensor
    """int32."""
    one_to_one: bool
    """Every expert has one choice, so nothing is to be searched."""
    is_identity: bool = False
    """Whether physical ids equal logical ones, so that callers need not translate. Always False on a GPU."""

    @property
    def num_experts(self) -> int:
        return self.edges_X.shape[0] if self.one_to_one else int(self.edges_X[-1] >> POINT)

    def to_physical(self, ids_TK: Tensor, salt: int) -> Tensor:
        """Replace logical ids by physical ones; -1 stays. Replicas take turns by token number and `salt`.

        salt: the rank, so that token 0 of every rank does not fall on the same replica.
        """
        expert_TK = ids_TK.clamp_min(0).long()
        index_TK = expert_TK if self.one_to_one else self._search(expert_TK, salt)
        return torch.where(ids_TK >= 0, self.choice_X[index_TK].to(ids_TK.dtype), ids_TK)

    def ranks(self, physical_ids: Tensor) -> Tensor:
        """Ranks of physical ids of any shape; -1 stays."""
        return torch.where(physical_ids >= 0, self.rank_of_P[physical_ids.clamp_min(0).long()], -1)

    def local_slots(self, physical_ids: Tensor, rank: int) -> Tensor:
        """Slots of one rank for physical ids of any shape; -1 where the expert is not on that rank."""
        safe = physical_ids.clamp_min(0).long()
        mine = (physical_ids >= 0) & (self.rank_of_P[safe] == rank)
        return torch.where(mine, self.slot_of_P[safe], torch.full_like(physical_ids, -1))

    def _search(self, expert_TK: Tensor, salt: int) -> Tensor:
        token_T = torch.arange(expert_TK.shape[0], dtype=torch.int64, device=expert_TK.device)
        hashed_TK = mixed(token_T[:, None] * 0x9E3779B1 + expert_TK * 0xC2B2AE3D + salt * 0x85EBCA77)
        key_TK = (expert_TK << POINT) + (hashed_TK >> (32 - POINT))
        return torch.searchsorted(self.edges_X, key_TK, right=True)


def mixed(x: Tensor) -> Tensor:
    """Spread the low 32 bits of int64 numbers over 32 bits, so that neighbours land far apart."""
    x = x & MASK
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & MASK
    return x ^ (x >> 16)


def edges_of(expert: int, shares: Sequence[float]) -> list[int]:
    """Where the stretches of one expert's replicas end, in fixed point; the last one ends at expert + 1."""
    total, so_far, edges = sum(shares), 0.0, []
    for share in shares:
        so_far += share
        edges.append((expert << POINT) + round(so_far / total * (1 << POINT)))
    return edges


def seen_from(rank: int, shares: Sequence[float], ranks: Sequence[int], num_ranks: int, per_node: int) -> list[float]:
    """How one rank should split its tokens of an expert, so that near replicas are used and the shares still hold.

    shares: of the replicas, over the tokens of all ranks, which are taken to bring equally many; they sum to 1.
    ranks: the rank of each replica. per_node: ranks of a node.
    Each rank first fills the replicas it holds, then those of its node, then all that are left, up to their shares.
    """
    want = [1.0 / num_ranks] * num_ranks
    left = list(shares)
    taken = [0.0] * len(shares)
    # Two passes: replicas on the rank itself, then on its node; ranks of one circle share what its replicas have left.
    for width in (1, per_node):
        for first in range(0, num_ranks, width):
            members = range(first, min(first + width, num_ranks))
            near = [x for x, r in enumerate(ranks) if r in members]
            have, need = sum(left[x] for x in near), sum(want[r] for r in members)
            flow = min(have, need)
            if flow <= 0.0:
                continue
            if rank in members:
                for x in near:
                    taken[x] += want[rank] / need * left[x] / have * flow
            for x in near:
                left[x] -= left[x] / have * flow
            for r in members:
                want[r] -= want[r] / need * flow
    rest = sum(left)
    if rest > 0.0:
        taken = [t + want[rank] * part / rest for t, part in zip(taken, left, strict=True)]
    return taken if sum(taken) > 0.0 else list(shares)


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
    """Experts without a live copy since a rank was lost: their assignments are skipped until they are repaired."""

    def __post_init__(self) -> None:
        expect_kind("experts_of_rank", self.experts_of_rank, tuple, list)
        expect_kind("num_experts", self.num_experts, int, most=MOST)
        for experts in self.experts_of_rank:
            expect_kind("experts_of_rank", experts, tuple, list)
            for expert in experts:
                expect_kind("experts_of_rank", expert, int)
        seen = [e for experts in self.experts_of_rank for e in experts]
        foreign = sorted({e for e in seen if not 0 <= e < self.num_experts})
        absent = sorted(set(range(self.num_experts)) - set(seen) - self.lost)
        idle = [r for r, experts in enumerate(self.experts_of_rank) if not experts]
        problems = [] if foreign or self.shares is None else self._share_problems(self.shares)
        if foreign:
            problems.append(f"expert ids {foreign[:8]} lie outside [0, {self.num_experts})")
        if absent:
            problems.append(f"{len(absent)} of {self.num_experts} experts have no rank, for example {absent[:8]}")
        if idle:
            problems.append(f"ranks {idle[:8]} hold no expert; leave them out or give them replicas")
        if problems:
            raise ConfigError("placement cannot serve: " + "; ".join(problems))

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
        expect_kind("logical_of_physical", logical_of_physical, Sequence)
        for expert in logical_of_physical:
            expect_kind("logical_of_physical", expert, int)
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
        return len(self.experts_of_rank)

    @property
    def num_physical(self) -> int:
        """Return P, the number of physical experts, replicas counted."""
        return sum(map(len, self.experts_of_rank))

    @property
    def has_replicas(self) -> bool:
        """Whether any expert has two slots, also where others are lost."""
        return self.num_physical > len({expert for rank in self.experts_of_rank for expert in rank})

    def num_slots(self, rank: int) -> int:
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
        """Return the part of an expert's tokens of each of its replicas, in the order of `physical_of_logical`."""
        replicas = self.physical_of_logical[expert]
        return [1.0 / len(replicas) if self.shares is None else self.shares[p] for p in replicas]

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
            is_identity=device.type == "cpu" and choices == list(range(self.num_experts)),
        )


def _need_enough(num_experts: int, num_ranks: int) -> None:
    expect_kind("num_experts", num_experts, int, most=MOST)
    expect_kind("num_ranks", num_ranks, int, most=MOST)
    if num_ranks < 1 or num_experts < num_ranks:
        raise ConfigError(
            f"{num_experts} experts cannot be spread over {num_ranks} ranks: a rank would hold none; "
            f"use 1 to {num_experts} ranks"
        )
