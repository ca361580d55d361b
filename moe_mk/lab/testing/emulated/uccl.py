"""UCCL-EP's drop-in for deep_ep, imitated: the calls of V1, and exactly the differences that its wrapper has.

No masks, no `enable_shrink`, no `comm`, no `topk_idx_t` and no V2 in the module; more arguments for overlap in combine.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from moe_mk.lab.testing.emulated.deep_ep.base import V1Buffer
from moe_mk.lab.testing.emulated.deep_ep.config import Config
from moe_mk.lab.testing.emulated.events import EventHandle, EventOverlap
from moe_mk.lab.testing.emulated.low_latency import Finish, Hook


class Buffer(V1Buffer):
    """The buffer of UCCL-EP."""

    internode_worst_tokens: ClassVar[bool] = True

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
        is_intranode: bool | None = None,
    ) -> None:
        del allow_nvlink_for_low_latency_mode, allow_mnnvl, is_intranode
        self._open(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, explicitly_destroy)

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
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 0,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Rows back, summed with their weights. Signals are taken and unused: nothing overlaps here."""
        del combine_wait_recv_cost_stats, overlap, packed_recv_count, comp_signal, block_m, threshold, num_sms
        del src_signals, src_signal_expect_value
        copies, finish = (use_logfmt, zero_copy), Finish(async_finish, return_recv_hook)
        return self._low_latency_combine(x, topk_idx, topk_weights, handle, copies, finish, out)


__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
