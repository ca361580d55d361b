"""`flashinfer.comm.mnnvl`: memory that all GPUs of an NVLink domain map, and who is in it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.lab.testing.emulated.exchange import Exchange, exchange_over
from moe_mk.lab.testing.emulated.flashinfer.comm.mapping import Mapping


class TorchDistBackend:
    """A process group as FlashInfer's communication backends have it."""

    def __init__(self, group: object | None = None) -> None:
        if group is None and not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialized")
        self._group: object = dist.group.WORLD if group is None else group
        self.exchange: Exchange = exchange_over(self._group)

    def Get_rank(self) -> int:
        """The rank in the group."""
        return self.exchange.rank

    def Get_size(self) -> int:
        """How many ranks there are."""
        return self.exchange.size

    def allgather(self, data: int) -> tuple[int, ...]:
        """Everybody's number; the library takes any object."""
        mine = torch.tensor([data], dtype=torch.int64, device="cpu")
        swapped = self.exchange.swap([[mine]] * self.Get_size(), "allgather")
        return tuple(int(tensors[0].item()) for tensors in swapped)

    def bcast(self, data: int, root: int) -> int:
        """The number of one rank."""
        return self.allgather(data)[root]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.allgather(0)

    def Split(self, color: int, key: int) -> TorchDistBackend:
        """The group of one colour; only a split that leaves the group whole and in order is emulated."""
        if len(set(self.allgather(color))) > 1 or list(self.allgather(key)) != list(range(self.Get_size())):
            raise NotImplementedError("only a split into the whole group, in rank order, is emulated")
        return TorchDistBackend(self._group)

    def same_group(self, other: TorchDistBackend) -> bool:
        """Whether both speak over one group."""
        return self._group is other._group


@dataclass
class MnnvlConfig:
    """How MNNVL memory finds its peers."""

    comm_backend: TorchDistBackend | None = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


class Process(threading.local):
    """State that the library keeps once for a process; here, a rank that is a thread has its own."""

    def __init__(self) -> None:
        self.comm: TorchDistBackend | None = None
        self.workspaces: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.two_sided: dict[str, Any] = {}


PROCESS = Process()


class MnnvlMemory:
    """A segment of every rank, mapped by all. Here each rank has its own alone; peers are reached by exchange."""

    def __init__(self, mapping: Mapping, size: int) -> None:
        if PROCESS.comm is None:
            raise RuntimeError("mpi4py is not installed, and no MnnvlConfig named a comm_backend")
        self.mapping, self.segment_size, self.comm = mapping, size, PROCESS.comm
        self.epoch = 0
        self.draw = torch.Generator("cpu").manual_seed(self.comm.Get_rank())
        """Decides the order in which rows arrive, as atomics of a GPU do."""
        self.state: dict[str, Any] = {}
        """What kernels leave in the segment for later kernels."""

    @property
    def mapped(self) -> bool:
        """Whether handles are mapped; checkpointing is not emulated."""
        return True

    @staticmethod
    def initialize() -> None:
        """Nothing to initialise without a device."""

    @staticmethod
    def set_comm_from_config(mapping: Mapping, config: MnnvlConfig) -> None:
        """Use the backend of a config from now on."""
        if config.comm_backend is None:
            raise RuntimeError("mpi4py is not installed, and no MnnvlConfig named a comm_backend")
        PROCESS.comm = config.comm_backend.Split(0, mapping.tp_rank)

    def as_torch_strided_tensor(self, dtype: torch.dtype) -> Tensor:
        """(ranks, elements): the segments of all ranks. Only this rank's holds anything."""
        elements = self.segment_size // dtype.itemsize
        tensor = torch.empty((self.comm.Get_size(), elements), dtype=dtype, device="cpu")
        tensor.mnnvl_memory = self  # type: ignore[attr-defined]
        return tensor

    @staticmethod
    def of(workspace: Tensor) -> MnnvlMemory:
        """The memory behind a workspace; a tensor of any other origin would be an illegal access."""
        memory = getattr(workspace, "mnnvl_memory", None)
        if not isinstance(memory, MnnvlMemory):
            raise RuntimeError("CUDA error: an illegal memory access was encountered (workspace is not MNNVL memory)")
        return memory
