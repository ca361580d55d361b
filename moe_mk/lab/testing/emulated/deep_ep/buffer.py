"""`deep_ep.Buffer`: the V1 communication buffer with high-throughput and low-latency kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.deep_ep.base import V1Buffer
from moe_mk.lab.testing.emulated.events import EventOverlap, host_assert
from moe_mk.lab.testing.emulated.low_latency import Finish, Hook


class Buffer(V1Buffer):
    """The buffer of DeepEP itself."""

    def __init__(
        self,
        group: object,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
    ) -> None:
        del allow_nvlink_for_low_latency_mode, allow_mnnvl
        if group is None and comm is None:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        self._open(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, explicitly_destroy)
        self.enable_shrink = enable_shrink

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
        copies, finish = (use_logfmt, zero_copy), Finish(async_finish, return_recv_hook)
        return self._low_latency_combine(x, topk_idx, topk_weights, handle, copies, finish, out)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out, or take it back in."""
        host_assert(self.enable_shrink, "enable_shrink")
        host_assert(0 <= rank_to_mask < self.group_size, "0 <= rank_to_mask < num_ranks")
        (self._low_latency.masked.add if mask else self._low_latency.masked.discard)(rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """1 for each rank that is left out."""
        host_assert(self.enable_shrink, "enable_shrink")
        right = mask_status.dtype == torch.int32 and len(mask_status) == self.group_size
        host_assert(right, "mask_status is int32 [ranks]")
        status = [int(rank in self._low_latency.masked) for rank in range(self.group_size)]
        mask_status.copy_(torch.tensor(status, dtype=torch.int32, device=mask_status.device))

    def low_latency_clean_mask_buffer(self) -> None:
        """Take everybody back in."""
        host_assert(self.enable_shrink, "enable_shrink")
        self._low_latency.masked.clear()
