"""The low-latency half of nixl_ep, imitated: ranks are connected by hand, ids are int32, a handle has four parts.

A rank that was never connected is masked, and reads -1 where a masked one reads 1. The rank itself cannot be masked.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_mk.external.deepep_limits import NIXL_HIDDEN, NIXL_TOP_K, low_latency_bytes
from moe_mk.lab.testing.emulated.events import EventHandle, EventOverlap, host_assert
from moe_mk.lab.testing.emulated.exchange import exchange_over
from moe_mk.lab.testing.emulated.live import meet
from moe_mk.lab.testing.emulated.low_latency import Build, Finish, Hook, LowLatency, Shape

Rows = Tensor | tuple[Tensor, Tensor]

DEFAULT_TIMEOUT_MS = 30000
NEVER_CONNECTED = -1

topk_idx_t = torch.int32
"""What ids of experts must be."""


class Buffer:
    """The buffer of nixl_ep."""

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: object = None,
        comm: object = None,
        tcp_store_group: object = None,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> None:
        del disable_ll_nvlink, timeout_ms
        assert not (group and comm)
        host_assert(group is not None, "the emulation meets its peers over `group`")
        host_assert(low_latency_mode, "high-throughput kernels are not emulated")
        self.exchange, self.rank = exchange_over(group), rank
        host_assert(rank == self.exchange.rank, "rank is that of the group")
        self.explicitly_destroy, self.tcp_store_group = explicitly_destroy, tcp_store_group
        self.group_size, self.num_experts = 0, 0
        self._kernels: LowLatency | None = None
        self._status: list[int] = []

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that the kernels need."""
        del num_ranks
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    get_rdma_size_hint = get_low_latency_buffer_size_hint

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int, num_nvl_bytes: int = 0
    ) -> None:
        """Allocate for up to so many ranks and experts: the physical capacity."""
        del num_nvl_bytes
        host_assert(num_ranks == self.exchange.size, "the emulation has as many ranks as its group")
        self.group_size, self.num_experts = num_ranks, num_ranks * num_experts_per_rank
        self._kernels = LowLatency(self.exchange, num_rdma_bytes, Build(NIXL_HIDDEN, NIXL_TOP_K, topk_idx_t))
        self._status = [NEVER_CONNECTED] * num_ranks
        self._note(self.rank, 0)

    def set_tcp_store_group(self, tcp_store_group: object) -> None:
        """Where ranks leave what peers need to connect."""
        self.tcp_store_group = tcp_store_group

    def connect_ranks(self, remote_ranks: list[int], activate: bool = True) -> None:
        """Connect to peers, each of which connects to this rank; an activated one takes part from now on."""
        host_assert(self._kernels is not None, "update_memory_buffers comes before connect_ranks")
        host_assert(self.rank not in remote_ranks, "a rank does not connect to itself")
        hello = torch.tensor([self.rank], dtype=torch.int64, device="cpu")
        meet(self.exchange, {rank: [hello] for rank in remote_ranks}, "connect")
        for rank in remote_ranks:
            if activate:
                self._note(rank, 0)

    def disconnect_ranks(self, remote_ranks: list[int]) -> None:
        """Forget the last ranks."""
        tail = list(range(self.group_size - len(remote_ranks), self.group_size))
        host_assert(sorted(remote_ranks) == tail and self.rank not in tail, "remote_ranks are the last ones")
        for rank in remote_ranks:
            self._note(rank, NEVER_CONNECTED)

    def barrier(self) -> None:
        """Wait for all ranks that take part."""
        hello = torch.tensor([self.rank], dtype=torch.int64, device="cpu")
        present = [rank for rank, status in enumerate(self._status) if status == 0 and rank != self.rank]
        meet(self.exchange, {rank: [hello] for rank in present}, "barrier")

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, tuple[Any, ...], EventOverlap, Hook | None]:
        """Rows to blocks of their experts; as many experts as there is capacity for, unless stated."""
        shape = self._shape(num_max_dispatch_tokens_per_rank, x.shape[1])
        host_assert(num_experts in (None, shape.num_experts), "num_experts is the physical capacity")
        rows, scales, counts, token_LS, range_LW, event, hook = self._ready.dispatch(
            x, topk_idx, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, shape,
            (use_fp8, round_scale, use_ue8m0), Finish(async_finish, return_recv_hook),
        )  # fmt: skip
        handle = (token_LS, range_LW, shape.max_tokens, shape.hidden)
        return rows if scales is None else (rows, scales), counts, handle, EventOverlap(event), hook

    def dispatch(self, *args: Any, **kwargs: Any) -> tuple[Rows, Tensor, tuple[Any, ...], EventOverlap, Hook | None]:
        """The same as low_latency_dispatch."""
        return self.low_latency_dispatch(*args, **kwargs)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Rows back, summed with their weights."""
        del combine_wait_recv_cost_stats
        token_LS, range_LW, max_tokens, hidden = handle
        got, event, hook = self._ready.combine(
            x, topk_idx, topk_weights, (token_LS, range_LW), self._shape(max_tokens, hidden),
            (use_logfmt, zero_copy), Finish(async_finish, return_recv_hook), out,
        )  # fmt: skip
        return got, EventOverlap(event), hook

    def combine(self, *args: Any, **kwargs: Any) -> tuple[Tensor, EventOverlap, Hook | None]:
        """The same as low_latency_combine."""
        return self.low_latency_combine(*args, **kwargs)

    def get_next_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """Memory that the next combine sends from without a copy."""
        return self._ready.combine_buffer(self._shape(*handle[2:]))

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out, or take it back in."""
        host_assert(0 <= rank_to_mask < self.group_size, "0 <= rank_to_mask < num_ranks")
        host_assert(not mask or rank_to_mask != self.rank, "the local rank cannot be masked")
        self._note(rank_to_mask, int(mask))

    def query_mask_buffer(self, mask_status: Tensor) -> None:
        """0 for ranks that take part; anything else for others."""
        right = mask_status.dtype == torch.int32 and len(mask_status) == self.group_size
        host_assert(right, "mask_status is int32 [ranks]")
        mask_status.copy_(torch.tensor(self._status, dtype=torch.int32, device=mask_status.device))

    def clean_mask_buffer(self) -> None:
        """Take everybody back in who is connected."""
        for rank, status in enumerate(self._status):
            self._note(rank, min(status, 0))

    @property
    def _ready(self) -> LowLatency:
        host_assert(self._kernels is not None, "update_memory_buffers comes first")
        assert self._kernels is not None
        return self._kernels

    def _shape(self, max_tokens: int, hidden: int) -> Shape:
        return Shape(max_tokens, hidden, self.num_experts)

    def _note(self, rank: int, status: int) -> None:
        self._status[rank] = status
        self._ready.masked = {rank for rank, status in enumerate(self._status) if status != 0}


__all__ = ["Buffer", "EventHandle", "EventOverlap", "topk_idx_t"]
