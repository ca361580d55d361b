"""The rows of a V2 dispatch: where they go, in which order they lie on arrival, and how they find home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_mk.testing.emulated.deep_ep.handle import EPHandle
from moe_mk.testing.emulated.deep_ep.high_throughput import as_moved
from moe_mk.testing.emulated.exchange import Exchange
from moe_mk.testing.emulated.pending import poison


@dataclass(frozen=True)
class Arrived:
    """Rows of all sources with their ids (local, else -1), all of their weights, and where they came from."""

    x: Tensor
    scales: Tensor | None
    ids_RK: Tensor
    weights_RK: Tensor
    origin_R2: Tensor
    """int64. Source rank and token; -1 in rows between groups."""
    per_source: Tensor

    @classmethod
    def of(cls, mail: Sequence[Sequence[Tensor]], rank: int, num_local: int) -> Arrived:
        """What every peer sent: x, ids, weights, tokens and perhaps scales."""
        counts = torch.tensor([len(part[0]) for part in mail], dtype=torch.int64, device=mail[0][0].device)
        x, ids_RK, weights_RK, token_R, *scales = (torch.cat(column) for column in zip(*mail, strict=True))
        local_RK = ids_RK - rank * num_local
        mine = (ids_RK >= 0) & (local_RK >= 0) & (local_RK < num_local)
        origin_R2 = torch.stack((torch.repeat_interleave(counts), token_R), dim=1)
        # Weights of other ranks' picks stay: whoever reads them must look at the ids.
        return cls(x, scales[0] if scales else None, torch.where(mine, local_RK, -1), weights_RK, origin_R2, counts)

    def counts(self, num_local: int) -> Tensor:
        """Rows of each local expert."""
        return torch.bincount(self.ids_RK[self.ids_RK >= 0].flatten(), minlength=num_local)

    def picked(self, order: Tensor) -> Arrived:
        """Rows in another order, or some of them."""
        x, scales, ids, weights = (None if part is None else part[order] for part in self.parts())
        assert x is not None and ids is not None and weights is not None
        return Arrived(x, scales, ids, weights, self.origin_R2[order], self.per_source)

    def placed(self, starts_L: Tensor, counts_L: Tensor, rows: int) -> Arrived:
        """Groups moved to their aligned starts; rows between and behind them are poison."""
        expert_R = torch.repeat_interleave(counts_L)
        within_R = torch.arange(len(expert_R), dtype=torch.int64, device=counts_L.device)
        place_R = starts_L[expert_R] + within_R - (counts_L.cumsum(dim=0) - counts_L)[expert_R]

        def spread(part: Tensor, rest: int | None = None) -> Tensor:
            held = poison(torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device=part.device))
            if rest is not None:
                held.fill_(rest)
            return held.index_put_((place_R,), part)

        return replace(
            self,
            x=spread(self.x),
            scales=None if self.scales is None else spread(self.scales),
            ids_RK=spread(self.ids_RK),
            weights_RK=spread(self.weights_RK),
            origin_R2=spread(self.origin_R2, rest=-1),
        )

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """What a user gets."""
        return self.x, self.scales, self.ids_RK, self.weights_RK


def outgoing(
    x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, num_local: int, ranks: int
) -> list[list[Tensor]]:
    """A token goes once to each rank that has an expert of it."""
    rank_TK, parts = torch.where(ids >= 0, ids // num_local, -1), []
    for peer in range(ranks):
        token_X = torch.nonzero((rank_TK == peer).any(dim=1)).flatten()
        extra = [] if scales is None else [scales[token_X]]
        parts.append([as_moved(x)[token_X], ids[token_X], weights[token_X], token_X, *extra])
    return parts


def in_some_order(got: Arrived, draw: torch.Generator) -> Arrived:
    """Rows of one source stay together, in an order that nobody may rely on."""
    parts = torch.split(torch.arange(len(got.x), dtype=torch.int64, device="cpu"), got.per_source.tolist())
    mixed = [part[torch.randperm(len(part), generator=draw, dtype=torch.int64, device="cpu")] for part in parts]
    return got.picked(torch.cat(mixed).to(got.x.device))


def expand(got: Arrived, num_local: int) -> Arrived:
    """A row for each local assignment, grouped by expert; one id and one weight a row."""
    row_N, k_N = torch.nonzero(got.ids_RK >= 0, as_tuple=True)
    order_N = torch.argsort(got.ids_RK[row_N, k_N], stable=True)
    row_N, k_N = row_N[order_N], k_N[order_N]
    rows = got.picked(row_N)
    return replace(rows, ids_RK=got.ids_RK[row_N, k_N][:, None], weights_RK=got.weights_RK[row_N, k_N][:, None])


def gather_home(exchange: Exchange, x: Tensor, handle: EPHandle, num_tokens: int) -> Tensor:
    """Send every row to its source and add up there, in f32."""
    rows = handle.recv_src_metadata
    known = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) if not handle.do_expand else len(rows)
    source_R = torch.full((len(rows),), -1, dtype=torch.int64, device=x.device)
    source_R[:known] = rows[:known, 0]
    parts = []
    for peer in range(exchange.size):
        row_X = torch.nonzero(source_R == peer).flatten()
        row_X = row_X[torch.argsort(rows[row_X, 1], stable=True)]
        parts.append([x[row_X], rows[row_X, 1]])
    mail = exchange.swap(parts, "elastic combine")
    total_TH = torch.zeros((num_tokens, x.shape[1]), dtype=torch.float32, device=x.device)
    for part_XH, token_X in mail:
        total_TH.index_add_(0, token_X, part_XH.float())
    return total_TH.to(torch.bfloat16)
