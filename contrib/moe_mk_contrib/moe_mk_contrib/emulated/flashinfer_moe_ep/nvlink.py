"""`flashinfer.moe_ep` over NVLink: the one-sided primitive, the same with Cake kernels, and the two-sided one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.flashinfer.comm import trtllm_moe_alltoall as a2a
from moe_mk.lab.testing.emulated.flashinfer.comm.mapping import Mapping
from moe_mk.lab.testing.emulated.flashinfer.comm.mnnvl import MnnvlConfig, MnnvlMemory, TorchDistBackend
from moe_mk.lab.testing.emulated.flashinfer.comm.moe_alltoall import MoeAlltoAll
from moe_mk.lab.testing.emulated.flashinfer.comm.trtllm_alltoall import MnnvlMoe
from moe_mk_contrib.emulated.flashinfer_moe_ep.communication import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpDispatchResult,
    register_communication,
)

TWICE = "dispatch called twice without an intervening combine"


@dataclass
class NVLinkOneSidedConfig:
    """Options of the one-sided backend."""

    backend_name: str = "nvlink_one_sided"
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: Any = None


@dataclass
class CakeAlltoAllConfig(NVLinkOneSidedConfig):
    """The same for the Cake kernels."""

    backend_name: str = "cake"


@dataclass
class NVLinkTwoSidedConfig:
    """Options of the two-sided backend."""

    backend_name: str = "nvlink_two_sided"
    comm_backend: Any = None


def mnnvl_mapping_and_config(bootstrap: BootstrapConfig, comm_backend: Any = None) -> tuple[Mapping, MnnvlConfig]:
    """All ranks as one NVLink domain; every rank states whether it can."""
    if comm_backend is None:
        comm_backend = TorchDistBackend(group=bootstrap.process_group)
    if comm_backend.Get_size() != bootstrap.world_size:
        raise ValueError(
            f"MNNVL communicator has {comm_backend.Get_size()} ranks but the EP group has "
            f"world_size={bootstrap.world_size}"
        )
    if comm_backend.Get_rank() != bootstrap.rank:
        raise ValueError(
            f"MNNVL communicator rank {comm_backend.Get_rank()} does not match the EP rank {bootstrap.rank}"
        )
    comm_backend.allgather(1)
    size = bootstrap.world_size
    mapping = Mapping(size, bootstrap.rank, size, tp_size=size, moe_ep_size=size)
    return mapping, MnnvlConfig(comm_backend=comm_backend)


def _room(params: MoEEpCommParams, asked: int | None) -> int:
    """Rows of each rank in this step."""
    most = params.max_tokens_per_rank
    rows = most if asked is None else asked
    if not 0 < rows <= most:
        raise ValueError(f"max_tokens_per_rank={rows} must be in (0, {most}]")
    return rows


@register_communication("nvlink_one_sided")
class NVLinkOneSidedAlltoAll(MoEEpCommunication):
    """Rows, scales, ids and weights as payloads of one dispatch. Equal sizes share one workspace within a process."""

    alltoall_backend: ClassVar[str] = "trtllm"

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: NVLinkOneSidedConfig | None = None
    ) -> None:
        self.config = NVLinkOneSidedConfig() if config is None else config
        mapping, mnnvl_config = mnnvl_mapping_and_config(bootstrap, self.config.comm_backend)
        super().__init__(bootstrap, params)
        if self.config.extra_payload_bytes_per_token < 0:
            raise ValueError("extra_payload_bytes_per_token must be non-negative")
        dispatched = params.dispatch_bytes_per_token + 8 * params.top_k + self.config.extra_payload_bytes_per_token
        size = a2a.moe_a2a_get_workspace_size_per_rank(
            self.ep_size, params.max_tokens_per_rank, dispatched,
            params.hidden_size * max(params.token_dtype.itemsize, 2), self.config.eplb_stats_num_experts,
            backend=self.alltoall_backend,
        )  # fmt: skip
        self._alltoall: MoeAlltoAll | None = MoeAlltoAll(
            mapping, params.max_tokens_per_rank, params.top_k, params.num_experts, size, mnnvl_config=mnnvl_config,
            eplb_stats_num_experts=self.config.eplb_stats_num_experts, enable_rank_mask=self.config.enable_rank_mask,
            backend=self.alltoall_backend,
        )  # fmt: skip
        self._tokens_per_rank: int | None = None
        self._combine_buffer: Tensor | None = None

    @property
    def alltoall(self) -> MoeAlltoAll:
        """The primitive."""
        if self._alltoall is None:
            raise RuntimeError("NVLinkOneSidedAlltoAll has been destroyed")
        return self._alltoall

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """See the base class. active_rank_mask: uint64 on the CPU."""
        alltoall = self.alltoall
        if self._tokens_per_rank is not None:
            raise RuntimeError(TWICE)
        rows = _room(self.params, max_tokens_per_rank)
        ids = topk_ids.to(torch.int32)
        payloads = [hidden_states, *([] if hidden_states_scale is None else [hidden_states_scale])]
        ids_at = len(payloads)
        payloads += [ids, *([] if topk_weights is None else [topk_weights])]
        received = alltoall.dispatch(
            ids, payloads, rows, invalid_token_expert_id=self.params.invalid_expert_id,
            expert_id_payload_index=ids_at, eplb_local_stats=eplb_local_stats, active_rank_mask=active_rank_mask,
        )  # fmt: skip
        self._tokens_per_rank = rows
        flat = [part.flatten(0, 1) for part in received]
        return MoEEpDispatchResult(
            hidden_states=flat[0],
            hidden_states_scale=None if hidden_states_scale is None else flat[1],
            topk_ids=flat[ids_at],
            topk_weights=None if topk_weights is None else flat[ids_at + 1],
            tokens_per_rank=rows,
            eplb_gathered_stats=alltoall.eplb_gathered_stats,
        )

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Tensor:
        """Rows in the combine region."""
        if self._tokens_per_rank is None:
            raise RuntimeError("get_combine_input_buffer called before dispatch")
        self._combine_buffer = self.alltoall.get_combine_payload_tensor_in_workspace(
            self._tokens_per_rank, self.params.hidden_size, dtype
        ).flatten(0, 1)
        return self._combine_buffer

    def combine(
        self, expert_output: Tensor, *, output: Tensor | None = None, active_rank_mask: Tensor | None = None
    ) -> Tensor:
        """See the base class. active_rank_mask: that of the dispatch."""
        alltoall, rows = self.alltoall, self._tokens_per_rank
        if rows is None:
            raise RuntimeError("combine called before dispatch")
        if expert_output.dim() not in (2, 3):
            raise ValueError(f"expert_output must be 2D or 3D, got shape {tuple(expert_output.shape)}")
        payload = expert_output.view(self.ep_size, rows, -1) if expert_output.dim() == 2 else expert_output
        own = self._combine_buffer
        combined = alltoall.combine(
            payload, rows, payload_in_workspace=own is not None and expert_output.data_ptr() == own.data_ptr(),
            output=output, use_low_precision=self.config.use_low_precision_combine, active_rank_mask=active_rank_mask,
        )  # fmt: skip
        self._tokens_per_rank = self._combine_buffer = None
        return combined

    def destroy(self) -> None:
        """Forget the workspace, which the process keeps."""
        self._alltoall = self._tokens_per_rank = self._combine_buffer = None


@register_communication("cake")
class CakeAlltoAll(NVLinkOneSidedAlltoAll):
    """The same protocol with other kernels."""

    alltoall_backend: ClassVar[str] = "cake"

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: CakeAlltoAllConfig | None = None
    ) -> None:
        super().__init__(bootstrap, params, CakeAlltoAllConfig() if config is None else config)


@register_communication("nvlink_two_sided")
class NVLinkTwoSidedAlltoAll(MoEEpCommunication):
    """Rows through the FIFOs of the process."""

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: NVLinkTwoSidedConfig | None = None
    ) -> None:
        self.config = NVLinkTwoSidedConfig() if config is None else config
        mapping, mnnvl_config = mnnvl_mapping_and_config(bootstrap, self.config.comm_backend)
        super().__init__(bootstrap, params)
        if params.num_experts % 4:
            raise ValueError(f"NVLinkTwoSidedAlltoAll requires num_experts divisible by 4, got {params.num_experts}")
        MnnvlMemory.initialize()
        self._workspace: Any = MnnvlMoe.get_moe_workspaces(mapping, mnnvl_config)
        self._prepare_workspace: Any = MnnvlMoe.get_moe_prepare_workspace(mapping, mnnvl_config)
        self._state: dict[str, Any] | None = None

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
        if self._state is not None:
            raise RuntimeError(TWICE)
        rows, experts = _room(self.params, max_tokens_per_rank), self.params.num_experts
        weights = None if topk_weights is None else topk_weights.to(torch.float32)
        info, ids, weights_RK, stats = MnnvlMoe.mnnvl_moe_alltoallv_prepare_without_allgather(
            topk_ids.to(torch.int32), weights, eplb_local_stats, self._prepare_workspace, rows, self.ep_rank,
            self.ep_size, experts, experts, self.params.top_k,
        )  # fmt: skip
        if self.params.invalid_expert_id != experts:
            ids.masked_fill_(ids == experts, self.params.invalid_expert_id)

        def pushed(part: Tensor) -> Tensor:
            return MnnvlMoe.mnnvl_moe_alltoallv(part, info, self._workspace, self.ep_rank, self.ep_size)

        received = pushed(hidden_states)
        scales = None if hidden_states_scale is None else pushed(hidden_states_scale)
        self._state = {"alltoall_info": info, "local_num_tokens": hidden_states.shape[0], "tokens_per_rank": rows}
        return MoEEpDispatchResult(received, ids, weights_RK, rows, scales, stats)

    def combine(self, expert_output: Tensor, *, output: Tensor | None = None) -> Tensor:
        state = self._state
        if state is None:
            raise RuntimeError("combine called before dispatch")
        rows = expert_output.flatten(0, 1) if expert_output.dim() == 3 else expert_output
        combined = MnnvlMoe.mnnvl_moe_alltoallv_combine(
            rows, state["alltoall_info"], self._workspace, ep_rank=self.ep_rank, ep_size=self.ep_size,
            top_k=self.params.top_k, token_count=state["local_num_tokens"],
        )  # fmt: skip
        self._state = None
        return combined if output is None else output.copy_(combined)

    def destroy(self) -> None:
        """Forget the workspaces, which the process keeps."""
        self._workspace = self._prepare_workspace = self._state = None
