"""`flashinfer.comm.trtllm_alltoall`: two-sided all-to-all, rows pushed through FIFOs whose size knows no tokens.

An id names its rank by integer division by slots of a rank: -1 means rank 0, `slot_count` and above no rank. Ids of
other ranks arrive as `slot_count`, and so do the ids of padding; weights arrive as they were, padding uninitialised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.flashinfer.comm.launch import check
from moe_mk.lab.testing.emulated.flashinfer.comm.mapping import Mapping
from moe_mk.lab.testing.emulated.flashinfer.comm.mnnvl import PROCESS, MnnvlConfig, MnnvlMemory
from moe_mk.lab.testing.emulated.pending import poison

SMS = 132
"""Multiprocessors of the GPU that is pretended, an H100 or H200."""
FIFO_BYTES = 8 * 256 * 1024
CONNECTION_BYTES = 256
PREPARE_FIFO_BYTES = 1024 * 1024
RANKS_PER_BLOCK = 8
MAX_TOP_K, ROW_ALIGNMENT = 32, 16
ONE_MAPPING = "only one moe mapping supported now"


@dataclass
class MoEAlltoallInfo:
    """Who sends which rows to whom, in both directions; indices behind the counts are uninitialised."""

    local_gather_indices: Tensor | None
    send_rank_count_cumsum: Tensor
    send_rank_local_indices: Tensor
    recv_rank_count_cumsum: Tensor
    recv_rank_local_indices: Tensor
    backward_recv_rank_local_indices: Tensor
    local_token_allocation_count: int


def get_moe_commworkspace_size_per_rank(ep_size: int) -> int:
    """Bytes of the FIFOs: 2 MiB for each channel and rank, as many channels as half the multiprocessors serve."""
    blocks = 2 * -(-ep_size // RANKS_PER_BLOCK)
    check(blocks <= SMS, f"GPU should support at lease one channel, usableSmCount={SMS}")
    return (FIFO_BYTES + CONNECTION_BYTES) * ep_size * max(SMS // 2 // blocks, 1)


def get_moe_prepare_workspace_size_per_rank(ep_size: int) -> int:
    """Bytes of the FIFOs for ids and weights."""
    return (PREPARE_FIFO_BYTES + CONNECTION_BYTES) * ep_size


class MnnvlMoe:
    """Static methods over workspaces of which a process has one each."""

    @staticmethod
    def get_moe_workspaces(mapping: Mapping, config: MnnvlConfig | None = None) -> Tensor:
        """The FIFOs for rows."""
        return _workspace("rows", get_moe_commworkspace_size_per_rank(mapping.tp_size), mapping, config)

    @staticmethod
    def get_moe_prepare_workspace(mapping: Mapping, config: MnnvlConfig | None = None) -> Tensor:
        """The FIFOs for ids, weights and statistics."""
        return _workspace("ids", get_moe_prepare_workspace_size_per_rank(mapping.tp_size), mapping, config)

    @staticmethod
    def compute_target_rank_id(token_selected_experts: Tensor, expert_count: int, ep_size: int) -> Tensor:
        """The rank of each id."""
        assert expert_count % ep_size == 0, "expert_count should be divisible by ep_size"
        return token_selected_experts // (expert_count // ep_size)

    @staticmethod
    def mnnvl_moe_alltoallv_prepare_without_allgather(
        expert_ids: Tensor,
        scales: Tensor | None,
        expert_statics: Tensor | None,
        workspace: Tensor,
        max_token_count_per_rank: int,
        ep_rank: int,
        ep_size: int,
        expert_count: int,
        slot_count: int,
        top_k: int,
    ) -> tuple[MoEAlltoallInfo, Tensor, Tensor | None, Tensor | None]:
        """Decide who sends what, and exchange ids, weights (`scales`) and statistics."""
        check(expert_count % 4 == 0, "expertCount must be divisible by 4")
        check(slot_count % 4 == 0, "slotCount must be divisible by 4")
        check(1 <= top_k <= MAX_TOP_K, "Only 1 <= topK <= 32 is supported now.")
        check(
            expert_ids.dtype == torch.int32 and expert_ids.shape[1:] == (top_k,), "expertsIds must be int32 (T, topK)"
        )
        check(scales is None or scales.dtype == torch.float32, "scales must be float32")
        check(len(expert_ids) <= max_token_count_per_rank, "CUDA error: an illegal memory access was encountered")
        memory = MnnvlMemory.of(workspace)
        rank_TK = torch.div(expert_ids, slot_count // ep_size, rounding_mode="trunc")
        order_of_W, place_of_W = _orders(rank_TK, memory, ep_size)
        parts = []
        for rank, token_X in enumerate(order_of_W):
            mine_XK = rank_TK[token_X] == rank
            parts.append([torch.where(mine_XK, expert_ids[token_X], slot_count)])
            parts[-1] += [] if scales is None else [scales[token_X]]
            if expert_statics is not None:
                parts[-1].append(expert_statics[None])
        arrived = memory.comm.exchange.swap(parts, "prepare")
        rows = max_token_count_per_rank * ep_size
        ids = torch.full((rows, top_k), slot_count, dtype=torch.int32, device=expert_ids.device)
        received = torch.cat([part[0] for part in arrived])
        ids[: len(received)] = received
        weights = None if scales is None else _held(torch.cat([part[1] for part in arrived]), rows)
        info = MoEAlltoallInfo(
            None,
            _cumsum([len(token_X) for token_X in order_of_W]),
            _indices(order_of_W, max_token_count_per_rank * max(ep_size, top_k)),
            _cumsum([len(part[0]) for part in arrived]),
            _indices([torch.arange(len(received), dtype=torch.int64, device=ids.device)], rows),
            _indices(place_of_W, max_token_count_per_rank * max(ep_size, top_k)),
            rows,
        )
        statics = None if expert_statics is None else torch.cat([part[-1] for part in arrived])
        return info, ids, weights, statics

    @staticmethod
    def mnnvl_moe_alltoallv_prepare(
        gathered_target_rank_ids: Tensor,
        real_rank_token_count_cumsum: Tensor,
        gathered_expert_ids: Tensor,
        gathered_scales: Tensor,
        max_token_count_per_rank: int,
        expert_count: int,
        top_k: int,
        ep_rank: int,
        ep_size: int,
    ) -> tuple[MoEAlltoallInfo, Tensor, Tensor]:
        """The older form, for ids that an all-gather has brought already; not emulated."""
        raise NotImplementedError("only the form without all-gather is emulated")

    @staticmethod
    def mnnvl_moe_alltoallv(
        x: Tensor, alltoall_info: MoEAlltoallInfo, workspace: Tensor, ep_rank: int, ep_size: int
    ) -> Tensor:
        """Rows to the ranks of their experts: a prefix of (R M, columns), the rest uninitialised."""
        assert x.dim() == 2, "only 2D tensor supported, please reshape."
        info = alltoall_info
        output = torch.empty((info.local_token_allocation_count, x.shape[1]), dtype=x.dtype, device=x.device)
        send = (info.send_rank_count_cumsum, info.send_rank_local_indices)
        receive = (info.recv_rank_count_cumsum, info.recv_rank_local_indices)
        return _moe_comm(x, send, poison(output), receive, workspace, "dispatch")

    @staticmethod
    def mnnvl_moe_alltoallv_combine(
        x: Tensor,
        alltoall_info: MoEAlltoallInfo,
        workspace: Tensor,
        ep_rank: int,
        ep_size: int,
        top_k: int,
        token_count: int,
    ) -> Tensor:
        """Rows back into one of the K places of their token, then a sum over K in the dtype of x."""
        assert x.dim() == 2, "2D tensor supported, please reshape."
        info = alltoall_info
        places = torch.zeros((token_count * top_k, x.shape[1]), dtype=x.dtype, device=x.device)
        send = (info.recv_rank_count_cumsum, info.recv_rank_local_indices)
        receive = (info.send_rank_count_cumsum, info.backward_recv_rank_local_indices)
        _moe_comm(x, send, places, receive, workspace, "combine")
        return torch.sum(places.reshape(token_count, top_k, x.shape[1]), dim=1)


def _workspace(name: str, size: int, mapping: Mapping, config: MnnvlConfig | None) -> Tensor:
    held = PROCESS.two_sided
    if name in held:
        assert mapping == held["mapping"], ONE_MAPPING
        workspace: Tensor = held[name]
        backend = None if config is None else config.comm_backend
        known = backend is None or backend.same_group(MnnvlMemory.of(workspace).comm)
        assert known, f"{ONE_MAPPING}: another group"  # the library would go on over the group of the first caller
        return workspace
    assert mapping == held.setdefault("mapping", mapping), ONE_MAPPING
    if config is not None:
        MnnvlMemory.set_comm_from_config(mapping, config)
    held[name] = MnnvlMemory(mapping, size).as_torch_strided_tensor(torch.uint64)
    return held[name]  # type: ignore[no-any-return]


def _orders(rank_TK: Tensor, memory: MnnvlMemory, ep_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """For each rank the tokens it gets, in any order, and the place token * K + k of the first pick of each."""
    orders, places = [], []
    for rank in range(ep_size):
        wanted_TK = rank_TK == rank
        token_X = torch.nonzero(wanted_TK.any(dim=1)).flatten()
        token_X = token_X[torch.randperm(len(token_X), generator=memory.draw, dtype=torch.int64, device="cpu")]
        orders.append(token_X)
        places.append(token_X * rank_TK.shape[1] + wanted_TK[token_X].to(torch.int32).argmax(dim=1))
    return orders, places


def _moe_comm(
    rows: Tensor,
    send: tuple[Tensor, Tensor],
    output: Tensor,
    receive: tuple[Tensor, Tensor],
    workspace: Tensor,
    phase: str,
) -> Tensor:
    check(rows.shape[1] * rows.element_size() % ROW_ALIGNMENT == 0, "input.size(1) must be aligned to 16 bytes")
    check(workspace.dtype == torch.uint64 and workspace.dim() == 2, "allWorkspaces must be a 2D uint64 tensor")
    parts = [[rows[index_X.long()]] for index_X in _split(*send)]
    arrived = MnnvlMemory.of(workspace).comm.exchange.swap(parts, phase)
    for index_X, (part,) in zip(_split(*receive), arrived, strict=True):
        output[index_X.long()] = part
    return output


def _split(cumsum_W: Tensor, indices: Tensor) -> list[Tensor]:
    ends = cumsum_W.tolist()
    return [indices[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _cumsum(counts: list[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0).to(torch.int32)


def _indices(parts: list[Tensor], length: int) -> Tensor:
    return _held(torch.cat(parts).to(torch.int32), length)


def _held(rows: Tensor, length: int) -> Tensor:
    """Rows at the front of a longer tensor, poison behind them."""
    held = poison(torch.empty((length, *rows.shape[1:]), dtype=rows.dtype, device=rows.device))
    held[: len(rows)] = rows
    return held
