"""deep_ep as it is emulated: signatures, configs, and the laws of high-throughput kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.lab.testing.emulated import deep_ep
from tests.testing.emulated.deepep_worlds import IDS, WEIGHTS, differences, rows
from tests.testing.emulated.row_library_ranks import on_each_rank, on_ranks

EXPERTS, HIDDEN = 4, 64
INNER = {  # streams, memory, and what is not about experts
    "Buffer": {"get_comm_stream", "get_local_buffer_tensor", "internode_dispatch", "internode_combine"},
}


def test_signatures_are_those_of_the_library() -> None:
    wrong, absent = differences("deep_ep")
    assert wrong == [] and absent == {f"{name}.{method}" for name, methods in INNER.items() for method in methods}
    assert deep_ep.topk_idx_t is torch.int64


def open_buffer(group: ThreadCommunicator) -> deep_ep.Buffer:
    configs = deep_ep.Buffer.get_dispatch_config(group.size), deep_ep.Buffer.get_combine_config(group.size)
    nvl = max(config.get_nvl_buffer_size_hint(2 * HIDDEN, group.size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(2 * HIDDEN, group.size) for config in configs)
    return deep_ep.Buffer(group, num_nvl_bytes=nvl, num_rdma_bytes=rdma)


def dispatch(buffer: deep_ep.Buffer, x: Any = None, **more: Any) -> Any:
    rank = buffer.rank
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDS[rank], EXPERTS)
    return buffer.dispatch(
        rows(rank, HIDDEN) if x is None else x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=IDS[rank], topk_weights=WEIGHTS[rank],
        **more,
    )  # fmt: skip


@on_each_rank(2)
def test_the_layout_counts_tokens_of_ranks_and_experts(group: ThreadCommunicator) -> None:
    layout = open_buffer(group).get_dispatch_layout(IDS[group.rank], EXPERTS)
    per_rank, per_node, per_expert, in_rank, event = layout
    assert per_node is None and event.event is None
    assert per_rank.tolist() == [[1, 2], [1, 0]][group.rank] and per_rank.dtype == torch.int32
    assert per_expert.tolist() == [[1, 0, 1, 1], [1, 1, 0, 0]][group.rank]
    there = [[[True, True], [False, True], [False, False]], [[True, False]]]
    assert in_rank.tolist() == there[group.rank]


@on_each_rank(2)
def test_rows_arrive_once_a_rank_with_local_ids_and_counts_on_the_host(group: ThreadCommunicator) -> None:
    x, ids, weights, counts, handle, event = dispatch(open_buffer(group), async_finish=True, expert_alignment=4)
    assert bool(x.isnan().all()) and int(ids.max()) < 0 and bool(weights.isnan().all()), "not before the event"
    event.current_stream_wait()
    assert x[:, 0].tolist() == [[1.0, 5.0], [1.0, 2.0]][group.rank], "by rank, then by token"
    assert ids.tolist() == [[[0, -1], [0, 1]], [[-1, 1], [0, -1]]][group.rank]
    assert weights.tolist() == [[[0.5, 0.0], [0.75, 0.125]], [[0.0, 0.25], [1.0, 0.0]]][group.rank]
    assert counts == [4, 4] and len(handle) == 6
    assert handle[0].tolist() == [[1, 2], [2, 2]], "rows from ranks up to one, to each rank"


@on_each_rank(2)
def test_the_worst_number_of_rows_needs_no_counts(group: ThreadCommunicator) -> None:
    buffer = open_buffer(group)
    x, ids, weights, counts, handle, _ = dispatch(buffer, num_worst_tokens=6)
    assert counts == [] and len(x) == 6 and bool((ids[2:] == -1).all())
    assert bool(x[2:].isnan().all()) and bool(weights[2:].isnan().all())
    assert buffer.combine(x, handle)[0][:, 0].tolist() == [[2.0, 2.0, 0.0], [5.0]][group.rank]
    with pytest.raises(RuntimeError, match="num_worst_tokens >= num_recv_tokens"):
        dispatch(buffer, num_worst_tokens=1)


@on_each_rank(2)
def test_combine_sums_ranks_and_adds_what_is_asked(group: ThreadCommunicator) -> None:
    buffer = open_buffer(group)
    x, _, weights, _, handle, _ = dispatch(buffer)
    bias = torch.full((len(IDS[group.rank]), HIDDEN), 0.5, dtype=torch.bfloat16)
    out, back, event = buffer.combine(x, handle, weights, bias=(bias, bias), async_finish=True)
    assert bool(out.isnan().all())
    event.current_stream_wait()
    assert out[:, 0].tolist() == [[3.0, 3.0, 1.0], [6.0]][group.rank]
    assert back is not None and back.tolist() == WEIGHTS[group.rank].tolist()
    again = buffer.dispatch(rows(group.rank, HIDDEN), handle)
    assert torch.equal(again[0], x) and again[1:5] == (None, None, None, None), "the same layout once more"


@on_each_rank(2)
def test_fp8_rows_travel_with_scales_of_any_kind(group: ThreadCommunicator) -> None:
    values = rows(group.rank, HIDDEN).to(torch.float8_e4m3fn)
    scales = torch.arange(len(values), dtype=torch.int32)[:, None] + 10 * group.rank
    (x, got), *_ = dispatch(open_buffer(group), (values, scales))
    assert x.dtype == torch.float8_e4m3fn and got.tolist() == [[[0], [10]], [[0], [1]]][group.rank]
    with pytest.raises(RuntimeError, match="FP8 rows come with scales"):
        dispatch(open_buffer(group), values)


def test_between_nodes_handles_have_ten_parts_and_the_host_must_know_counts() -> None:
    def job(group: ThreadCommunicator) -> Tensor:
        buffer = open_buffer(group)
        ids = torch.tensor([[0, 15], [group.rank, -1]])
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 16)
        assert per_node is not None and per_node.tolist() == ([2, 1] if group.rank < 8 else [1, 2])
        x = torch.full((2, HIDDEN), 1.0 + group.rank, dtype=torch.bfloat16)
        given = (per_rank, per_node, in_rank, per_expert, ids, torch.ones(2, 2))
        got, _, _, counts, handle, _ = buffer.dispatch(x, None, *given)
        assert handle is not None and len(handle) == 10 and counts == [{0: 17, 15: 17}.get(group.rank, 1)]
        with pytest.raises(AssertionError, match="Internode dispatch does not support"):
            buffer.dispatch(x, None, *given, num_worst_tokens=64)
        out = buffer.combine(got, handle)[0]  # type: ignore[arg-type]
        assert out[:, 0].tolist() == [2.0 + 2 * group.rank, 1.0 + group.rank]
        return out

    on_ranks(16, job, timeout_s=20.0)


def test_configs_are_there_for_some_numbers_of_ranks_and_must_make_sense() -> None:
    config = deep_ep.Buffer.get_dispatch_config(8)
    # 10 channels x 8 peers x (20 + 256 x (14336 + 2056)), rounded up to 128: 0.31 GiB.
    assert config.get_nvl_buffer_size_hint(14336, 8) == 335_709_824 and config.get_rdma_buffer_size_hint(14336, 8) == 0
    with pytest.raises(AssertionError, match="Unsupported number of EP ranks: 12"):
        deep_ep.Buffer.get_combine_config(12)
    with pytest.raises(RuntimeError, match="nvl send < nvl recv"):
        deep_ep.Config(20, 8, 8)
    with pytest.raises(RuntimeError, match="rdma send <= recv / 2"):
        deep_ep.Config(20, 6, 256, 65, 128)
    with pytest.raises(RuntimeError, match="num_ranks < 8 or num_ranks % 8 == 0"):
        config.get_nvl_buffer_size_hint(14336, 12)
    with pytest.raises(AssertionError, match="must be even"):
        deep_ep.Buffer.set_num_sms(21)


@pytest.mark.parametrize("more,stated", [
    ({"allocate_on_comm_stream": True}, "previous_event and async_finish"),
    ({"x": torch.zeros(1, 4, dtype=torch.bfloat16)}, "% 16 == 0"),
    ({"x": torch.zeros(1, 128, dtype=torch.bfloat16)[:, ::2]}, "is_contiguous"),
    ({"x": torch.zeros(1, 8192, dtype=torch.bfloat16)}, r"num_nvl_bytes \(\d+\) >="),
])  # fmt: skip
@on_each_rank(2)
def test_calls_that_the_library_does_not_take_are_refused(
    group: ThreadCommunicator, more: dict[str, Any], stated: str
) -> None:
    if group.rank == 1:
        with pytest.raises(RuntimeError, match=stated):
            dispatch(open_buffer(group), **more)
    else:
        open_buffer(group)


def test_an_event_can_be_a_block_and_have_something_done_after_it() -> None:
    done: list[str] = []
    event = deep_ep.EventOverlap(deep_ep.EventHandle(lambda: done.append("arrived")))
    event.register_hook_after_wait(lambda: done.append("after"))
    with pytest.raises(AssertionError, match="already registered"):
        event.register_hook_after_wait(lambda: None)
    with event:
        done.append("meanwhile")
    assert done == ["meanwhile", "arrived", "after"]
    event.current_stream_wait(release_handle=True)
    with pytest.raises(AssertionError):
        event.current_stream_wait()
