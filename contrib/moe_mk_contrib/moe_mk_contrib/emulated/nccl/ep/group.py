"""`nccl.ep.Group`: the kernels' buffers over a communicator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moe_mk_contrib.emulated.nccl.core import Communicator, NcclInvalid
from moe_mk_contrib.emulated.nccl.ep.enums import Algorithm, Layout, OverflowPolicy, ZeroCopyMode
from moe_mk_contrib.emulated.nccl.ep.handle import Handle, HandleConfig, LayoutInfo, bound
from moe_mk_contrib.emulated.nccl.ep.state import GroupState, HandleState
from moe_mk_contrib.emulated.nccl.ep.tensor import Tensor


@dataclass(kw_only=True)
class AllocConfig:
    """Allocator hooks; 0 for cudaMalloc and cudaFree."""

    alloc_fn: int = 0
    free_fn: int = 0
    context: int = 0


@dataclass(kw_only=True)
class GroupConfig:
    """Sizes of a group, equal on all ranks; 0 where the library chooses."""

    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    rdma_buffer_size: int = 0
    num_qp_per_rank: int = 0
    num_channels: int = 0
    max_num_sms: int = 0
    alloc: AllocConfig = field(default_factory=AllocConfig)
    enable_mask: bool = False
    timeout_ns: int = 0
    zero_copy: ZeroCopyMode = ZeroCopyMode.AUTO
    overflow_policy: OverflowPolicy = OverflowPolicy.AUTO
    num_topk: int = 0


class Group:
    """A group; `create` makes it. Here its state takes the place of an address."""

    def __init__(self, ptr: Any) -> None:
        self._ptr = ptr

    @classmethod
    def create(cls, comm: Communicator, config: GroupConfig) -> Group:
        """Make a group; every rank of the communicator at once."""
        return cls(GroupState(comm.exchange, config))

    def _check_valid(self, operation: str) -> None:
        if not self._ptr:
            raise NcclInvalid(f"Cannot {operation}: Group is not initialized or has been destroyed")

    @property
    def ptr(self) -> Any:
        """The address of the group."""
        self._check_valid("read ptr")
        return self._ptr

    def create_handle(
        self,
        layout: Layout,
        topk_idx: Tensor,
        *,
        layout_info: LayoutInfo | None = None,
        config: HandleConfig | None = None,
        stream: Any,
    ) -> Handle:
        """A handle with its first routing; every rank at once."""
        del stream
        self._check_valid("create_handle")
        alignment = 0 if config is None else config.dispatch_output_per_expert_alignment
        return Handle(bound(HandleState(self._ptr, layout, topk_idx.sizes[1], alignment), topk_idx, layout_info))

    def destroy(self) -> None:
        """Release the group."""
        self._ptr = 0
