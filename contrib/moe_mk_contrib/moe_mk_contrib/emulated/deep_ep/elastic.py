"""`deep_ep.ElasticBuffer`: V2, with rows in no particular order, or one row an assignment grouped by expert.

The rows of a V2 dispatch: where they go, in which order they arrive, and how they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_mk.external.deepep_limits import NVLINK_PEERS, up_to
from moe_mk.lab.testing.emulated.deep_ep.base import Rows
from moe_mk.lab.testing.emulated.deep_ep.high_throughput import as_moved, promise_rows
from moe_mk.lab.testing.emulated.events import Arrival, EventHandle, EventOverlap, host_assert
from moe_mk.lab.testing.emulated.exchange import Exchange, exchange_over
from moe_mk.lab.testing.emulated.pending import poison
from moe_mk_contrib.deepep_v2_limits import ELASTIC_EXPERTS, ELASTIC_EXPERTS_PER_RANK, ELASTIC_TOP_K, elastic_bytes
from moe_mk_contrib.emulated.deep_ep.handle import EPHandle


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


def expand(got: Arrived, num_local: int) -> Arrived:
    """A row for each local assignment, grouped by expert; one id and one weight a row."""
    row_N, k_N = torch.nonzero(got.ids_RK >= 0, as_tuple=True)
    order_N = torch.argsort(got.ids_RK[row_N, k_N], stable=True)
    row_N, k_N = row_N[order_N], k_N[order_N]
    rows = got.picked(row_N)
    return replace(rows, ids_RK=got.ids_RK[row_N, k_N][:, None], weights_RK=got.weights_RK[row_N, k_N][:, None])


def gather_back(exchange: Exchange, x: Tensor, handle: EPHandle, num_tokens: int) -> Tensor:
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


class ElasticBuffer:
    """The V2 buffer of one rank."""

    def __init__(
        self,
        group: object,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        del num_cpu_bytes, prefer_overlap_with_compute, sl_idx, num_cpu_timeout_secs, num_gpu_timeout_secs
        self.group, self.exchange = group, exchange_over(group)
        if num_bytes is None:
            host_assert(num_max_tokens_per_rank > 0 and hidden > 0, "num_bytes, or num_max_tokens_per_rank and hidden")
            num_bytes = self.get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode,
                allow_multiple_reduction,
            )  # fmt: skip
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes, num_max_tokens_per_rank
        self.deterministic, self.explicitly_destroy = deterministic, explicitly_destroy
        self.num_allocated_qps = num_allocated_qps or 16
        self._draw = torch.Generator("cpu").manual_seed(self.exchange.rank)
        self.exchange.swap([[]] * self.exchange.size, "set-up")  # windows of all ranks are registered

    def destroy(self) -> None:
        assert self.explicitly_destroy

    @staticmethod
    def get_buffer_size_hint(
        group: object,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that a buffer needs."""
        del allow_multiple_reduction
        ranks = exchange_over(group).size
        per_node = NVLINK_PEERS if allow_hybrid_mode else ranks
        return elastic_bytes(
            num_max_tokens_per_rank, hidden, num_topk, ranks, fp8=use_fp8_dispatch, ranks_per_node=per_node
        )

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Rows of tokens to the ranks of their experts; with do_expand a row for each assignment."""
        self._check_call(num_qps, previous_event, allocate_on_comm_stream)
        host_assert(handle is None, "cached dispatches are not emulated")
        host_assert(not (do_zero_padding or use_tma_aligned_col_major_sf), "padding and layout of scales not emulated")
        del previous_event_before_epilogue, do_handle_copy
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        values, scales = x if isinstance(x, tuple) else (x, None)
        ids, weights, num_experts = self._checked(values, scales, topk_idx, topk_weights, num_experts, most)
        num_local, sync = num_experts // self.exchange.size, do_cpu_sync is None or do_cpu_sync
        parts = outgoing(values, scales, ids, weights, num_local, self.exchange.size)
        got = Arrived.of(self.exchange.swap(parts, "elastic dispatch"), self.exchange.rank, num_local)
        if not self.deterministic:  # rows of one source stay together, in an unspecified order
            split = torch.split(torch.arange(len(got.x), dtype=torch.int64, device="cpu"), got.per_source.tolist())
            mixed = [p[torch.randperm(len(p), generator=self._draw, dtype=torch.int64, device="cpu")] for p in split]
            got = got.picked(torch.cat(mixed).to(got.x.device))
        counts_L, alignment = got.counts(num_local), expert_alignment or 1
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats.add_(counts_L)
        aligned = [up_to(count, alignment) for count in counts_L.tolist()]
        total, worst = len(got.ids_RK), self.exchange.size * most
        rows = total if sync else worst
        starts_L = torch.tensor([0, *aligned[:-1]], dtype=torch.int64, device=ids.device).cumsum(dim=0)
        upto_L = starts_L + (counts_L if do_expand else torch.tensor(aligned, dtype=torch.int64, device=ids.device))
        expanded = sum(aligned)
        if do_expand:
            got, starts = expand(got, num_local), starts_L
            worst_rows = up_to(worst * min(ids.shape[1], num_local) + (alignment - 1) * num_local, alignment)
            rows = expanded if sync else worst_rows
            got = got.placed(starts, counts_L, rows)
        arrival = Arrival()
        # Ids behind the last row are stale ones, which look like any other.
        stale = (None, None, 0, None)
        given = zip(got.parts(), stale, strict=True)
        held = [promise_rows(arrival, part, rows, rest=rest) for part, rest in given if part is not None]
        recv_x = held.pop(0).view(values.dtype)
        recv = recv_x if scales is None else (recv_x, held.pop(0).view(scales.dtype))
        made = EPHandle(
            do_expand, num_experts, alignment, most, num_sms or 24, ids.clone(), total if sync else -1,
            expanded if sync else -1, aligned if sync else [], got.per_source.cumsum(dim=0).to(torch.int32),
            upto_L.to(torch.int32), counts_L.to(torch.int32) if do_expand else None,
            promise_rows(arrival, got.origin_R2, rows), torch.zeros_like(ids), None, None,
        )  # fmt: skip
        recv_ids, recv_weights = held
        event = self._event(arrival, async_with_compute_stream)
        return recv, None if do_expand else recv_ids, recv_weights[:, 0] if do_expand else recv_weights, made, event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Rows back, summed without weights."""
        del num_sms, previous_event_before_epilogue
        self._check_call(num_qps, previous_event, allocate_on_comm_stream)
        host_assert(topk_weights is None and bias is None, "weights and bias of a combine are not emulated")
        host_assert(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x is contiguous bf16 [N, H]")
        rows = len(handle.recv_src_metadata)
        host_assert(len(x) == rows, f"x.size(0) ({len(x)}) == recv_src_metadata.size(0) ({rows})")
        total = gather_back(self.exchange, x, handle, len(handle.topk_idx))
        held, arrival = poison(torch.empty_like(total)), Arrival()
        arrival.then(lambda: held.copy_(total))
        return held, None, self._event(arrival, async_with_compute_stream)

    def _event(self, arrival: Arrival, later: bool) -> EventOverlap:
        if later:
            return EventOverlap(EventHandle(arrival))
        arrival()
        return EventOverlap()

    def _check_call(self, num_qps: int, previous_event: EventHandle | None, allocate_on_comm_stream: bool) -> None:
        assert num_qps <= self.num_allocated_qps, "Allocated QPs are not enough"
        host_assert(previous_event is None or allocate_on_comm_stream, "previous_event wants allocate_on_comm_stream")
        right = previous_event is None or isinstance(previous_event, EventHandle)
        host_assert(right, "previous_event is an EventHandle")

    def _checked(
        self, x: Tensor, scales: Tensor | None, ids: Tensor | None, weights: Tensor | None, num_experts: int | None,
        most: int,
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        host_assert(ids is not None and weights is not None and num_experts is not None, "ids, weights, num_experts")
        assert ids is not None and weights is not None and num_experts is not None
        ranks = self.exchange.size
        host_assert(x.dim() == 2 and x.is_contiguous(), "x is contiguous [T, H]")
        host_assert(x.shape[1] * x.element_size() % 32 == 0, "row bytes % 32 == 0")
        host_assert(len(x) <= most, f"x.size(0) ({len(x)}) <= num_max_tokens_per_rank ({most})")
        host_assert((x.element_size() == 1) == (scales is not None), "FP8 rows come with scales")
        host_assert(scales is None or scales.element_size() == 4, "scales have elements of 4 bytes")
        host_assert(ids.dtype == torch.int64 and ids.is_contiguous(), "topk_idx is contiguous int64 [T, K]")
        host_assert(weights.dtype == torch.float32 and weights.shape == ids.shape, "topk_weights is f32 [T, K]")
        host_assert(ids.shape[1] <= ELASTIC_TOP_K, f"num_topk <= {ELASTIC_TOP_K}")
        host_assert(num_experts <= ELASTIC_EXPERTS and num_experts % ranks == 0, "num_experts")
        host_assert(num_experts // ranks <= ELASTIC_EXPERTS_PER_RANK, "experts per rank")
        distinct = torch.where(ids >= 0, ids, -1 - torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device))
        twice = (distinct.sort(dim=1).values.diff(dim=1) == 0).any()
        host_assert(not bool(twice), "an expert is at most once in a row")
        per_node = min(ranks, NVLINK_PEERS)
        need = elastic_bytes(most, x.shape[1], ids.shape[1], ranks, fp8=x.element_size() == 1, ranks_per_node=per_node)
        host_assert(need <= self.num_bytes, f"num_bytes ({self.num_bytes}) >= {need}")
        return ids, weights, num_experts
