"""What the library keeps of groups and handles, and how it refuses: an error code, or an assertion that ends a process.

A handle reads expert ids where they lie: low latency until its combine has ended, high throughput during `update` only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_mk.lab.testing.emulated.exchange import Exchange
from moe_mk_contrib.emulated.nccl.core import NcclDataType
from moe_mk_contrib.emulated.nccl.ep.enums import Algorithm, Layout, OverflowPolicy, ZeroCopyMode
from moe_mk_contrib.emulated.nccl.ep.tensor import Address, Tensor, read
from moe_mk_contrib.nccl_ep_limits import (
    HT_SMS,
    MAX_WARP_GROUPS,
    ROW_ALIGNMENT,
    low_latency_bytes,
    most_low_latency_top_k,
    warp_groups,
)

INVALID_ARGUMENT, INVALID_USAGE = 4, 5
DEVICE_SMS, MAX_TOP_K = 132, 32
PLAIN = (NcclDataType.BFLOAT16, NcclDataType.FLOAT16, NcclDataType.FLOAT32)
RAW = (*PLAIN, NcclDataType.FLOAT8E4M3, NcclDataType.FLOAT8E5M2)
"""Types of forwarded values; scales may be uint8, too."""


class NCCLEpError(Exception):
    """An error code of the library. What it prints is appended here."""

    def __init__(self, status: int, printed: str = "") -> None:
        self.status = status
        super().__init__(f"NCCL EP error code {status}" + (f" ({printed})" if printed else ""))


def aborts_unless(holds: bool, text: str) -> None:
    """An assertion in C, which ends the process."""
    if not holds:
        raise AssertionError(text)


def refuses_unless(holds: bool, printed: str, status: int = INVALID_ARGUMENT) -> None:
    """A check that returns an error code."""
    if not holds:
        raise NCCLEpError(status, printed)


class GroupState:
    """One group: its sizes, and whether an operation waits for its second half."""

    def __init__(self, exchange: Exchange, config: Any) -> None:
        self.exchange, self.config = exchange, config
        self.low_latency = config.algorithm == Algorithm.LOW_LATENCY
        self.draw = torch.Generator("cpu").manual_seed(exchange.rank)
        self.send_in_flight = False
        self.rdma_bytes = 0
        aborts_unless(config.algorithm in list(Algorithm), "invalid algorithm")
        aborts_unless(config.num_experts > 0, "num_experts must be greater than 0")
        aborts_unless(config.max_token_bytes > 0, "max_token_bytes must be greater than 0")
        refuses_unless(
            self.low_latency or config.max_token_bytes % ROW_ALIGNMENT == 0,
            f"HT max_token_bytes ({config.max_token_bytes}) must be a multiple of 16 bytes",
        )
        aborts_unless(config.max_dispatch_tokens_per_rank > 0, "max_dispatch_tokens_per_rank must be greater than 0")
        refuses_unless(config.max_num_sms <= DEVICE_SMS, "max_num_sms <= device_sm_count", INVALID_USAGE)
        self.sms = config.max_num_sms or (DEVICE_SMS if self.low_latency else HT_SMS)
        refuses_unless(
            not self.low_latency or warp_groups(config.num_experts, self.sms) <= MAX_WARP_GROUPS,
            f"insufficient comm SM count for Low-Latency mode: {self.sms} SMs with {config.num_experts} experts",
            INVALID_USAGE,
        )
        if config.zero_copy == ZeroCopyMode.ON or config.enable_mask or config.overflow_policy == OverflowPolicy.DROP:
            raise NotImplementedError("zero copy, masks and dropped rows are not emulated")
        budget = config.max_recv_tokens_per_rank
        aborts_unless(
            self.low_latency or budget == 0 or budget >= config.max_dispatch_tokens_per_rank,
            "HT mode requires max_recv_tokens_per_rank >= max_dispatch_tokens_per_rank",
        )
        if not self.low_latency and budget == 0:
            raise NotImplementedError("eager mode is not emulated")
        self.max_recv_tokens = budget or exchange.size * config.max_dispatch_tokens_per_rank
        self._expect_equal("max_recv_tokens_per_rank", self.max_recv_tokens)
        self._expect_equal("max_dispatch_tokens_per_rank", config.max_dispatch_tokens_per_rank)
        aborts_unless(config.num_experts % exchange.size == 0, "num_experts % nRanks == 0")
        self.local_experts = config.num_experts // exchange.size

    @property
    def slots(self) -> int:
        """Rows that an expert, or a rank, may receive."""
        return self.exchange.size * int(self.config.max_dispatch_tokens_per_rank)

    def _expect_equal(self, name: str, value: int) -> None:
        mine = torch.tensor([value], dtype=torch.int64, device="cpu")
        all_of_them = [int(got[0]) for got in self.exchange.swap([[mine]] * self.exchange.size, "create group")]
        aborts_unless(len(set(all_of_them)) == 1, f"{name} must be identical across ranks")


class HandleState:
    """One handle: its routing, and where the rows of its last dispatch went."""

    def __init__(self, group: GroupState, layout: Layout, num_topk: int, alignment: int) -> None:
        aborts_unless(layout != Layout.UNSET, "layout must be set explicitly")
        allowed = (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR) if group.low_latency else (Layout.FLAT, Layout.EXPERT_MAJOR)
        aborts_unless(layout in allowed, f"layout {layout!r} is not one of this algorithm")
        aborts_unless(alignment & (alignment - 1) == 0, "dispatch_output_per_expert_alignment is no power of two")
        if layout in (Layout.RANK_MAJOR,) or (layout == Layout.EXPERT_MAJOR and not group.low_latency):
            raise NotImplementedError("rank-major and HT expert-major layouts are not emulated")
        self.group, self.layout, self.num_topk = group, layout, num_topk
        self.ids: Address | None = None
        self.num_tokens = 0
        self.continue_fn: Callable[[], None] | None = None
        self.places: Any = None
        self.cached_ids: Any = None
        self.counts: list[int] = []
        self.slot_R: Any = None
        """Where the rows of the last dispatch lie, for combine."""
        if group.low_latency:
            self._check_geometry()

    def _check_geometry(self) -> None:
        config = self.group.config
        most = min(config.num_experts, MAX_TOP_K)
        refuses_unless(0 < self.num_topk <= most, f"LL top-k {self.num_topk} must be in [1, {most}]")
        fits = self.num_topk <= most_low_latency_top_k(config.num_experts, self.group.sms)
        refuses_unless(fits, f"LL top-k geometry is unsupported: top-k={self.num_topk}", INVALID_USAGE)
        need = low_latency_bytes(
            config.max_dispatch_tokens_per_rank, config.max_token_bytes, self.group.exchange.size, config.num_experts,
            self.num_topk,
        )  # fmt: skip
        have = config.rdma_buffer_size
        refuses_unless(have in (0,) or need <= have, f"layout needs {need} bytes but has {have} bytes", INVALID_USAGE)
        if need > self.group.rdma_bytes:  # a collective: every rank grows its buffer
            self.group.exchange.swap([[]] * self.group.exchange.size, "resize RDMA buffer")
            self.group.rdma_bytes = need

    def update(self, topk_idx: Tensor, layout_info: Any) -> None:
        """Bind ids. Low latency keeps their address; high throughput copies and exchanges them now."""
        group = self.group
        aborts_unless(topk_idx.ndim == 2, "topk_idx->ndim == 2")
        integers = (NcclDataType.INT32, NcclDataType.INT64)
        aborts_unless(topk_idx.datatype in integers, "topk_idx must be ncclInt32 or ncclInt64")
        aborts_unless(topk_idx.sizes[1] == self.num_topk, "num_topk mismatch between InitHandle and UpdateHandle")
        aborts_unless(
            bool((read(topk_idx) < group.config.num_experts).all()), "an id of no expert: illegal memory access"
        )
        self.ids, self.num_tokens = Address(topk_idx), topk_idx.sizes[0]
        self.places = None
        if group.low_latency:
            aborts_unless(layout_info is None, "LL mode does not accept local tensors in ncclEpUpdateHandle")
            return
        most = group.config.max_dispatch_tokens_per_rank
        aborts_unless(self.num_tokens <= most, "Token count exceeds HT buffer capacity")

    def expect_idle(self) -> None:
        """A device assertion: one operation of a group may wait for its second half."""
        if self.group.send_in_flight:
            raise RuntimeError("CUDA error: device-side assert triggered (epochState->send_in_flight == 0)")

    def finish(self, arrive: Callable[[], None], *, send_only: bool) -> None:
        """Let results arrive now, or with `complete`."""
        if not send_only:
            arrive()
            return
        self.group.send_in_flight, self.continue_fn = True, arrive

    def complete(self) -> None:
        """The second half of what was sent; nothing where nothing waits."""
        if self.continue_fn is not None:
            self.continue_fn()
            self.continue_fn, self.group.send_in_flight = None, False
