"""NIXL EP: the low-latency kernels over NIXL's device API, with ranks that are connected one by one.

Ranks may come and go between steps, while experts stay where they are:

    mask, unmask   any other rank is left out for a while, as when it is late
    disconnect     the last ranks are let go, and with them what the library holds of them
    connect        ranks take part again: those that are there call it for the new ones, the new ones for all others

Assignments to a rank that is away go nowhere, and weights of the others stay as they are. Ranks must agree on who is
away before a step, each making the same calls; no rank waits for an absent rank.

Source: nixl_ep.Buffer (github.com/ai-dynamo/nixl, examples/device/ep), low-latency half.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.external.deepep_limits import NIXL_HIDDEN, NIXL_TOP_K
from moe_mk.prepare_finalize.base import TransportTraits
from moe_mk.prepare_finalize.deepep.common import Call
from moe_mk.prepare_finalize.deepep.low_latency import DeepEPLowLatency, LowLatencyTransport, Surface


class NixlEP(LowLatencyTransport):
    """NIXL EP; for decoding where NIXL carries the traffic."""

    lengths: ClassVar[tuple[int, ...]] = NIXL_HIDDEN
    max_top_k: ClassVar[int] = NIXL_TOP_K
    size_hint: ClassVar[str] = "get_low_latency_buffer_size_hint"
    queue_pairs: ClassVar[bool] = False
    traits: ClassVar[TransportTraits] = replace(
        DeepEPLowLatency.traits,
        summary="NIXL EP, low-latency kernels over NIXL and NVLink; for decoding with ranks that come and go",
        library="nixl_ep",
        met="",
        extra="build it from github.com/ai-dynamo/nixl, examples/device/ep",
    )

    def _surface(self, buffer: Any) -> Surface:
        nobody_W = torch.zeros(self.context.comm.size, dtype=torch.bool, device=self.context.device)
        return replace(super()._surface(buffer), away_W=nobody_W)

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks that take part, as the library has it; waits for the device."""
        return tuple(rank for rank, code in enumerate(self._status()) if code == 0)  # others are 1 or -1

    def _status(self) -> list[int]:
        """By rank: 0 takes part, 1 is masked, -1 is not connected."""
        status_W = torch.empty(self.context.comm.size, dtype=torch.int32, device=self.context.device)
        self._session.buffer.buffer.query_mask_buffer(status_W)
        status: list[int] = status_W.tolist()
        return status

    def mask(self, ranks: Collection[int]) -> None:
        """Leave ranks out. Raises ConfigError for ranks out of range, UnsupportedError inside a step."""
        with self._change("mask", ranks, away=True) as buffer:
            for rank in ranks:
                buffer.update_mask_buffer(rank, True)

    def unmask(self, ranks: Collection[int]) -> None:
        """Take ranks back that were masked and have kept their buffers. Raises as `mask` does."""
        with self._change("unmask", ranks, away=False) as buffer:
            for rank in ranks:
                buffer.update_mask_buffer(rank, False)

    def disconnect(self, ranks: Collection[int]) -> None:
        """Let the last ranks go. Raises as `mask` does."""
        size = self.context.comm.size
        if sorted(ranks) != list(range(size - len(ranks), size)):
            last = f"the library lets only the last of {size} ranks go; mask the others"
            raise ConfigError(f"ranks {sorted(ranks)} cannot be disconnected: {last}")
        with self._change("disconnect", ranks, away=True) as buffer:
            buffer.disconnect_ranks(sorted(ranks))

    def connect(self, ranks: Collection[int]) -> None:
        """Have ranks take part that were let go, or are new; waits until each connects to this one. Raises likewise."""
        with self._change("connect", ranks, away=False) as buffer:
            buffer.connect_ranks(sorted(ranks))

    def leave_out(self, active_W: Tensor) -> None:
        """`mask` and `unmask` by one tensor, see `PrepareFinalize.leave_out`; captured graphs read masks anew.

        Raises UnsupportedError for active ranks that were disconnected: `connect` takes those back.
        """
        active, status = self.active_ranks(active_W), self._status()
        gone = [rank for rank, code in enumerate(status) if code == 0 and not active[rank]]
        back = [rank for rank, code in enumerate(status) if code != 0 and active[rank]]
        if apart := [rank for rank in back if status[rank] == -1]:
            refusal = f"ranks {apart} are not connected"
            raise UnsupportedError(refusal, ["call connect() with them on every rank before they are active"])
        if gone:
            self.mask(gone)
        if back:
            self.unmask(back)

    @contextmanager
    def _change(self, verb: str, ranks: Collection[int], *, away: bool) -> Iterator[Any]:
        """The buffer, while membership changes; between steps only."""
        comm, surface = self.context.comm, self._session.buffer
        if wrong := [rank for rank in sorted(ranks) if rank == comm.rank or not 0 <= rank < comm.size]:
            raise ConfigError(f"rank {comm.rank} cannot {verb} {wrong}; name other ranks of 0 to {comm.size - 1}")
        self._session.expect_between_calls(verb, ranks)
        with self._session.call(verb):
            yield surface.buffer
        assert surface.away_W is not None
        surface.away_W[sorted(ranks)] = away  # in place: a captured graph reads it anew
        kept = self._session.pool
        kept.left_out = kept.left_out | set(ranks) if away else kept.left_out - set(ranks)

    def _numbers_of(self, physical_TK: Tensor) -> Tensor:
        """Experts of ranks that are away are nowhere, so that their share is left out by our word, not by chance."""
        number_TK, away_W = self._numbers.of(physical_TK), self._session.buffer.away_W
        assert away_W is not None
        return torch.where(away_W[(number_TK.clamp_min(0) // self._numbers.per_rank).long()], -1, number_TK)

    def _open(self, library: ModuleType, num_bytes: int) -> Any:
        """A buffer of full capacity, connected to every other rank."""
        comm = self.context.comm
        group = comm.library_group()
        # Where ranks of a process group leave what others need to connect; else the library asks an etcd server.
        store = dist.distributed_c10d._get_process_group_store(group) if isinstance(group, dist.ProcessGroup) else None
        options = {"low_latency_mode": True, "explicitly_destroy": False, "tcp_store_group": store}
        buffer = Call(library.Buffer, ["rank", "group"])({"rank": comm.rank, "group": group}, options)
        capacity = {"num_ranks": comm.size, "num_experts_per_rank": self._numbers.per_rank, "num_rdma_bytes": num_bytes}
        Call(buffer.update_memory_buffers, list(capacity))(capacity)
        buffer.connect_ranks([rank for rank in range(comm.size) if rank != comm.rank])
        return buffer
