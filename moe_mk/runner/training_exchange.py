"""Gradients through dispatch and combine: an exchange that autograd runs backwards, for layers that are being trained.

    forward     dispatch   rows and their weights go to the ranks of their experts
                combine    sums are returned
    backward    combine    gradients of sums are sent
                dispatch   gradients of rows and weights are returned

Four all-to-alls a step and layer; ids go ahead of the rows and have no gradient. Plain torch on plain tensors: what the
experts are, and their gradients, is the caller's. Layers that serve hold quantised weights and have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import ConfigError
from moe_mk.flight import wait
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.shapes import expect

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Expert = Callable[[int, Tensor], Tensor]
"""The expert in a slot of this rank, of rows (N, H): (N, H)."""


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose gradient is the all-to-all in the opposite direction."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, comm: Communicator, send: Sequence[int], receive: Sequence[int], phase: str
    ) -> Tensor:
        ctx.comm, ctx.send, ctx.receive, ctx.phase = comm, send, receive, phase
        return wait(comm.all_to_all(rows.contiguous(), send, receive, phase))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        phase = f"{ctx.phase} backward"
        return wait(ctx.comm.all_to_all(grads[0].contiguous(), ctx.receive, ctx.send, phase)), None, None, None, None


@dataclass(frozen=True)
class TrainingExchange:
    """One layer's exchange on one rank. Every rank calls it, and backward, equally often, with zero tokens too.

    comm must wait inside a call: a process group, or ranks as threads; ranks in lockstep cannot go backwards.
    """

    comm: Communicator
    expert_map: ExpertMap

    def __post_init__(self) -> None:
        if self.expert_map.has_replicas or self.expert_map.num_ranks != self.comm.size:
            raise ConfigError(
                f"experts are trained in one place each, on all {self.comm.size} ranks of the group; this placement "
                f"has {self.expert_map.num_physical} of {self.expert_map.num_experts} on {self.expert_map.num_ranks}"
            )

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert: Expert) -> Tensor:
        """Sum of weight times expert over the choices of each token: (T, H), differentiable in x, weights and experts.

        ids_TK: logical experts, -1 goes nowhere. Rows travel in the wider dtype of x and weights.
        Raises ShapeError for tensors that do not fit each other, CommError for peers that are dead or late.
        """
        expect("x", x_TH, "T H", FLOATS)
        expect("ids", ids_TK, "T K", (torch.int32, torch.int64), x_TH.device, T=x_TH.shape[0])
        expect("weights", weights_TK, "T K", FLOATS, x_TH.device, T=x_TH.shape[0], K=ids_TK.shape[1])
        rank_TK, slot_TK = self._ranks_and_slots(ids_TK)
        ranks_W = torch.arange(self.comm.size, dtype=torch.int64, device=x_TH.device)
        peer_X, token_X = torch.nonzero((rank_TK[None] == ranks_W[:, None, None]).any(2), as_tuple=True)
        sent = torch.bincount(peer_X, minlength=self.comm.size).tolist()
        received = wait(self.comm.exchange_counts(sent, "dispatch counts"))
        slots_XK = torch.where(rank_TK[token_X] == peer_X[:, None], slot_TK[token_X], -1)
        slots_RK = wait(self.comm.all_to_all(slots_XK, sent, received, "dispatch ids"))
        wide = torch.promote_types(x_TH.dtype, weights_TK.dtype)
        rows_XB = torch.cat((x_TH[token_X].to(wide), weights_TK[token_X].to(wide)), dim=1)
        arrived_RB = _all_to_all(rows_XB, self.comm, sent, received, "dispatch")
        hidden, num_slots = x_TH.shape[1], self.expert_map.num_slots(self.comm.rank)
        y_RH = _at_experts(arrived_RB[:, :hidden], slots_RK, arrived_RB[:, hidden:], expert, num_slots)
        summed_XH = _all_to_all(y_RH, self.comm, received, sent, "combine")
        return torch.zeros_like(x_TH, dtype=wide).index_add(0, token_X, summed_XH).to(x_TH.dtype)

    def _ranks_and_slots(self, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Rank and slot of every choice, -1 for nowhere."""
        tables = self.expert_map.tables(ids_TK.device)
        physical_E = torch.tensor(self.expert_map.global_to_physical(), dtype=torch.int64, device=ids_TK.device)
        physical_TK, nowhere_TK = physical_E[ids_TK.clamp_min(0).long()], ids_TK < 0
        places = (tables.rank_of_P[physical_TK], tables.slot_of_P[physical_TK])
        rank_TK, slot_TK = (place.long().masked_fill(nowhere_TK, -1) for place in places)
        return rank_TK, slot_TK


def _all_to_all(rows: Tensor, comm: Communicator, send: Sequence[int], receive: Sequence[int], phase: str) -> Tensor:
    out: Tensor = _AllToAll.apply(rows, comm, send, receive, phase)  # type: ignore[no-untyped-call]
    return out


def _at_experts(x_RH: Tensor, slots_RK: Tensor, weights_RK: Tensor, expert: Expert, num_slots: int) -> Tensor:
    y_RH = torch.zeros_like(x_RH)
    for slot in range(num_slots):
        row_N, k_N = torch.nonzero(slots_RK == slot, as_tuple=True)
        y_RH = y_RH.index_add(0, row_N, expert(slot, x_RH[row_N]) * weights_RK[row_N, k_N][:, None])
    return y_RH
