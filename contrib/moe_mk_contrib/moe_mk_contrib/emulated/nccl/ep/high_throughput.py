"""High-throughput kernels with flat rows: one row for each token and rank, at the front of the room for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor as TorchTensor

from moe_mk.lab.testing.emulated.pending import poison
from moe_mk_contrib.emulated.nccl.core import NcclDataType
from moe_mk_contrib.emulated.nccl.ep.enums import ExpertIdKind
from moe_mk_contrib.emulated.nccl.ep.recipes import check_combine, payloads, row_bytes
from moe_mk_contrib.emulated.nccl.ep.state import HandleState, aborts_unless, refuses_unless
from moe_mk_contrib.emulated.nccl.ep.tensor import read
from moe_mk_contrib.nccl_ep_limits import ROW_ALIGNMENT


def exchange_routing(handle: HandleState, layout_info: Any) -> None:
    """All ranks learn all ids; the handle keeps a copy of its own, and the slots of what it will receive."""
    group = handle.group
    assert handle.ids is not None
    handle.cached_ids = handle.ids.read().long().clone()
    gathered = group.exchange.swap([[handle.cached_ids]] * group.exchange.size, "update")
    handle.counts = [int(_goes_to(ids, group.exchange.rank, group).sum()) for (ids,) in gathered]
    total = sum(handle.counts)
    if total > group.max_recv_tokens:
        raise RuntimeError(f"CUDA error: unspecified launch failure ({total} rows in {group.max_recv_tokens} slots)")
    handle.slot_R = torch.randperm(total, generator=group.draw, dtype=torch.int64, device="cpu")
    counter = None if layout_info is None else layout_info.recv_total_counter
    if counter is not None:
        integers = (NcclDataType.INT32, NcclDataType.INT64)
        aborts_unless(counter.ndim == 1 and counter.datatype in integers, "recv_total_counter is int32 or int64 [1]")
        read(counter).fill_(total)
    if layout_info is not None and layout_info.expert_counters is not None:
        raise NotImplementedError("counts per expert are not emulated")


def dispatch(handle: HandleState, inputs: Any, outputs: Any, layout_info: Any, config: Any) -> None:
    """Rows with the ids and weights of this rank's experts, by rising expert; nothing behind the last."""
    group = handle.group
    sent = payloads(handle, inputs, outputs, config)
    weights, out_weights, out_ids = inputs.topk_weights, outputs.topk_weights, outputs.topk_idx
    refuses_unless(weights is not None, "topk_weights is required")
    aborts_unless(
        weights.sizes == (handle.num_tokens, handle.num_topk) and weights.datatype == NcclDataType.FLOAT32,
        "topk_weights is f32 [T, K]",
    )
    for rows, out in sent:
        refuses_unless(out.ndim == 2 and out.sizes[1] == rows.shape[1], "outputs must be 2D with the width of inputs")
        refuses_unless(out.sizes[0] >= group.max_recv_tokens, "outputs must cover max_recv_tokens_per_rank")
    refuses_unless(out_weights is not None and out_ids is not None, "recv_topk_weights and recv_topk_idx are required")
    aborts_unless(
        out_weights.ndim == 2 and out_weights.datatype == NcclDataType.FLOAT32, "recv_topk_weights must be 2D f32"
    )
    aborts_unless(out_ids.ndim == 2 and out_ids.datatype == NcclDataType.INT64, "recv_topk_idx must be 2D int64")
    refuses_unless(out_weights.sizes[0] == out_ids.sizes[0], "weights and ids have rows of one set")
    refuses_unless(out_ids.sizes[0] >= sum(handle.counts), "too few rows for ids")
    ids_TK, weights_TK = handle.cached_ids, read(weights)
    outgoing = []
    for peer in range(group.exchange.size):
        token_X = torch.nonzero(_goes_to(ids_TK, peer, group)).flatten()
        outgoing.append([*(rows[token_X] for rows, _ in sent), ids_TK[token_X], weights_TK[token_X]])
    mail = group.exchange.swap(outgoing, "dispatch")
    *parts, ids_RK, weights_RK = (torch.cat(column) for column in zip(*mail, strict=True))
    for (_, out), part in zip(sent, parts, strict=True):
        poison(read(out))[handle.slot_R] = part
    kind = ExpertIdKind.AUTO if layout_info is None else layout_info.recv_topk_idx_kind
    first = group.exchange.rank * group.local_experts
    numbers_RK, mine_RK = _own_first(ids_RK, weights_RK, first, group.local_experts)
    shift = first if kind == ExpertIdKind.GLOBAL else 0
    poison(read(out_ids))[handle.slot_R] = torch.where(numbers_RK >= 0, numbers_RK + shift, -1)
    poison(read(out_weights))[handle.slot_R] = mine_RK
    handle.places = [len(part[-1]) for part in mail]


def combine(handle: HandleState, inputs: Any, outputs: Any, config: Any) -> None:
    """One row of each rank for each token, summed in f32 without weights."""
    group, x, out = handle.group, inputs.tokens, outputs.tokens
    check_combine(inputs, config)
    refuses_unless(inputs.topk_weights is None, "FWD combine forbids topk_weights")
    aborts_unless(x.ndim == 2 and row_bytes(x) % ROW_ALIGNMENT == 0, "x is 2D with rows of multiples of 16 bytes")
    aborts_unless(handle.places is not None, "combine comes after dispatch")
    aborts_unless(out.sizes == (handle.num_tokens, x.sizes[1]), f"combined_x is {out.sizes}")
    aborts_unless(out.datatype == x.datatype, "combined_x has the dtype of x")
    aborts_unless(x.sizes[0] >= sum(handle.places), "x has fewer rows than were received")
    rows_RH = read(x)[handle.slot_R]
    sent = torch.split(rows_RH, handle.places)
    mail = group.exchange.swap([[part] for part in sent], "combine")
    total_TH = torch.zeros((handle.num_tokens, x.sizes[1]), dtype=torch.float32, device="cpu")
    for peer, (part,) in enumerate(mail):
        total_TH[torch.nonzero(_goes_to(handle.cached_ids, peer, group)).flatten()] += part.float()
    read(out).copy_(total_TH)


def _goes_to(ids_TK: TorchTensor, rank: int, group: Any) -> TorchTensor:
    """Which tokens have an expert of a rank."""
    there_TK: TorchTensor = (ids_TK >= 0) & (ids_TK // group.local_experts == rank)
    return there_TK.any(dim=1)


def _own_first(ids_RK: TorchTensor, weights_RK: TorchTensor, first: int, count: int) -> tuple[TorchTensor, TorchTensor]:
    """Local ids of this rank by rising number with their weights, then -1 and 0."""
    local_RK = ids_RK - first
    mine_RK = (local_RK >= 0) & (local_RK < count)
    key_RK, order_RK = torch.where(mine_RK, local_RK, count).sort(dim=1, stable=True)
    weights_RK = torch.where(mine_RK, weights_RK, 0.0).gather(1, order_RK)
    return torch.where(key_RK < count, key_RK, -1), weights_RK
