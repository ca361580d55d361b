"""Low-latency kernels with expert-major rows: a slot for each row of each local expert, in an unspecified order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor as TorchTensor

from moe_mk.lab.testing.emulated.pending import poison
from moe_mk_contrib.emulated.nccl.core import NcclDataType
from moe_mk_contrib.emulated.nccl.ep.recipes import check_combine, payloads
from moe_mk_contrib.emulated.nccl.ep.state import HandleState, aborts_unless
from moe_mk_contrib.emulated.nccl.ep.tensor import Address, read
from moe_mk_contrib.nccl_ep_limits import LOW_LATENCY_HIDDEN, ROW_ALIGNMENT


@dataclass(frozen=True)
class Places:
    """Of each received row: its local expert and slot, and the rank and token it belongs to."""

    expert_R: TorchTensor
    slot_R: TorchTensor
    source_R: TorchTensor
    token_R: TorchTensor


def dispatch(handle: HandleState, inputs: Any, outputs: Any, layout_info: Any, config: Any) -> None:
    """A row for each assignment, into the block of its expert."""
    group = handle.group
    handle.expect_idle()
    sent = payloads(handle, inputs, outputs, config)
    aborts_unless(sent[0][0].shape[1] % ROW_ALIGNMENT == 0 or len(sent) > 1, "hidden % sizeof(int4) == 0")
    aborts_unless(inputs.topk_weights is None, "topk_weights_in == nullptr")
    aborts_unless(outputs.topk_weights is None and outputs.topk_idx is None, "recv_topk_weights == nullptr")
    for rows, out in sent:
        aborts_unless(out.sizes == (group.local_experts, group.slots, rows.shape[1]), f"recv_x is {out.sizes}")
    counters: Any = None if layout_info is None else layout_info.expert_counters
    aborts_unless(counters is not None, "expert_counters is required")
    aborts_unless(
        counters.sizes == (group.local_experts,) and counters.datatype == NcclDataType.INT32, "expert_counters is int32"
    )
    assert handle.ids is not None
    ids_TK = handle.ids.read().long()
    token_X, k_X = torch.nonzero(ids_TK >= 0, as_tuple=True)
    expert_X = ids_TK[token_X, k_X]
    outgoing = []
    for peer in range(group.exchange.size):
        there_X = expert_X // group.local_experts == peer
        token_there_X, expert_there_X = token_X[there_X], expert_X[there_X] % group.local_experts
        outgoing.append([*(rows[token_there_X] for rows, _ in sent), expert_there_X, token_there_X])
    mail = group.exchange.swap(outgoing, "dispatch")
    *parts, expert_R, token_R = (torch.cat(column) for column in zip(*mail, strict=True))
    source_R = torch.repeat_interleave(torch.tensor([len(part[-1]) for part in mail], dtype=torch.int64, device="cpu"))
    # Slots are claimed by atomics: any order.
    order_R = torch.randperm(len(expert_R), generator=group.draw, dtype=torch.int64, device="cpu")
    order_R = order_R[expert_R[order_R].argsort(stable=True)]
    counts_L = torch.bincount(expert_R, minlength=group.local_experts)
    slot_R = torch.cat([torch.arange(count, dtype=torch.int64, device="cpu") for count in counts_L.tolist()])
    handle.places = Places(expert_R[order_R], slot_R, source_R[order_R], token_R[order_R])
    held = [Address(out) for _, out in sent]
    for address in held:
        poison(address.read())
    poison(read(counters))
    counted = Address(counters)

    def arrive() -> None:
        for address, part in zip(held, parts, strict=True):
            address.read()[expert_R[order_R], slot_R] = part[order_R]
        counted.read().copy_(counts_L)

    handle.finish(arrive, send_only=bool(config.send_only))


def combine(handle: HandleState, inputs: Any, outputs: Any, config: Any) -> None:
    """Each row back to its token, weighted and summed there in f32."""
    group, x = handle.group, inputs.tokens
    handle.expect_idle()
    check_combine(inputs, config)
    aborts_unless(outputs.topk_weights is not None, "expert-major combine requires topk_weights in outputs")
    hidden = x.sizes[-1]
    aborts_unless(x.sizes == (group.local_experts, group.slots, hidden), f"x is {x.sizes}")
    aborts_unless(hidden % LOW_LATENCY_HIDDEN == 0, "x->sizes[2] % 128 == 0")
    aborts_unless(handle.ids is not None and handle.places is not None, "combine comes after dispatch")
    assert handle.ids is not None
    ids, places, out = handle.ids, handle.places, outputs.tokens
    weights = outputs.topk_weights
    aborts_unless(weights.sizes == ids.sizes and weights.datatype == NcclDataType.FLOAT32, "topk_weights is f32 [T, K]")
    aborts_unless(out.sizes == (ids.sizes[0], hidden) and out.datatype == x.datatype, "out is [T, H] of x's dtype")
    rows, parts = read(x), []
    for peer in range(group.exchange.size):
        mine_R = places.source_R == peer
        expert_X, slot_X = places.expert_R[mine_R], places.slot_R[mine_R]
        number_X = expert_X + group.exchange.rank * group.local_experts
        parts.append([rows[expert_X, slot_X], number_X, places.token_R[mine_R]])
    mail = group.exchange.swap(parts, "combine")
    rows_X, expert_X, token_X = (torch.cat(column) for column in zip(*mail, strict=True))
    held, applied = Address(out), Address(weights)
    poison(held.read())

    def arrive() -> None:
        ids_TK = ids.read().long()
        tokens = len(ids_TK)
        row_of = torch.full((group.config.num_experts * tokens + 1,), -1, dtype=torch.int64, device="cpu")
        row_of[expert_X * tokens + token_X] = torch.arange(len(expert_X), dtype=torch.int64, device="cpu")
        total_TH = torch.zeros((tokens, hidden), dtype=torch.float32, device="cpu")
        token_T = torch.arange(tokens, dtype=torch.int64, device="cpu")
        for ids_T, weights_T in zip(ids_TK.unbind(1), applied.read().unbind(1), strict=True):
            row_T = torch.where(ids_T >= 0, row_of[ids_T.clamp_min(0) * tokens + token_T], -1)
            total_TH[row_T >= 0] += weights_T[row_T >= 0, None] * rows_X[row_T[row_T >= 0]].float()
            total_TH[(ids_T >= 0) & (row_T < 0)] = torch.nan
        held.read().copy_(total_TH)

    handle.finish(arrive, send_only=bool(config.send_only))
