"""High-throughput dispatch and combine: a row goes once to each rank, in the order of source ranks and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.events import Arrival, host_assert
from moe_mk.lab.testing.emulated.exchange import Exchange
from moe_mk.lab.testing.emulated.pending import poison


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a rank go."""

    num_tokens_per_rank: Tensor
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor


@dataclass(frozen=True)
class Received:
    """Rows and metadata of a dispatch once it has arrived."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    counts: list[int]
    """Tokens of each local expert, aligned; empty where the host is not to know."""
    source_R: Tensor
    """int32. The token each row came from, at its source."""
    prefix_WW: Tensor
    """int32. prefix_WW[s, d]: rows from ranks up to s to rank d."""


def layout_of(topk_idx: Tensor, num_experts: int, ranks: int) -> Layout:
    """Count tokens by rank and by expert."""
    host_assert(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx is contiguous [T, K]")
    host_assert(topk_idx.dtype == torch.int64, "topk_idx is int64")
    host_assert(num_experts > 0 and num_experts % ranks == 0, "num_experts % num_ranks == 0")
    chosen = topk_idx >= 0
    rank_TK = torch.where(chosen, topk_idx // (num_experts // ranks), -1)
    everyone_W = torch.arange(ranks, dtype=torch.int64, device=topk_idx.device)
    in_rank_TW = (rank_TK[:, :, None] == everyone_W).any(dim=1)
    per_expert_E = torch.bincount(topk_idx[chosen], minlength=num_experts).to(torch.int32)
    return Layout(in_rank_TW.sum(dim=0).to(torch.int32), per_expert_E, in_rank_TW)


class HighThroughput:
    """The high-throughput kernels of one rank."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def dispatch(
        self, parts: Sequence[Tensor | None], layout: Layout, arrival: Arrival, *, alignment: int, worst: int
    ) -> Received:
        """parts: x, scales, ids and weights of the tokens here, some of them None."""
        self._check_dispatch(parts, layout)
        x = parts[0]
        assert x is not None
        token_X = [torch.nonzero(in_rank).flatten() for in_rank in layout.is_token_in_rank.unbind(1)]
        given = [as_moved(part) for part in parts if part is not None]
        mail = self.exchange.swap(
            [[*(part[rows] for part in given), rows.to(torch.int32), layout.num_tokens_per_rank] for rows in token_X],
            "high-throughput dispatch",
        )
        *columns, sent_by_W = zip(*mail, strict=True)
        arrived = [torch.cat(column) for column in columns]
        prefix_WW = torch.stack(sent_by_W).cumsum(dim=0).to(torch.int32)
        rows, source_R = iter(arrived[:-1]), arrived[-1]
        total = worst or len(source_R)
        host_assert(total >= len(source_R), "num_worst_tokens >= num_recv_tokens")
        x_RH, scales, ids, weights = (None if part is None else next(rows).view(part.dtype) for part in parts)
        num_local = len(layout.num_tokens_per_expert) // self.exchange.size
        counts: list[int] = []
        if ids is not None and weights is not None:
            local_RK = ids - self.exchange.rank * num_local
            mine = (ids >= 0) & (local_RK >= 0) & (local_RK < num_local)
            ids, weights = torch.where(mine, local_RK, -1), torch.where(mine, weights, 0.0)
            per_expert = torch.bincount(ids[ids >= 0].flatten(), minlength=num_local).tolist()
            counts = [] if worst else [-(-count // alignment) * alignment for count in per_expert]
        assert x_RH is not None
        return Received(
            x=promise_rows(arrival, x_RH, total),
            scales=None if scales is None else promise_rows(arrival, scales, total),
            topk_idx=None if ids is None else promise_rows(arrival, ids, total, rest=-1),
            topk_weights=None if weights is None else promise_rows(arrival, weights, total),
            counts=counts,
            source_R=promise_rows(arrival, source_R, total),
            prefix_WW=prefix_WW,
        )

    def combine(
        self, x: Tensor, weights: Tensor | None, per_source: list[int], is_token_in_rank: Tensor, bias: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Sum rows and weights over the ranks they come back from, in f32, in rank order."""
        host_assert(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x is contiguous bf16 [N, H]")
        host_assert(x.shape[1] * 2 % 16 == 0, "(hidden * element size) % 16 == 0")
        host_assert(len(x) >= sum(per_source), "x.size(0) >= num_recv_tokens")
        given = [part for part in (x, weights) if part is not None]
        split = [torch.split(part[: sum(per_source)], per_source) for part in given]
        mail = self.exchange.swap([list(rows) for rows in zip(*split, strict=True)], "high-throughput combine")
        sums = []
        for column in zip(*mail, strict=True):
            total = torch.zeros((len(is_token_in_rank), column[0].shape[1]), dtype=torch.float32, device=x.device)
            for peer, part in enumerate(column):
                total[is_token_in_rank[:, peer]] += part.float()
            sums.append(total)
        for one in bias:
            host_assert(one.shape == sums[0].shape and one.dtype == torch.bfloat16, "bias is bf16 [T, H]")
            sums[0] += one.float()
        return sums[0].to(torch.bfloat16), sums[1] if weights is not None else None

    def _check_dispatch(self, parts: Sequence[Tensor | None], layout: Layout) -> None:
        x, scales, ids, weights = parts
        assert x is not None
        host_assert(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
        host_assert(x.shape[1] * x.element_size() % 16 == 0, "(hidden * element size) % 16 == 0")
        host_assert((x.element_size() == 1) == (scales is not None), "FP8 rows come with scales")
        if scales is not None:
            right = scales.dtype in (torch.float32, torch.int32) and scales.dim() == 2 and len(scales) == len(x)
            host_assert(right, "x_scales is f32 or int32 [T, scales]")
        in_rank = layout.is_token_in_rank
        host_assert(in_rank.shape == (len(x), self.exchange.size), "is_token_in_rank is [T, ranks]")
        host_assert(in_rank.dtype == torch.bool and in_rank.is_contiguous(), "is_token_in_rank is contiguous bool")
        host_assert((ids is None) == (weights is None), "topk_idx and topk_weights come together")
        if ids is not None and weights is not None:
            host_assert(ids.dtype == torch.int64 and len(ids) == len(x), "topk_idx is int64 [T, K]")
            right = weights.dtype == torch.float32 and weights.shape == ids.shape
            host_assert(right, "topk_weights is f32 [T, K]")


def as_moved(part: Tensor) -> Tensor:
    """Bytes for what torch cannot index."""
    return part.view(torch.uint8) if part.element_size() == 1 and part.dtype.is_floating_point else part


def promise_rows(arrival: Arrival, rows: Tensor, total: int, *, rest: int | None = None) -> Tensor:
    """Room for `total` rows, poisoned; on arrival the first are `rows`, and others `rest` where that is given."""
    held = poison(torch.empty((total, *rows.shape[1:]), dtype=rows.dtype, device=rows.device))

    def deliver() -> None:
        held[: len(rows)].copy_(rows)
        if rest is not None:
            held[len(rows) :].fill_(rest)

    arrival.then(deliver)
    return held
