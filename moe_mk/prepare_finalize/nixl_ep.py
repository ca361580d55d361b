"""NIXL EP: the low-latency kernels over NIXL's device API, with ranks that are connected one by one.

Source: nixl_ep.Buffer (github.com/ai-dynamo/nixl, examples/device/ep), low-latency half.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch.distributed as dist

from moe_mk.external.deepep_limits import NIXL_HIDDEN, NIXL_TOP_K
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportTraits
from moe_mk.prepare_finalize.library_calls import Call
from moe_mk.prepare_finalize.low_latency import Dialect, LowLatencyTransport
from moe_mk.tokens import BatchedTokens, OutputStage


@PREPARE_FINALIZE.register("nixl_ep")
class NixlEP(LowLatencyTransport):
    """NIXL EP; for decoding where NIXL carries the traffic."""

    dialect: ClassVar[Dialect] = Dialect(
        NIXL_HIDDEN, NIXL_TOP_K, size_hint="get_low_latency_buffer_size_hint", queue_pairs=False
    )
    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="NIXL EP, low-latency kernels over NIXL and NVLink; for decoding with ranks that come and go",
        kinds=frozenset({"cuda"}),
        min_arch=(9, 0),
        library="nixl_ep",
        extra="build it from github.com/ai-dynamo/nixl, examples/device/ep",
        produces=BatchedTokens,
        wants=OutputStage.RAW,
        wire=frozenset({"plain", "fp8"}),
        min_ranks=2,
        blocking=True,
        deterministic=False,
    )

    def _open(self, library: ModuleType) -> Any:
        """A buffer of full capacity, connected to every other rank."""
        comm = self.context.comm
        group = comm.library_group()
        options = {"low_latency_mode": True, "explicitly_destroy": False, "tcp_store_group": _store_of(group)}
        buffer = Call(library.Buffer, ["rank", "group"])({"rank": comm.rank, "group": group}, options)
        capacity = {
            "num_ranks": comm.size,
            "num_experts_per_rank": self._numbers.per_rank,
            "num_rdma_bytes": self._bytes_by(library),
        }
        Call(buffer.update_memory_buffers, list(capacity))(capacity)
        buffer.connect_ranks([rank for rank in range(comm.size) if rank != comm.rank])
        return buffer


def _store_of(group: object) -> object:
    """Where ranks of a process group leave what others need to connect; else the library asks an etcd server."""
    return dist.distributed_c10d._get_process_group_store(group) if isinstance(group, dist.ProcessGroup) else None
