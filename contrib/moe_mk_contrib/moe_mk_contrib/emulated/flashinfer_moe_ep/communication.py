"""`flashinfer.moe_ep`: sizes of a group, what a dispatch returns, and the registry of communication backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

REGISTRY: dict[str, type[MoEEpCommunication]] = {}


@dataclass(frozen=True)
class BootstrapConfig:
    """The rank and its group. Backends of other kinds read the other fields."""

    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    device: int | None = field(default=None, kw_only=True)
    nccl_comm: int | None = None
    process_group: Any = field(default=None, compare=False, hash=False)
    tcp_store: Any = None

    def __post_init__(self) -> None:
        if self.world_size <= 0:
            raise ValueError(f"world_size must be positive, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} not in [0, {self.world_size})")
        if self.device is not None and self.device < 0:
            raise ValueError(f"device must be non-negative, got {self.device}")


@dataclass(frozen=True)
class MoEEpCommParams:
    """Sizes that ranks agree on. Rows travel as `dtype`, or in less bytes."""

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    dispatch_format: Any = None
    invalid_expert_id: int = -1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "max_tokens_per_rank", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"MoEEpCommParams.{name} must be a positive int")
        if self.top_k > self.num_experts:
            raise ValueError(f"MoEEpCommParams.top_k ({self.top_k}) exceeds num_experts ({self.num_experts})")
        if 0 <= self.invalid_expert_id < self.num_experts:
            raise ValueError("MoEEpCommParams.invalid_expert_id must be outside [0, num_experts)")
        if self.dispatch_format is not None:
            raise NotImplementedError("dispatch formats are not emulated: rows are reserved in `dtype`")

    @property
    def token_dtype(self) -> torch.dtype:
        """bf16 unless stated."""
        return torch.bfloat16 if self.dtype is None else self.dtype

    @property
    def dispatch_bytes_per_token(self) -> int:
        """Bytes that are reserved for one token on the wire."""
        return self.hidden_size * self.token_dtype.itemsize


@dataclass(frozen=True)
class MoEEpDispatchResult:
    """Room for `tokens_per_rank` rows of every rank; valid until combine."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None
    tokens_per_rank: int
    hidden_states_scale: Tensor | None = None
    eplb_gathered_stats: Tensor | None = None


class MoEEpCommunication(ABC):
    """Dispatch, then exactly one combine, then the next dispatch; the same on every rank."""

    backend_name: ClassVar[str]
    supports_cuda_graph: ClassVar[bool] = True

    def __init__(self, bootstrap: BootstrapConfig, params: MoEEpCommParams) -> None:
        if not self.is_platform_supported():
            raise RuntimeError(f"{type(self).__name__} is not supported on this platform.")
        self.bootstrap, self.params = bootstrap, params
        self.ep_rank, self.ep_size = bootstrap.rank, bootstrap.world_size
        if params.num_experts % self.ep_size:
            raise ValueError(
                f"{type(self).__name__} requires num_experts ({params.num_experts}) divisible by the EP size "
                f"({self.ep_size})"
            )
        self.num_local_experts = params.num_experts // self.ep_size

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Whether this machine can; an emulation runs anywhere."""
        return True

    def is_workload_feasible(self, max_tokens_per_rank: int) -> bool:
        """Whether so many tokens fit."""
        return max_tokens_per_rank <= self.params.max_tokens_per_rank

    @abstractmethod
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """Send each token to the ranks of its experts."""

    @abstractmethod
    def combine(self, expert_output: Tensor, *, output: Tensor | None = None) -> Tensor:
        """Sum the rows of each token over ranks."""

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Tensor | None:
        """Memory of the backend that experts may write into."""
        del dtype
        return None

    def destroy(self) -> None:  # noqa: B027  (nothing to do by default, as in the library)
        """Release what is held."""


def register_communication(name: str) -> Callable[[type[MoEEpCommunication]], type[MoEEpCommunication]]:
    """Make a class known."""

    def decorator(cls: type[MoEEpCommunication]) -> type[MoEEpCommunication]:
        cls.backend_name = name
        REGISTRY[name] = cls
        return cls

    return decorator


def create_communication(
    bootstrap: BootstrapConfig, params: MoEEpCommParams, backend: Any, **options: Any
) -> MoEEpCommunication:
    """The backend of a name, or of a config with one."""
    name = getattr(backend, "backend_name", backend)
    if not isinstance(name, str):
        raise TypeError(f"backend must be a string or have a .backend_name str attr; got {backend!r}")
    if name not in REGISTRY:
        raise KeyError(f"unknown communication backend {name!r}; available: {sorted(REGISTRY)}")
    if not isinstance(backend, str):
        options["config"] = backend
    return REGISTRY[name](bootstrap, params, **options)
