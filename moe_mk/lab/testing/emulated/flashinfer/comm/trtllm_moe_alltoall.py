"""`flashinfer.comm.trtllm_moe_alltoall`: one-sided all-to-all, rows written straight into peers' workspaces.

A workspace of one rank: [counters, flags, routes | payload regions (R, M, row) | combine region (R, M, H)]. M, the
runtime maximum of tokens, is the stride of everybody's regions. An id names its rank by integer division, so -1 means
rank 0; only rows behind a source's count can be given another id.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.flashinfer.comm.launch import (
    ILLEGAL,
    MAX_TOP_K,
    SfLayout,
    aligned,
    alive_ranks,
    check,
    check_backend,
    check_dispatch,
    rank_of,
)
from moe_mk.lab.testing.emulated.flashinfer.comm.mnnvl import MnnvlMemory
from moe_mk.lab.testing.emulated.live import swap_among
from moe_mk.lab.testing.emulated.pending import poison


def moe_a2a_active_rank_mask(active_ranks: Sequence[int], ep_size: int) -> Tensor:
    """One uint64 on the CPU with the bits of the ranks that take part."""
    assert all(0 <= rank < ep_size for rank in active_ranks), f"ranks {list(active_ranks)} out of range [0, {ep_size})"
    return torch.tensor([sum(1 << rank for rank in set(active_ranks))], dtype=torch.uint64, device="cpu")


def moe_a2a_get_aux_data_size(ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int = 0) -> int:
    """Bytes before the payloads: counters, two lines of flags, target ranks and slots of K = 22, statistics."""
    sizes = [8 + 8 * ep_size, 4 * ep_size, 4 * ep_size, *[4 * MAX_TOP_K * max_num_tokens] * 2]
    return sum(map(aligned, [*sizes, 4 * ep_size * eplb_stats_num_experts]))


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Bytes of one rank's workspace."""
    check_backend(backend)
    rows = ep_size * max_num_tokens
    payloads = aligned(rows * total_dispatch_payload_size_per_token) + aligned(rows * combine_payload_size_per_token)
    return moe_a2a_get_aux_data_size(ep_size, max_num_tokens, eplb_stats_num_experts) + payloads


