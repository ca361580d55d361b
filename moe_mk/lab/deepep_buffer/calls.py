"""Arguments and results of calls of the buffer: settings, configs, events, handles, and blocks of received rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S
from moe_mk.config.moe import KernelConfig
from moe_mk.errors import ConfigError
from moe_mk.prepare_finalize.one_sided.network import OneSidedNetwork
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import Routing, RowTokens

CPU = torch.device("cpu")
FP8_COLUMNS = 128
"""Values that share a scale in `low_latency_dispatch(use_fp8=True)`."""
Hook = Callable[[], None]
Received = tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, "DispatchHandle | None", "EventOverlap"]
"""What a normal dispatch returns, see there."""


@dataclass(frozen=True)
class BufferSettings:
    """Settings of the network engine for which DeepEP's constructor has no argument."""

    max_num_tokens: int = 4096
    """Maximum number of tokens per rank in a normal dispatch; the same on all ranks."""
    network: str = KernelConfig.model_fields["network"].default
    """The IPv4 network between hosts: proxies listen only on this host's address in it."""
    ranks_per_node: int | None = None
    """Neighbouring ranks that share a host and its memory; None: every peer is reached through the proxies."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long a call waits for a peer before it raises CommError."""


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning of channels; accepted and without effect, since rows need no channel buffers here."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for `num_nvl_bytes`: 0."""
        del hidden_bytes, num_ranks
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for `num_rdma_bytes`: 0."""
        del hidden_bytes, num_ranks
        return 0


class EventOverlap:
    """DeepEP's event of a call; the work that it stands for is done."""

    def __init__(self, event: object = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self._after_wait: list[Hook] = []

    def register_hook_after_wait(self, hook_after_wait: Hook) -> None:
        """Call a function after the next wait."""
        self._after_wait.append(hook_after_wait)

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Run the registered hooks; there is nothing to wait for."""
        if release_handle:
            self.event = None
        hooks, self._after_wait = self._after_wait, []
        for hook in hooks:
            hook()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.current_stream_wait()


@dataclass
class DispatchHandle:
    """State of a normal dispatch for `combine` and for a repeated `dispatch`."""

    transport: OneSidedNetwork
    routing: Routing
    tokens: list[RowTokens] = field(default_factory=list)
    """Of dispatches that are not combined yet, the last one at the end."""

    def take(self) -> RowTokens:
        """The received rows to combine. Raises ConfigError if every dispatch of the handle was combined."""
        if not self.tokens:
            raise ConfigError("combine: every dispatch of this handle was combined; dispatch again with handle=handle")
        return self.tokens.pop()


@dataclass
class LowLatencyHandle:
    """State of a dispatch for `low_latency_combine`."""

    transport: OneSidedNetwork
    ids_TK: Tensor
    max_tokens: int
    tokens: RowTokens | None = None
    """As received; None before the hook has run, and after the combine."""
    place_R: Tensor | None = None
    """int64. The place of received row r in the blocks, expert by expert."""


@dataclass(frozen=True)
class Blocks:
    """Result of a low-latency dispatch: a padded block of rows for each local expert."""

    values_LSH: Tensor
    scales_LSX: Tensor | None
    """f32, with adjacent slots next to each other in memory, as in DeepEP."""
    counts_L: Tensor
    """int32."""

    @classmethod
    def empty(cls, local: int, slots: int, hidden: int, wire: QuantScheme) -> Blocks:
        counts_L = torch.zeros(local, dtype=torch.int32, device=CPU)
        if wire is BF16:
            return cls(torch.zeros((local, slots, hidden), dtype=torch.bfloat16, device=CPU), None, counts_L)
        values_LSH = torch.zeros((local, slots, hidden), dtype=torch.float8_e4m3fn, device=CPU)
        scales_LXS = torch.zeros((local, hidden // FP8_COLUMNS, slots), dtype=torch.float32, device=CPU)
        return cls(values_LSH, scales_LXS.transpose(1, 2), counts_L)

    @property
    def received(self) -> Tensor | tuple[Tensor, Tensor]:
        """Values, with their scales if there are any."""
        return self.values_LSH if self.scales_LSX is None else (self.values_LSH, self.scales_LSX)

    def fill(self, tokens: RowTokens) -> Tensor:
        """Copy rows to the blocks of their experts, in order of arrival; returns the place of each row."""
        slot_R = tokens.ids_RK[:, 0].long()
        counts_L = torch.bincount(slot_R, minlength=tokens.num_slots)
        order_R = torch.argsort(slot_R, stable=True)
        first_L = counts_L.cumsum(0) - counts_L
        rank_R = torch.empty_like(slot_R)
        rank_R[order_R] = torch.arange(slot_R.shape[0], dtype=slot_R.dtype, device=CPU) - first_L[slot_R[order_R]]
        place_R = slot_R * self.values_LSH.shape[1] + rank_R
        values = self.values_LSH.flatten(0, 1)
        values.view(torch.uint8)[place_R] = tokens.x_RH.values.contiguous().view(torch.uint8)
        if self.scales_LSX is not None:
            assert tokens.x_RH.scales is not None
            self.scales_LSX[slot_R, rank_R] = tokens.x_RH.scales.float()
        self.counts_L.copy_(counts_L)
        return place_R
