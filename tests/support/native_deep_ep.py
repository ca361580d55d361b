"""The Python of a real sgl-deep-ep wheel over a native module of ours, so that adapters meet the library's own code.
Every method takes the positional arguments that the wheel's Python passes, and hands them to the emulation."""

import importlib
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.external.deepep_limits import low_latency_bytes
from moe_mk.lab.testing.emulated import deep_ep as emulated

HERE = threading.local()
"""`group` of the rank whose thread this is: the native module is never given one."""


class Group:
    """What the wheel asks of a process group."""

    def __init__(self, comm: ThreadCommunicator) -> None:
        self.comm = comm
        HERE.comm = comm

    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.size

    def barrier(self) -> None:
        self.comm.swap([[]] * self.comm.size, "barrier")


class NativeBuffer:
    """`_C.Buffer`."""

    def __init__(
        self, rank: int, size: int, nvl: int, rdma: int, low_latency: bool, destroy: bool, shrink: bool, *rest: Any
    ) -> None:
        self.buffer = emulated.Buffer(HERE.comm, nvl, rdma, low_latency, enable_shrink=shrink)
        assert (self.buffer.rank, self.buffer.group_size) == (rank, size)
        self.handles: list[tuple[Any, ...]] = []

    def get_local_device_id(self) -> int:
        return 0

    def get_local_ipc_handle(self) -> bytes:
        return b""

    def get_local_nvshmem_unique_id(self) -> bytes:
        return b""

    def get_num_rdma_ranks(self) -> int:
        return 1

    def get_rdma_rank(self) -> int:
        return 0

    def get_root_rdma_rank(self, is_global: bool) -> int:
        return 0

    def sync(self, *handles: object) -> None:
        self.synced = True

    def is_available(self) -> bool:
        return self.synced

    def get_dispatch_layout(
        self, ids: Tensor, experts: int, previous: object, later: bool, on_comm: bool
    ) -> tuple[Any, ...]:
        *layout, event = self.buffer.get_dispatch_layout(ids, experts, None, later, on_comm)
        return (*layout, event.event)

    def intranode_dispatch(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, per_rank: Tensor, in_rank: Tensor,
        per_expert: Tensor, cached: int, prefix: object, channels: object, alignment: int, worst: int, config: Any,
        previous: object, later: bool, on_comm: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        rows, ids, weights, counts, handle, event = self.buffer.dispatch(
            x if scales is None else (x, scales), None, per_rank, None, in_rank, per_expert, ids, weights, alignment,
            worst, config, None, later, on_comm,
        )  # fmt: skip
        self.handles.append(handle)
        prefix_WW, channel, recv_channel, source, _, head = handle
        x, scales = rows if isinstance(rows, tuple) else (rows, None)
        return x, scales, ids, weights, counts, prefix_WW, channel, recv_channel, source, head, event.event

    def intranode_combine(
        self, x: Tensor, weights: Tensor | None, bias_0: Tensor | None, bias_1: Tensor | None, source: Tensor,
        prefix_WW: Tensor, channel: Tensor, head: Tensor, config: Any, previous: object, later: bool, on_comm: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        handle = next(handle for handle in self.handles if handle[0] is prefix_WW)
        assert handle[3] is source and handle[5] is head and bias_0 is None and bias_1 is None
        got, weights, event = self.buffer.combine(x, handle, weights, None, config, None, later, on_comm)
        return got, weights, event.event

    def low_latency_dispatch(
        self, x: Tensor, ids: Tensor, stats: object, waits: object, global_scale: object, most: int, experts: int,
        fp8: bool, round_scale: bool, ue8m0: bool, nvfp4: bool, later: bool, hook: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert global_scale is None and not nvfp4
        rows, counts, handle, event, receive = self.buffer.low_latency_dispatch(
            x, ids, most, experts, stats, waits, fp8, round_scale, ue8m0, later, hook
        )
        x, scales = rows if isinstance(rows, tuple) else (rows, None)
        return x, scales, counts, handle[0], handle[1], event.event, receive

    def low_latency_combine(
        self, x: Tensor, ids: Tensor, weights: Tensor, source: Tensor, ranges: Tensor, waits: object, most: int,
        experts: int, logfmt: bool, zero_copy: bool, later: bool, hook: bool, out: Tensor | None, *overlap: object,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert overlap == (False, None, 0)
        handle = (source, ranges, most, x.shape[2], experts)
        got, event, receive = self.buffer.low_latency_combine(
            x, ids, weights, handle, logfmt, zero_copy, later, hook, out
        )
        return got, event.event, receive


def load_wheel(wheel: Path, into: Path, **more: object) -> types.SimpleNamespace:
    """Unpack the Python of a wheel and import its V1 buffers over the module above; undo with `unload_wheel`.

    more: what the native module has besides.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name.endswith(".py")])
    package, native = types.ModuleType("deep_ep"), types.ModuleType("deep_ep._C")
    package.__path__ = [str(into / "deep_ep")]
    facts = {
        "Config": emulated.Config, "EventHandle": emulated.EventHandle, "topk_idx_t": torch.int64,
        "Buffer": NativeBuffer, **more,
        "get_low_latency_rdma_size_hint": lambda most, hidden, ranks, experts: low_latency_bytes(most, hidden, experts),
    }  # fmt: skip
    vars(native).update(facts)
    sys.modules.update({"deep_ep": package, "deep_ep._C": native})
    legacy: Any = importlib.import_module("deep_ep.buffers.legacy")
    replace_what_asks_for_gpus(legacy)
    legacy.dist = types.SimpleNamespace(
        all_gather_object=lambda into, part, group: into.__setitem__(slice(None), [part] * len(into))
    )
    return types.SimpleNamespace(Buffer=legacy.Buffer, topk_idx_t=torch.int64)


def unload_wheel() -> None:
    for name in [name for name in sys.modules if name == "deep_ep" or name.startswith("deep_ep.")]:
        del sys.modules[name]


def replace_what_asks_for_gpus(module: Any) -> None:
    module.check_nvlink_connections = lambda group: None
    module.check_torch_deterministic = lambda: None