def moe_a2a_initialize(
    workspace: Tensor,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> Tensor:
    """Forget all flags; returns where the payloads begin, as metainfo."""
    check_backend(backend)
    check(workspace.dtype == torch.uint8 and workspace.dim() == 2, "workspace must be a 2D uint8 tensor")
    check(workspace.size(0) == ep_size, "workspace first dim must equal ep_size")
    check(0 <= ep_rank < ep_size, "epRank out of range")
    memory = MnnvlMemory.of(workspace)
    memory.epoch, memory.state = 0, {}
    payloads_at = moe_a2a_get_aux_data_size(ep_size, max_num_tokens, eplb_stats_num_experts)
    return torch.tensor([payloads_at, eplb_stats_num_experts], dtype=torch.int64, device="cpu")


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: Tensor, leading_shape: Sequence[int], slice_start: int, slice_end: int, dtype: torch.dtype
) -> Tensor:
    """Bytes of a workspace, counted from its first, as a tensor."""
    flat = workspace.reshape(-1)[slice_start:slice_end].view(dtype)
    return flat.view(*leading_shape, flat.numel() // prod(leading_shape))


def moe_a2a_dispatch(
    token_selected_experts: Tensor,
    input_payloads: list[Tensor],
    workspace: Tensor,
    metainfo: Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    eplb_local_stats: Tensor | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Tensor | None = None,
    *,
    backend: str = "trtllm",
    recv_view_cache: dict[Any, Any] | None = None,
) -> tuple[list[Tensor], int, Tensor | None]:
    """Send every token once to each rank of its experts; returns views (R, M, *) of what has arrived.

    Also returns the offset of the combine region, and the gathered statistics. A masked rank gets no rows and is not
    waited for.
    """
    del enable_pdl, recv_view_cache
    check_backend(backend)
    most = runtime_max_tokens_per_rank
    check_dispatch(token_selected_experts, input_payloads, top_k, num_experts, ep_size, most)
    memory, at = MnnvlMemory.of(workspace), int(metainfo[0])
    views, mine = [], workspace[ep_rank]
    for payload in input_payloads:
        end = at + ep_size * most * payload.size(1) * payload.element_size()
        check(end <= mine.numel(), f"workspace size per rank insufficient, need {end} bytes but has {mine.numel()}")
        views.append(moe_a2a_wrap_payload_tensor_in_workspace(mine, [ep_size, most], at, end, payload.dtype))
        at = end
    poison(mine[at:])  # what is behind the payloads may be overwritten by anybody's next combine
    alive = alive_ranks(enable_rank_mask, active_rank_mask, ep_rank, ep_size)
    rank_TK = rank_of(token_selected_experts, num_experts, ep_size)
    alive_W = torch.tensor(alive, dtype=torch.bool, device=rank_TK.device)
    rank_TK = torch.where(alive_W[rank_TK.long()], rank_TK, -1)
    order_of_W = [_shuffled(torch.nonzero((rank_TK == rank).any(1)).flatten(), memory) for rank in range(ep_size)]
    terms = memory.epoch, most
    present = [rank for rank, on in enumerate(alive) if on]
    arrived = swap_among(
        memory.comm.exchange,
        [
            [
                torch.tensor([terms], dtype=torch.int64, device="cpu"),
                _stats(eplb_local_stats, int(metainfo[1])),
                *(p[order] for p in input_payloads),
            ]
            for order in order_of_W
        ],
        present,
        "dispatch",
    )
    # On a GPU unequal strides corrupt rows, and unequal epochs hang; here they are reported.
    reported = [tuple(arrived[rank][0].flatten().tolist()) for rank in present]
    check(set(reported) == {terms}, f"ranks disagree on (epoch, runtime_max_tokens_per_rank): {reported}")
    memory.epoch += 1
    for view, received in zip(views, zip(*(parts[2:] for parts in arrived), strict=True), strict=True):
        poison(view)
        for source, rows in enumerate(received):
            view[source, : len(rows)] = rows
    memory.state = {"order_of_W": order_of_W, "received": [len(parts[2]) for parts in arrived]}
    gathered = None if eplb_local_stats is None else torch.cat([parts[1] for parts in arrived])
    return views, aligned(at), gathered


def moe_a2a_combine(
    payload: Tensor,
    local_num_tokens: int,
    workspace: Tensor,
    metainfo: Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: torch.dtype | None = None,
    output_scales: Tensor | None = None,
    output_scalar_scale: float = 1.0,
    sf_layout: SfLayout = SfLayout.layout_linear,
    output: Tensor | None = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Tensor | None = None,
    backend: str = "trtllm",
) -> Tensor:
    """Read the rows of this rank's tokens from all peers and add them up, in f32: (T, H)."""
    del metainfo, top_k, output_scalar_scale, sf_layout, enable_pdl
    check_backend(backend)
    alive = alive_ranks(enable_rank_mask, active_rank_mask, ep_rank, ep_size)
    check(payload.is_contiguous() and payload.dim() == 3, "payload must be [ep_size, runtime_max_tokens, hidden]")
    check(tuple(payload.shape[:2]) == (ep_size, runtime_max_tokens_per_rank), f"payload is {tuple(payload.shape)}")
    check(output_scales is None, "Quantized moe_a2a_combine requires SM>=100 (Blackwell)")
    mine, num_bytes = workspace[ep_rank], payload.numel() * payload.element_size()
    check(combine_payload_offset + num_bytes <= mine.numel(), "workspace insufficient for combine payload region")
    expected = mine[combine_payload_offset:].data_ptr()
    check(
        not payload_in_workspace or payload.data_ptr() == expected,
        "payload_in_workspace is True but tensor pointer mismatch",
    )
    floats = (torch.bfloat16, torch.float16, torch.float32)
    check(payload.dtype in floats, f"Unsupported dtype for MoE combine: {payload.dtype}")
    wanted = output_dtype or (torch.bfloat16 if use_low_precision else payload.dtype)
    check(wanted == payload.dtype or use_low_precision, "output_dtype without output_scales must match payload dtype")
    memory = MnnvlMemory.of(workspace)
    state, memory.state = memory.state, {}
    check(bool(state), ILLEGAL)
    sent = payload.to(torch.float8_e4m3fn).to(payload.dtype) if use_low_precision else payload
    rows = [[sent[source, :count].contiguous()] for source, count in enumerate(state["received"])]
    total = torch.zeros((local_num_tokens, payload.size(2)), dtype=torch.float32, device=payload.device)
    present = [rank for rank, on in enumerate(alive) if on]
    swapped = swap_among(memory.comm.exchange, rows, present, "combine")
    for rank in present:
        order, (part,) = state["order_of_W"][rank], swapped[rank]
        total.index_add_(0, order, part.to(torch.float32))
    result = total.to(wanted)
    return result if output is None else output.copy_(result)


def moe_a2a_sanitize_expert_ids(
    expert_ids: Tensor,
    workspace: Tensor,
    metainfo: Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Overwrite the ids of padding, in place. Ids of other ranks stay in rows that did arrive."""
    del metainfo, ep_rank, enable_pdl
    check_backend(backend)
    check(expert_ids.dtype == torch.int32 and expert_ids.dim() == 3, "expert_ids must be a 3D int32 tensor")
    for source, count in enumerate(MnnvlMemory.of(workspace).state["received"]):
        expert_ids[source, count:] = invalid_expert_id


def _shuffled(tokens: Tensor, memory: MnnvlMemory) -> Tensor:
    """Slots are claimed by atomics: any order."""
    return tokens[torch.randperm(len(tokens), generator=memory.draw, dtype=torch.int64, device="cpu")]


def _stats(local: Tensor | None, reserved: int) -> Tensor:
    if local is None:
        return torch.empty((0, 0), dtype=torch.int32, device="cpu")
    check(local.dtype == torch.int32 and local.dim() == 1, "eplb_local_stats must be a 1D int32 tensor")
    check(0 < len(local) <= reserved, f"eplb_local_stats size ({len(local)}) exceeds the {reserved} reserved")
    return local[None]
