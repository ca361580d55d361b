"""`ElasticBuffer` of a real sgl-deep-ep wheel over a native module of ours, see `tests/support/native_deep_ep.py`."""

import importlib
import types
from pathlib import Path
from typing import Any

import torch
from moe_mk_contrib.deepep_v2_limits import elastic_bytes
from moe_mk_contrib.emulated import deep_ep as emulated
from torch import Tensor

from tests.support import native_deep_ep as core
from tests.support.native_deep_ep import HERE


class NativeElastic:
    """`_C.ElasticBuffer`."""

    def __init__(self, rank: int, size: int, nccl: object, cpu: object, num_bytes: int, *rest: object) -> None:
        self.buffer = emulated.ElasticBuffer(HERE.comm, num_bytes)
        self.size, self.handles = size, list[Any]()

    def get_logical_domain_size(self) -> tuple[int, int]:
        return 1, self.size

    get_physical_domain_size = get_logical_domain_size

    def dispatch(
        self, x: Tensor, sf: Tensor | None, ids: Tensor, weights: Tensor, stats: object, *rest: Any
    ) -> tuple[Any, ...]:
        cached, (most, experts, alignment, _, _, *flags) = rest[:10], rest[10:]
        assert all(part is None for part in cached)
        previous, before, later, on_comm, copy, sync, expand, zero, tma = flags
        rows, ids_R, weights_R, h, event = self.buffer.dispatch(
            x if sf is None else (x, sf), ids, weights, stats, experts, most, alignment, 0, 0, previous, before, later,
            on_comm, None, copy, sync, expand, zero, tma,
        )  # fmt: skip
        x, sf = rows if isinstance(rows, tuple) else (rows, None)
        self.handles.append(h)
        return (
            x, sf, ids_R, weights_R, h.topk_idx, h.num_recv_tokens, h.num_expanded_tokens,
            h.num_recv_tokens_per_expert_list, h.psum_num_recv_tokens_per_scaleup_rank,
            h.psum_num_recv_tokens_per_expert, h.num_unaligned_recv_tokens_per_expert, h.recv_src_metadata,
            h.dst_buffer_slot_idx, None, None, event.event,
        )  # fmt: skip

    def combine(
        self, x: Tensor, weights: object, bias_0: object, bias_1: object, origin: Tensor, *rest: Any
    ) -> tuple[Any, ...]:
        handle = next(h for h in self.handles if h.recv_src_metadata is origin)
        later = rest[-3]
        got, _, event = self.buffer.combine(x, handle, async_with_compute_stream=later)
        return got, None, event.event


def load_wheel(wheel: Path, into: Path) -> types.SimpleNamespace:
    """The V1 and the elastic buffers of a wheel; undo with `core.unload_wheel`."""

    def size(comm: object, most: int, hidden: int, top_k: int, fp8: bool, *modes: object) -> int:
        return elastic_bytes(most, hidden, top_k, HERE.comm.size, fp8=fp8, ranks_per_node=8)

    found = core.load_wheel(wheel, into, ElasticBuffer=NativeElastic, calculate_elastic_buffer_size=size)
    elastic: Any = importlib.import_module("deep_ep.buffers.elastic")
    core.replace_what_asks_for_gpus(elastic)
    nothing = types.SimpleNamespace(get=lambda: 0)
    elastic.get_nccl_comm_handle = lambda group, **more: nothing
    elastic.check_fast_rdma_atomic_support = lambda: True
    elastic.get_nvlink_gbs = lambda *args, **more: 450.0
    elastic.torch = _CpuTorch(torch)
    elastic.ElasticBuffer.get_theoretical_num_sms = lambda self, *args, **more: 24
    found.ElasticBuffer = elastic.ElasticBuffer
    return found


class _CpuTorch:
    """torch without synchronisation of devices."""

    def __init__(self, real: Any) -> None:
        self._real, self.cuda = real, types.SimpleNamespace(synchronize=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
