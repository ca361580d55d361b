"""A script written for DeepEP's Buffer, between real processes over the network engine."""

import inspect
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_mk.lab.deepep_buffer import Buffer
from moe_mk.lab.deepep_buffer.calls import EventOverlap
from moe_mk.lab.testing.on_ranks import RankWorld
from tests.deepep_buffer import deepep_script
from tests.deepep_buffer.deepep_script import BIASES, MOST, expert_weights, inputs

HIDDEN, ROUNDS = 256, 3


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Iterator[RankWorld]:
    with RankWorld(request.param) as ranks:
        yield ranks


def dense(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w: Tensor) -> Tensor:
    """Each token through each of its experts, in f64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(topk_idx.tolist(), topk_weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                out[token] += weight * (x[token].double() @ w[expert].double())
    return out


def close(one: Tensor, other: Tensor, limit: float) -> None:
    """By the largest value of a row: bf16 rounds partial sums."""
    scale = other.abs().amax(dim=1, keepdim=True).clamp_min(1e-3) if len(other) else other
    assert ((one.double() - other).abs() <= limit * scale).all()


@pytest.mark.row(160)
def test_a_normal_mode_script_equals_a_dense_computation(world: RankWorld) -> None:
    size, w = world.world_size, expert_weights(world.world_size, HIDDEN)
    answers = world.call(deepep_script.normal, size, HIDDEN, ROUNDS)
    for seed in range(ROUNDS):
        batches = [inputs(rank, size, HIDDEN, seed) for rank in range(size)]
        for rank, (x, topk_idx, topk_weights) in enumerate(batches):
            answer = answers[rank][seed]
            close(answer["out"], dense(x, topk_idx, topk_weights, w), 2**-7)
            ranks_of_T = [len({expert // 2 for expert in ids if expert >= 0}) for ids in topk_idx.tolist()]
            sums = torch.tensor(ranks_of_T)[:, None] * 2 * x.double() if len(x) else x.double()
            close(answer["back"], sums + sum(BIASES[seed]) * x.double(), 2**-6)
            # Rows come by source rank, then by token; experts of other ranks are -1.
            rows = [(one[1] // 2 == rank).logical_and(one[1] >= 0).any(1) for one in batches]
            expected = torch.cat([one[0][chosen] for one, chosen in zip(batches, rows, strict=True)])
            ids = torch.cat([one[1][chosen] for one, chosen in zip(batches, rows, strict=True)])
            assert torch.equal(answer["recv_x"], expected) and torch.equal(answer["again"], 2 * expected)
            local = torch.where((ids >= 0) & (ids // 2 == rank), ids - 2 * rank, -1)
            assert torch.equal(answer["recv_idx"], local)
            assert answer["counts"] == [-(-int((local == expert).sum()) // 4) * 4 for expert in (0, 1)]
            assert answer["per_expert"].tolist() == [int((topk_idx == expert).sum()) for expert in range(2 * size)]


@pytest.mark.row(160)
@pytest.mark.parametrize("use_fp8,hooks", [(False, True), (True, False), (True, True)])
def test_a_low_latency_script_equals_a_dense_computation(world: RankWorld, use_fp8: bool, hooks: bool) -> None:
    size, w = world.world_size, expert_weights(world.world_size, HIDDEN)
    answers = world.call(deepep_script.low_latency, size, HIDDEN, ROUNDS, use_fp8, hooks)
    totals = torch.zeros(2 * size, dtype=torch.int64)
    for seed in range(ROUNDS):
        batches = [inputs(rank, size, HIDDEN, seed) for rank in range(size)]
        counts = torch.cat([topk_idx.flatten() for _, topk_idx, _ in batches])
        per_expert = torch.bincount(counts[counts >= 0], minlength=2 * size)
        totals += per_expert
        for rank, (x, topk_idx, topk_weights) in enumerate(batches):
            answer = answers[rank][seed]
            close(answer["out"], dense(x, topk_idx, topk_weights, w), 2**-4 if use_fp8 else 2**-7)
            own = slice(2 * rank, 2 * rank + 2)
            assert answer["counts"].tolist() == per_expert[own].tolist()
            assert answer["stats"].tolist() == totals[own].tolist()


REFUSED = {
    "enable_shrink": "UnsupportedError: .*enable_shrink: the engine has no rank mask",
    "comm": "UnsupportedError: .*comm: give a process group", "no group": "ConfigError: .*group is None",
    "pair": r"UnsupportedError: .*pair \(fp8, scales\)", "worst": "UnsupportedError: .*num_worst_tokens",
    "missing": "ConfigError: .*num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_weights must be",
    "other layout": "ConfigError: .*is_token_in_rank is not that of topk_idx",
    "tokens": f"ShapeError: .*the buffer takes {MOST} of each rank",
    "stream": "ConfigError: .*allocate_on_comm_stream needs previous_event and async_finish",
    "experts": "ConfigError: .*experts do not divide over", "ids": "ConfigError: .*topk_idx must be -1, or 0 <= id <",
    "dtype": "ShapeError: x has dtype torch.float32, expected torch.bfloat16",
    "combine weights": "UnsupportedError: .*topk_weights: weights are not reduced",
    "combine rows": "ShapeError: x has R=", "ue8m0": "UnsupportedError: .*use_ue8m0: scales are f32",
    "wait stats": "UnsupportedError: .*dispatch_wait_recv_cost_stats",
    "both": "ConfigError: .*async_finish and return_recv_hook exclude each other",
    "mode": "ConfigError: .*low_latency_mode=True", "too many": "ShapeError: .*raise it on all ranks",
    "twice": "ConfigError: .*names an expert twice", "columns": "ShapeError: x has H=100, which use_fp8 needs",
    "logfmt": "UnsupportedError: .*use_logfmt: .*zero_copy: ",
    "other ids": "ConfigError: .*topk_idx is not that of the dispatch", "mask": "UnsupportedError: .*no rank mask",
    "zero copy": "UnsupportedError: .*zero-copy", "odd": "ConfigError: .*3 must be even",
    "destroy": "ConfigError: .*explicitly_destroy=False",
    "combined": "ConfigError: .*every dispatch of this handle was combined",
    "low combined": "ConfigError: .*combine each handle once", "destroyed": "ConfigError: the buffer was destroyed",
    "works": "True",
}  # fmt: skip


@pytest.mark.row(160)
def test_arguments_without_a_counterpart_are_refused_and_the_buffer_still_works(world: RankWorld) -> None:
    for found in world.call(deepep_script.refused, world.world_size):
        assert set(found) == set(REFUSED)
        for name, words in REFUSED.items():
            assert re.match(words, found[name], re.DOTALL), (name, found[name])


SIGNATURES = {
    "__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "get_dispatch_layout": "topk_idx num_experts previous_event async_finish allocate_on_comm_stream",
    "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert topk_idx "
    "topk_weights expert_alignment num_worst_tokens config previous_event async_finish allocate_on_comm_stream",
    "combine": "x handle topk_weights bias config previous_event async_finish allocate_on_comm_stream",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale use_ue8m0 async_finish "
    "return_recv_hook",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt zero_copy async_finish return_recv_hook out "
    "combine_wait_recv_cost_stats",
    "low_latency_update_mask_buffer": "rank_to_mask mask",
    "low_latency_query_mask_buffer": "mask_status",
    "get_next_low_latency_combine_buffer": "handle",
}
"""Of `deep_ep.Buffer`, source of 2026-07."""


@pytest.mark.row(160)
@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_arguments_are_those_of_deep_ep(name: str) -> None:
    parameters = inspect.signature(getattr(Buffer, name)).parameters.values()
    ours = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]
    assert ours == SIGNATURES[name].split()


def test_hooks_run_once_after_the_next_wait() -> None:
    event, ran = EventOverlap(), list[int]()
    event.register_hook_after_wait(lambda: ran.append(1))
    with event:
        assert not ran
    event.current_stream_wait()
    assert ran == [1]
