"""Base of the V1 buffers of DeepEP and its drop-ins: set-up, high-throughput kernels, low-latency kernels."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_mk.external.deepep_limits import (
    LOW_LATENCY_HIDDEN,
    LOW_LATENCY_TOP_K,
    NVLINK_PEERS,
    QP_DEPTH,
    low_latency_bytes,
)
from moe_mk.lab.testing.emulated.deep_ep.config import Config, tuned
from moe_mk.lab.testing.emulated.deep_ep.high_throughput import HighThroughput, Layout, layout_of
from moe_mk.lab.testing.emulated.events import Arrival, EventHandle, EventOverlap, host_assert
from moe_mk.lab.testing.emulated.exchange import exchange_over
from moe_mk.lab.testing.emulated.low_latency import Build, Finish, Hook, LowLatency, Shape
from moe_mk.lab.testing.emulated.pending import poison

Rows = Tensor | tuple[Tensor, Tensor]


class V1Buffer:
    """A buffer without the calls in which dialects differ."""

    num_sms: ClassVar[int] = 20
    build: ClassVar[Build] = Build(LOW_LATENCY_HIDDEN, LOW_LATENCY_TOP_K, torch.int64)
    internode_worst_tokens: ClassVar[bool] = False

    def _open(
        self, group: object, num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool, num_qps_per_rank: int,
        explicitly_destroy: bool,
    ) -> None:  # fmt: skip
        self.group = group
        exchange = exchange_over(group)
        self.rank, self.group_size = exchange.rank, exchange.size
        host_assert(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "buffer sizes % 128 == 0")
        right = self.group_size < NVLINK_PEERS or self.group_size % NVLINK_PEERS == 0
        host_assert(right, "num_ranks < 8 or num_ranks % 8 == 0")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.nvshmem_qp_depth = QP_DEPTH
        if self._nodes > 1 or low_latency_mode:
            assert num_qps_per_rank > 0
        exchange.swap([[]] * exchange.size, "set-up")  # handles of all ranks are gathered
        self._rows = HighThroughput(exchange)
        self._low_latency = LowLatency(exchange, num_rdma_bytes, self.build)
        self._dirty = False

    @property
    def _nodes(self) -> int:
        return max(self.group_size // NVLINK_PEERS, 1)

    def destroy(self) -> None:
        """Release what the buffer holds."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether kernels use what Hopper added."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Multiprocessors of all buffers of this class."""
        assert new_num_sms % 2 == 0, "The SM count must be even"
        cls.num_sms = new_num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """The recommended config for dispatch."""
        return tuned(num_ranks, cls.num_sms, combine=False)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """The recommended config for combine."""
        return tuned(num_ranks, cls.num_sms, combine=True)

    @staticmethod
    def capture() -> EventOverlap:
        """The point that the current stream has reached."""
        return EventOverlap(EventHandle())

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Tokens of each rank, node and expert, and who goes where."""
        self._check_events(previous_event, async_finish, allocate_on_comm_stream)
        layout = layout_of(topk_idx, num_experts, self.group_size)
        per_node = None
        if self._nodes > 1:
            in_node = layout.is_token_in_rank.view(len(topk_idx), self._nodes, -1).any(dim=2)
            per_node = in_node.sum(dim=0).to(torch.int32)
        event = EventOverlap(EventHandle() if async_finish else None)
        return layout.num_tokens_per_rank, per_node, layout.num_tokens_per_expert, layout.is_token_in_rank, event

    def dispatch(
        self,
        x: Rows,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int] | None, tuple[Any, ...] | None, EventOverlap]:
        """Rows of tokens to the ranks of their experts."""
        self._check_events(previous_event, async_finish, allocate_on_comm_stream)
        config = tuned(self.group_size, self.num_sms, combine=False) if config is None else config
        if self._nodes > 1 and not self.internode_worst_tokens:
            assert num_worst_tokens == 0, "Internode dispatch does not support `num_worst_tokens > 0`"
        values, scales = x if isinstance(x, tuple) else (x, None)
        self._check_room(config, values.shape[1] * values.element_size())
        self._dirty = True
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            in_rank = handle[4 if self._nodes == 1 else 0]
            no_rows = torch.zeros(self.group_size, dtype=torch.int32, device=in_rank.device)
            layout = Layout(in_rank.sum(dim=0).to(torch.int32), no_rows, in_rank)
        else:
            assert num_tokens_per_rank is not None and is_token_in_rank is not None
            assert num_tokens_per_expert is not None
            host_assert(self._nodes == 1 or num_tokens_per_rdma_rank is not None, "num_tokens_per_rdma_rank is given")
            layout = Layout(num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        arrival = Arrival()
        got = self._rows.dispatch(
            (values, scales, topk_idx, topk_weights), layout, arrival, alignment=expert_alignment,
            worst=num_worst_tokens,
        )  # fmt: skip
        event = self._event(arrival, async_finish)
        received = got.x if got.scales is None else (got.x, got.scales)
        if handle is not None:
            return received, None, None, None, None, event
        channels = torch.zeros((self.group_size, config.num_sms // 2), dtype=torch.int32, device=values.device)
        head = torch.zeros((len(values), self.group_size), dtype=torch.int32, device=values.device)
        if self._nodes == 1:
            handle = (got.prefix_WW, channels, channels, got.source_R, layout.is_token_in_rank, head)
        else:
            mine_W = got.prefix_WW[:, self.rank]
            by_node = mine_W[NVLINK_PEERS - 1 :: NVLINK_PEERS]
            handle = (
                layout.is_token_in_rank, channels, channels, channels, by_node, channels, mine_W, got.source_R, head,
                head,
            )  # fmt: skip
        return received, got.topk_idx, got.topk_weights, got.counts, handle, event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Rows back, summed over ranks without weights."""
        self._check_events(previous_event, async_finish, allocate_on_comm_stream)
        config = tuned(self.group_size, self.num_sms, combine=True) if config is None else config
        self._check_room(config, x.shape[1] * x.element_size())
        self._dirty = True
        upto_W, in_rank = (handle[0][:, self.rank], handle[4]) if self._nodes == 1 else (handle[6], handle[0])
        per_source = upto_W.diff(prepend=torch.zeros_like(upto_W[:1])).tolist()
        extra = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
        total, weights = self._rows.combine(x, topk_weights, per_source, in_rank, extra)
        arrival = Arrival()
        held = poison(torch.empty_like(total))
        arrival.then(lambda: held.copy_(total))
        return held, weights, self._event(arrival, async_finish)

    def _event(self, arrival: Arrival, async_finish: bool) -> EventOverlap:
        if async_finish:
            return EventOverlap(EventHandle(arrival))
        arrival()
        return EventOverlap()

    def _check_events(self, previous: EventOverlap | None, async_finish: bool, on_comm_stream: bool) -> None:
        right = not on_comm_stream or (previous is not None and async_finish)
        host_assert(right, "allocate_on_comm_stream wants previous_event and async_finish")

    def _check_room(self, config: Config, row_bytes: int) -> None:
        need = config.get_nvl_buffer_size_hint(row_bytes, self.group_size)
        host_assert(need <= self.num_nvl_bytes, f"num_nvl_bytes ({self.num_nvl_bytes}) >= {need}")
        need = config.get_rdma_buffer_size_hint(row_bytes, self.group_size)
        host_assert(need <= self.num_rdma_bytes, f"num_rdma_bytes ({self.num_rdma_bytes}) >= {need}")

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, tuple[Any, ...], EventOverlap, Hook | None]:
        """Rows to blocks of their experts."""
        host_assert(self.low_latency_mode, "low_latency_mode")
        host_assert(not self._dirty, "clean_low_latency_buffer comes after high-throughput kernels")
        shape = Shape(num_max_dispatch_tokens_per_rank, x.shape[1], num_experts)
        assert self.nvshmem_qp_depth >= (shape.max_tokens + 1) * 2
        rows, scales, counts, token_LS, range_LW, event, hook = self._low_latency.dispatch(
            x, topk_idx, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, shape,
            (use_fp8, round_scale, use_ue8m0), Finish(async_finish, return_recv_hook),
        )  # fmt: skip
        handle = (token_LS, range_LW, shape.max_tokens, shape.hidden, shape.num_experts)
        return rows if scales is None else (rows, scales), counts, handle, EventOverlap(event), hook

    def _low_latency_combine(
        self, x: Tensor, ids: Tensor, weights: Tensor, handle: tuple[Any, ...], copies: tuple[bool, bool],
        finish: Finish, out: Tensor | None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:  # fmt: skip
        token_LS, range_LW, *sizes = handle
        got, event, hook = self._low_latency.combine(
            x, ids, weights, (token_LS, range_LW), Shape(*sizes), copies, finish, out
        )
        return got, EventOverlap(event), hook

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Make the buffer fit for low-latency kernels again; all ranks together."""
        self._low_latency.clean(Shape(num_max_dispatch_tokens_per_rank, hidden, num_experts))
        self._dirty = False

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """Memory that the next combine sends from without a copy."""
        return self._low_latency.combine_buffer(Shape(*handle[2:]))

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that the low-latency kernels need."""
        del num_ranks
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)
