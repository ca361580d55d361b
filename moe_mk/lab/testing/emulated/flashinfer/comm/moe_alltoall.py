"""`flashinfer.comm.MoeAlltoAll`: one-sided all-to-all with its workspace and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.flashinfer.comm import trtllm_moe_alltoall as a2a
from moe_mk.lab.testing.emulated.flashinfer.comm.launch import SfLayout
from moe_mk.lab.testing.emulated.flashinfer.comm.mapping import Mapping
from moe_mk.lab.testing.emulated.flashinfer.comm.mnnvl import PROCESS, MnnvlConfig, MnnvlMemory


@dataclass
class _A2AState:
    phase: str = "idle"
    local_num_tokens: int | None = None
    combine_payload_offset: int | None = None
    eplb_gathered_stats: Tensor | None = None


class MoeAlltoAll:
    """Dispatch, then combine, then the next dispatch. Equal sizes share one workspace within a process."""

    _METAINFO_INDEX: ClassVar[dict[str, int] | None] = None

    @classmethod
    def get_workspace(
        cls,
        workspace_size_per_rank: int,
        ep_rank: int,
        ep_size: int,
        max_num_tokens: int,
        mapping: Mapping,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> dict[str, Any]:
        """The workspace of this geometry; made, cleared and waited for by all ranks at first use."""
        key = (workspace_size_per_rank, ep_rank, ep_size, max_num_tokens, eplb_stats_num_experts, backend)
        if key not in PROCESS.workspaces:
            memory = MnnvlMemory(mapping, workspace_size_per_rank)
            workspace = memory.as_torch_strided_tensor(torch.uint8)
            metainfo = a2a.moe_a2a_initialize(
                workspace, ep_rank, ep_size, max_num_tokens, eplb_stats_num_experts, backend=backend
            )
            memory.comm.barrier()
            PROCESS.workspaces[key] = {"mnnvl_mem": memory, "workspace": workspace, "metainfo": metainfo}
        held = PROCESS.workspaces[key]
        # The library would go on over the group of the first caller.
        assert PROCESS.comm is None or PROCESS.comm.same_group(held["mnnvl_mem"].comm), "a workspace of another group"
        return held

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> int:
        """Bytes of one rank for 16-bit rows with ids and weights."""
        row = 2 * hidden_size
        dispatch = row + 8 * top_k + extra_payload_bytes_per_token
        return a2a.moe_a2a_get_workspace_size_per_rank(
            ep_size, max_num_tokens, dispatch, row, eplb_stats_num_experts, backend=backend
        )

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ) -> None:
        if not isinstance(top_k, int) or top_k <= 0:
            raise ValueError("top_k must be a positive int")
        if not isinstance(num_experts, int) or num_experts <= 0:
            raise ValueError("num_experts must be a positive int")
        self.ep_size, self.ep_rank = mapping.moe_ep_size, mapping.moe_ep_rank
        if workspace_size_per_rank is None:
            assert hidden_size is not None, "hidden_size must be provided if workspace_size_per_rank is not provided"
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                self.ep_size, top_k, max_num_tokens, hidden_size, eplb_stats_num_experts=eplb_stats_num_experts
            )
        if mnnvl_config is not None:
            MnnvlMemory.set_comm_from_config(mapping, mnnvl_config)
        self.workspace_size_per_rank, self.max_num_tokens = workspace_size_per_rank, max_num_tokens
        self.top_k, self.num_experts, self._backend = top_k, num_experts, backend
        self.eplb_stats_num_experts, self.enable_rank_mask = eplb_stats_num_experts, enable_rank_mask
        held = self.get_workspace(
            workspace_size_per_rank, self.ep_rank, self.ep_size, max_num_tokens, mapping, eplb_stats_num_experts,
            backend=backend,
        )  # fmt: skip
        self.mnnvl_mem, self.workspace, self.metainfo = held["mnnvl_mem"], held["workspace"], held["metainfo"]
        self._state = _A2AState()

    @property
    def eplb_gathered_stats(self) -> Tensor | None:
        """(ranks, experts): everybody's statistics of the dispatch under way."""
        return self._state.eplb_gathered_stats

    def checkpoint_prepare(self) -> None:
        """Raise an error: this function is not emulated."""
        raise NotImplementedError("checkpointing is not emulated")

    def checkpoint_restore(self, comm_backend: object) -> None:
        """Raise an error: this function is not emulated."""
        raise NotImplementedError("checkpointing is not emulated")

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: list[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> list[Tensor]:
        """Views (R, M, *) of the workspace, valid until the next dispatch over it."""
        assert self._state.phase == "idle", "dispatch called twice without combine"
        assert runtime_max_tokens_per_rank <= self.max_num_tokens, "runtime_max_tokens_per_rank exceeds max_num_tokens"
        assert eplb_local_stats is None or self.eplb_stats_num_experts, "constructed with eplb_stats_num_experts=0"
        self._check_mask(active_rank_mask)
        received, offset, stats = a2a.moe_a2a_dispatch(
            token_selected_experts, input_payloads, self.workspace, self.metainfo, runtime_max_tokens_per_rank,
            self.ep_rank, self.ep_size, self.top_k, self.num_experts, eplb_local_stats=eplb_local_stats,
            enable_rank_mask=self.enable_rank_mask, active_rank_mask=active_rank_mask, backend=self._backend,
        )  # fmt: skip
        self._state = _A2AState("dispatched", len(token_selected_experts), offset, stats)
        if invalid_token_expert_id is not None:
            assert expert_id_payload_index is not None, "expert_id_payload_index required"
            a2a.moe_a2a_sanitize_expert_ids(
                received[expert_id_payload_index], self.workspace, self.metainfo, self.ep_rank, invalid_token_expert_id
            )
        return received

    def combine(
        self,
        payload: Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: SfLayout = SfLayout.layout_linear,
        output: Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: Tensor | None = None,
    ) -> Tensor:
        """(T, H) of the tokens that the last dispatch was given."""
        assert self._state.phase == "dispatched", "combine called before successful dispatch"
        assert runtime_max_tokens_per_rank <= self.max_num_tokens, "runtime_max_tokens_per_rank exceeds max_num_tokens"
        self._check_mask(active_rank_mask)
        tokens, offset = self._state.local_num_tokens, self._state.combine_payload_offset
        assert tokens is not None and offset is not None
        combined = a2a.moe_a2a_combine(
            payload, tokens, self.workspace, self.metainfo, runtime_max_tokens_per_rank, self.ep_rank, self.ep_size,
            self.top_k, offset, payload_in_workspace, output_dtype, output_scales, output_scalar_scale, sf_layout,
            output, use_low_precision=use_low_precision, enable_rank_mask=self.enable_rank_mask,
            active_rank_mask=active_rank_mask, backend=self._backend,
        )  # fmt: skip
        self._state = _A2AState()
        return combined

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        """(R, M, H) in the combine region, for experts that write there; combine then stages nothing."""
        if self._state.phase != "dispatched" or self._state.combine_payload_offset is None:
            raise RuntimeError("get_combine_payload_tensor_in_workspace called before successful dispatch")
        start = self._state.combine_payload_offset
        end = start + self.ep_size * runtime_max_tokens_per_rank * hidden_size * dtype.itemsize
        shape = [self.ep_size, runtime_max_tokens_per_rank]
        return a2a.moe_a2a_wrap_payload_tensor_in_workspace(self.workspace[self.ep_rank, :], shape, start, end, dtype)

    def _check_mask(self, mask: Tensor | None) -> None:
        if mask is not None and not self.enable_rank_mask:
            raise ValueError("active_rank_mask requires the instance to have been constructed with enable_rank_mask")
