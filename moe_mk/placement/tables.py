"""A placement as small tensors on a device, and the choice among replicas without a host round trip.

Replicas of an expert own stretches of [0, 1) as long as their shares. A hash of (token, rank, expert) falls into one:

    expert 3 in slots 4, 9, 11 with shares .5 .3 .2    edges  3.5  3.8  4.0    key 3.62 -> slot 9

All experts' edges lie in one ascending tensor of fixed shape, so that one binary search serves a whole batch. Fixed
point in int64, 24 bits after the point: the same choice on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import ConfigError

POINT = 24
"""Bits after the point of an edge; shares are resolved to 6e-8."""
MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class PlacementTables:
    """An `ExpertMap` on a device."""

    edges_X: Tensor
    """int64, ascending: where the stretch of each choice ends, expert by expert; expert e ends at e + 1."""
    choice_X: Tensor
    """int32. The physical expert of each stretch; -1 for an expert that nobody holds."""
    rank_of_P: Tensor
    """int32."""
    slot_of_P: Tensor
    """int32."""
    one_to_one: bool
    """Every expert has one choice, so nothing is to be searched."""

    def to_physical(self, ids_TK: Tensor, salt: int) -> Tensor:
        """Replace logical ids by physical ones; -1 stays. Replicas take turns by token number and `salt`.

        salt: the rank, so that token 0 of every rank does not fall on the same replica.
        """
        expert_TK = ids_TK.clamp_min(0).long()
        index_TK = expert_TK if self.one_to_one else self._search(expert_TK, salt)
        return torch.where(ids_TK >= 0, self.choice_X[index_TK].to(ids_TK.dtype), ids_TK)

    def local_slots(self, physical_ids: Tensor, rank: int) -> Tensor:
        """Slots of one rank for physical ids of any shape; -1 where the expert is not on that rank."""
        safe = physical_ids.clamp_min(0).long()
        mine = (physical_ids >= 0) & (self.rank_of_P[safe] == rank)
        return torch.where(mine, self.slot_of_P[safe], torch.full_like(physical_ids, -1))

    def overwrite(self, other: PlacementTables) -> None:
        """Take the content of tables of the same shapes in place, so that a captured graph reads them from now on."""
        mine, theirs = self._tensors(), other._tensors()
        if [t.shape for t in mine] != [t.shape for t in theirs] or self.one_to_one != other.one_to_one:
            raise ConfigError(
                f"tables of {len(self.edges_X)} choices cannot take those of {len(other.edges_X)}"
                f" (one choice an expert: {self.one_to_one} and {other.one_to_one}); capture the graph again"
            )
        for to, new in zip(mine, theirs, strict=True):
            to.copy_(new)

    def _search(self, expert_TK: Tensor, salt: int) -> Tensor:
        token_T = torch.arange(expert_TK.shape[0], dtype=torch.int64, device=expert_TK.device)
        hashed_TK = mixed(token_T[:, None] * 0x9E3779B1 + expert_TK * 0xC2B2AE3D + salt * 0x85EBCA77)
        key_TK = (expert_TK << POINT) + (hashed_TK >> (32 - POINT))
        return torch.searchsorted(self.edges_X, key_TK, right=True)

    def _tensors(self) -> list[Tensor]:
        return [self.edges_X, self.choice_X, self.rank_of_P, self.slot_of_P]


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
    last = max(index for index, share in enumerate(shares) if share > 0)
    return edges[:last] + [(expert + 1) << POINT] * (len(edges) - last)


def seen_from(rank: int, shares: Sequence[float], ranks: Sequence[int], num_ranks: int, per_node: int) -> list[float]:
    """How one rank should split its tokens of an expert, so that near replicas are used and the shares still hold.

    shares: of the replicas, over the tokens of all ranks, which are taken to bring equally many; they sum to 1.
    ranks: where each replica lies. per_node: ranks of a node.
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
