"""Scripts as they are written for `deep_ep.Buffer`, run by each rank, with results as tensors and texts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.lab.deepep_buffer import Buffer, BufferSettings, EventOverlap

MOST = 24
BIASES = (1,), (3, -2), (-4, 1)
"""The biases of a combine in each round, as multiples of the tokens: one tensor, or two."""


def inputs(rank: int, size: int, hidden: int, seed: int, top_k: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids and weights of a rank: uneven batches, the last rank has none, and some ids are -1."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    count = 0 if rank == size - 1 else int(torch.randint(1, MOST + 1, (1,), generator=draw))
    x = torch.randn(count, hidden, generator=draw).to(torch.bfloat16)
    topk_idx = torch.rand(count, 2 * size, generator=draw).argsort(dim=1)[:, :top_k]
    topk_idx[torch.rand(count, top_k, generator=draw) < 0.2] = -1
    return x, topk_idx, torch.rand(count, top_k, generator=draw)


def expert_weights(size: int, hidden: int) -> Tensor:
    """A square matrix for each of 2 experts per rank."""
    return torch.randn(2 * size, hidden, hidden, generator=torch.Generator().manual_seed(7)) / hidden**0.5


def normal(rank: int, size: int, hidden: int, rounds: int) -> list[dict[str, Any]]:
    """Training and prefill: layout, dispatch, experts, combine; then the way of a backward pass."""
    buffer = Buffer(dist.group.WORLD, int(1e6), 0, settings=BufferSettings(max_num_tokens=MOST, timeout_s=30.0))
    w, answers = expert_weights(size, hidden)[2 * rank : 2 * rank + 2], []
    for seed in range(rounds):
        x, topk_idx, topk_weights = inputs(rank, size, hidden, seed)
        previous_event = Buffer.capture()
        per_rank, per_rdma_rank, per_expert, in_rank, previous_event = buffer.get_dispatch_layout(
            topk_idx, 2 * size, previous_event=previous_event, async_finish=True, allocate_on_comm_stream=True
        )
        recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            expert_alignment=4, previous_event=previous_event, async_finish=True, allocate_on_comm_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        y = torch.zeros(recv_x.shape)
        for expert in (0, 1):
            weight = torch.where(recv_idx == expert, recv_weights, 0.0).sum(1)
            y += weight[:, None] * (recv_x.float() @ w[expert])
        out, _, event = buffer.combine(y.to(torch.bfloat16), handle, async_finish=True)
        again, *_, event = buffer.dispatch(2 * x, handle=handle)
        biases = tuple(factor * x for factor in BIASES[seed])
        back, _, event = buffer.combine(again, handle, bias=biases if len(biases) > 1 else biases[0])
        answers.append(
            {"out": out, "back": back, "recv_x": recv_x, "again": again, "recv_idx": recv_idx, "counts": counts,
             "per_rank": per_rank, "per_expert": per_expert}
        )  # fmt: skip
    return answers


def low_latency(rank: int, size: int, hidden: int, rounds: int, use_fp8: bool, hooks: bool) -> list[dict[str, Any]]:
    """Decode: blocks of experts, with hooks between sending and receiving."""
    num_bytes = Buffer.get_low_latency_rdma_size_hint(MOST, hidden, size, 2 * size)
    buffer = Buffer(
        dist.group.WORLD, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=2,
        settings=BufferSettings(timeout_s=30.0),
    )  # fmt: skip
    w, answers = expert_weights(size, hidden)[2 * rank : 2 * rank + 2], []
    stats = torch.zeros(2, dtype=torch.int32)
    for seed in range(rounds):
        x, topk_idx, topk_weights = inputs(rank, size, hidden, seed)
        received, counts, handle, _event, hook = buffer.low_latency_dispatch(
            x, topk_idx, MOST, 2 * size, cumulative_local_expert_recv_stats=stats, use_fp8=use_fp8,
            return_recv_hook=hooks,
        )  # fmt: skip
        if hooks:
            assert hook is not None and not counts.any()
            hook()
            assert "was run before" in _raised(hook)
        recv = received
        if isinstance(received, tuple):
            recv = (received[0].float().unflatten(-1, (-1, 128)) * received[1][..., None]).flatten(-2)
        y = (recv.float() @ w).to(torch.bfloat16)
        for expert in (0, 1):
            y[expert, int(counts[expert]) :] = float("nan")  # never read
        out = torch.empty_like(x)
        combined, _event, hook = buffer.low_latency_combine(
            y, topk_idx, topk_weights, handle, return_recv_hook=hooks, out=out
        )
        if hooks:
            assert hook is not None
            hook()
        assert combined is out
        answers.append({"out": out, "counts": counts, "stats": stats.clone()})
    return answers


def refused(rank: int, size: int) -> dict[str, str]:
    """What each refused call raises, on every rank and before anything is sent; then a call that works."""
    x, topk_idx, topk_weights = inputs(0, size + 1, 128, 0)
    normal_mode = Buffer(dist.group.WORLD, settings=BufferSettings(max_num_tokens=MOST, timeout_s=30.0))
    buffer = Buffer(
        dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True,
        settings=BufferSettings(max_num_tokens=MOST, timeout_s=30.0),
    )  # fmt: skip
    experts = 2 * size
    topk_idx = topk_idx.clamp_max(experts - 1)
    topk_idx[:, 1:] = -1
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, experts)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    given = {**layout, "topk_idx": topk_idx, "topk_weights": topk_weights}
    recv, _, _, _, handle, _ = buffer.dispatch(x, **given)
    y, _, low, _, _ = buffer.low_latency_dispatch(x, topk_idx, MOST, experts, use_fp8=False)
    cells = torch.zeros(size, dtype=torch.int64)
    twice = topk_idx.clone()
    twice[:, :2] = 1
    calls = {
        "enable_shrink": lambda: Buffer(dist.group.WORLD, enable_shrink=True),
        "comm": lambda: Buffer(None, comm=object()),
        "no group": lambda: Buffer(None),
        "pair": lambda: buffer.dispatch((x, x), **given),
        "worst": lambda: buffer.dispatch(x, num_worst_tokens=64, **given),
        "missing": lambda: buffer.dispatch(x, topk_idx=topk_idx),
        "other layout": lambda: buffer.dispatch(x, **{**given, "is_token_in_rank": ~in_rank}),
        "tokens": lambda: buffer.dispatch(
            x.repeat(30, 1), **{**given, "topk_idx": topk_idx.repeat(30, 1), "topk_weights": topk_weights.repeat(30, 1)}
        ),
        "stream": lambda: buffer.get_dispatch_layout(topk_idx, experts, allocate_on_comm_stream=True),
        "experts": lambda: buffer.get_dispatch_layout(topk_idx, experts + 1),
        "ids": lambda: buffer.get_dispatch_layout(topk_idx + experts, experts),
        "dtype": lambda: buffer.dispatch(x.float(), **given),
        "combine weights": lambda: buffer.combine(recv, handle, topk_weights=topk_weights),
        "combine rows": lambda: buffer.combine(recv.repeat(2, 1), handle),
        "ue8m0": lambda: buffer.low_latency_dispatch(x, topk_idx, MOST, experts, round_scale=True, use_ue8m0=True),
        "wait stats": lambda: buffer.low_latency_dispatch(
            x, topk_idx, MOST, experts, dispatch_wait_recv_cost_stats=cells
        ),
        "both": lambda: buffer.low_latency_dispatch(
            x, topk_idx, MOST, experts, async_finish=True, return_recv_hook=True
        ),
        "mode": lambda: normal_mode.low_latency_dispatch(x, topk_idx, MOST, experts),
        "too many": lambda: buffer.low_latency_dispatch(x, topk_idx, x.shape[0] - 1, experts),
        "twice": lambda: buffer.low_latency_dispatch(x, twice, MOST, experts),
        "columns": lambda: buffer.low_latency_dispatch(x[:, :100].contiguous(), topk_idx, MOST, experts),
        "logfmt": lambda: buffer.low_latency_combine(y, topk_idx, topk_weights, low, use_logfmt=True, zero_copy=True),
        "other ids": lambda: buffer.low_latency_combine(y, topk_idx + 1, topk_weights, low),
        "mask": lambda: buffer.low_latency_update_mask_buffer(0, True),
        "zero copy": lambda: buffer.get_next_low_latency_combine_buffer(low),
        "odd": lambda: Buffer.set_num_sms(3),
        "destroy": normal_mode.destroy,
    }
    found = {name: _raised(call) for name, call in calls.items()}
    out, _, event = buffer.combine(recv, handle)
    assert isinstance(event, EventOverlap)
    combined, _, _ = buffer.low_latency_combine(y, topk_idx, torch.ones_like(topk_weights), low)
    chosen = topk_idx[:, 0] >= 0
    found["works"] = str(torch.equal(out[chosen], x[chosen]) and torch.equal(combined[chosen], x[chosen]))
    found["combined"] = _raised(lambda: buffer.combine(recv, handle))
    found["low combined"] = _raised(lambda: buffer.low_latency_combine(y, topk_idx, topk_weights, low))
    buffer.destroy()
    found["destroyed"] = _raised(lambda: buffer.dispatch(x, **given))
    return found


def _raised(call: Any) -> str:
    try:
        call()
    except MoEMKError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
