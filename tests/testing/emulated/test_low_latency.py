"""Low latency as deep_ep has it: every law of the emulation, and every refusal."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.external.deepep_limits import low_latency_bytes
from moe_mk.lab.testing.emulated import deep_ep
from tests.testing.emulated.deepep_worlds import IDS, WEIGHTS, rows
from tests.testing.emulated.row_library_ranks import on_each_rank, on_ranks

MOST, HIDDEN, EXPERTS = 4, 2048, 4
BYTES = low_latency_bytes(MOST, HIDDEN, EXPERTS)


def buffer_of(group: ThreadCommunicator, **more: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(group, **{"num_rdma_bytes": BYTES, "low_latency_mode": True, "num_qps_per_rank": 2, **more})


def dispatch(buffer: deep_ep.Buffer, **more: Any) -> Any:
    x = more.pop("x", rows(buffer.rank))
    return buffer.low_latency_dispatch(
        x, more.pop("ids", IDS[buffer.rank]), MOST, EXPERTS, **{"use_fp8": False, **more}
    )


@on_each_rank(2)
def test_nothing_is_visible_before_the_hook_and_inputs_may_change_meanwhile(group: ThreadCommunicator) -> None:
    x, stats = rows(group.rank), torch.zeros(2, dtype=torch.int32)
    x_LSH, counts, handle, event, hook = dispatch(
        buffer_of(group), x=x, return_recv_hook=True, cumulative_local_expert_recv_stats=stats
    )
    assert bool(x_LSH.isnan().all()) and counts.tolist() == [torch.iinfo(torch.int32).min] * 2
    assert stats.tolist() == [0, 0] and len(handle) == 5 and event.event is None
    x.fill_(-1.0)
    hook()
    assert counts.tolist() == [[2, 1], [1, 1]][group.rank] == stats.tolist()
    want = [{1.0, 5.0}, {5.0}] if group.rank == 0 else [{2.0}, {1.0}]
    for expert, values in enumerate(want):
        assert set(x_LSH[expert, : len(values), 0].tolist()) == values
        assert bool(x_LSH[expert, len(values) :].isnan().all()), "nothing is ever written there"
    hook()
    assert counts.tolist() == [[2, 1], [1, 1]][group.rank], "a second call does nothing"


@on_each_rank(2)
def test_an_event_is_another_way_to_wait_and_both_at_once_are_refused(group: ThreadCommunicator) -> None:
    buffer = buffer_of(group)
    _, counts, _, event, hook = dispatch(buffer, async_finish=True)
    assert hook is None and int(counts[0]) < 0
    event.current_stream_wait()
    assert int(counts[0]) > 0 and event.event is not None and event.event.waits == 1
    with pytest.raises(RuntimeError, match=r"not \(async_finish and return_recv_hook\)"):
        dispatch(buffer, async_finish=True, return_recv_hook=True)
    _, counts, _, event, hook = dispatch(buffer)
    assert hook is None and event.event is None and int(counts[0]) > 0, "neither: it is done"


@on_each_rank(2)
def test_a_third_operation_in_flight_is_refused(group: ThreadCommunicator) -> None:
    buffer = buffer_of(group)
    *_, hook = dispatch(buffer, return_recv_hook=True)
    dispatch(buffer, return_recv_hook=True)
    with pytest.raises(RuntimeError, match="at most two low-latency operations in flight"):
        dispatch(buffer)
    hook()
    dispatch(buffer)


def test_rows_of_an_expert_change_places_from_call_to_call() -> None:
    def job(group: ThreadCommunicator) -> tuple[set[tuple[float, ...]], set[int]]:
        buffer, seen, starts = buffer_of(group), set(), set()
        ids = torch.zeros(MOST, 1, dtype=torch.int64)
        x = torch.arange(4.0)[:, None].expand(-1, HIDDEN).add(4 * group.rank).bfloat16().contiguous()
        for _ in range(8):
            x_LSH, counts, handle, *_ = dispatch(buffer, x=x, ids=ids)
            if group.rank == 0:
                seen.add(tuple(x_LSH[0, : int(counts[0]), 0].tolist()))
                begin, count = handle[1][0] >> 32, handle[1][0] & 0xFFFFFFFF
                assert count.tolist() == [4, 4] and sorted(begin.tolist()) == [0, 4]
                starts.add(int(begin[0]))
                for source in range(2):
                    place = slice(int(begin[source]), int(begin[source]) + 4)
                    tokens = handle[0][0, place].float() + 4 * source
                    assert torch.equal(x_LSH[0, place, 0].float(), tokens), "ranges and tokens say who is where"
        return seen, starts

    (orders, starts), _ = on_ranks(2, job)
    assert len(orders) > 1 and all(sorted(order) == list(range(8)) for order in orders)
    assert starts == {0, 4}, "either source may come first"


@pytest.mark.parametrize("ue8m0", [False, True])
@on_each_rank(2)
def test_fp8_rows_have_scales_in_columns(group: ThreadCommunicator, ue8m0: bool) -> None:
    x = rows(group.rank)
    x[:, 0] = 448.0  # the scale of the first 128 channels is 1
    x[:, 128:] = 0.0
    (values, scales), counts, *_ = dispatch(buffer_of(group), x=x, use_fp8=True, round_scale=ue8m0, use_ue8m0=ue8m0)
    assert values.dtype == torch.float8_e4m3fn and values.shape == (2, 8, HIDDEN)
    words = HIDDEN // (512 if ue8m0 else 128)
    assert scales.shape == (2, 8, words) and scales.stride() == (8 * words, 1, 8)
    assert values[0, 0, 0].float() == 448.0
    if ue8m0:
        assert int(scales[0, 0, 0]) & 0xFF == 127, "2^0"
        # An amax of 1e-4 is taken for zeros: 1e-4 / 448 = 2.2e-7, rounded up to 2^-22.
        assert (int(scales[0, 0, 0]) >> 8) & 0xFF == 127 - 22
    else:
        assert scales[0, 0, :2].tolist() == pytest.approx([1.0, 1e-4 / 448])
    assert bool(values[0, int(counts[0]) :].float().isnan().all())


def combined(buffer: deep_ep.Buffer, x: Tensor, handle: Any, **more: Any) -> Tensor:
    ids, weights = more.pop("ids", IDS[buffer.rank]), WEIGHTS[buffer.rank]
    out: Tensor = buffer.low_latency_combine(x, ids, weights, handle, **more)[0]
    return out


@on_each_rank(2)
def test_combine_weighs_and_sums_and_wrong_ids_read_what_nobody_wrote(group: ThreadCommunicator) -> None:
    buffer = buffer_of(group)
    x_LSH, _, handle, *_ = dispatch(buffer)
    # (0.5 + 0.25) 1, 1.0 x 2, nothing; (0.75 + 0.125) 5
    want = [[0.75, 2.0, 0.0], [4.375]][group.rank]
    assert combined(buffer, x_LSH, handle)[:, 0].tolist() == want
    out = torch.zeros(len(want), HIDDEN, dtype=torch.bfloat16)
    assert combined(buffer, x_LSH, handle, out=out) is out and out[:, 0].tolist() == want
    wrong = torch.where(IDS[group.rank] >= 0, (IDS[group.rank] + 1) % EXPERTS, -1)
    assert bool(combined(buffer, x_LSH, handle, ids=wrong)[0].isnan().any())
    staged = buffer.get_next_low_latency_combine_buffer(handle)
    assert not staged.is_contiguous() and staged.shape == x_LSH.shape
    staged.copy_(x_LSH)
    assert combined(buffer, x_LSH, handle, zero_copy=True)[:, 0].tolist() == want
    with pytest.raises(RuntimeError, match=r"not \(zero_copy and use_logfmt\)"):
        combined(buffer, x_LSH, handle, zero_copy=True, use_logfmt=True)


@on_each_rank(2)
def test_a_masked_rank_is_left_out_and_nothing_is_scaled_up(group: ThreadCommunicator) -> None:
    buffer = buffer_of(group, enable_shrink=True)
    status = torch.zeros(2, dtype=torch.int32)
    buffer.low_latency_update_mask_buffer(1 - group.rank, True)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == ([0, 1] if group.rank == 0 else [1, 0])
    x_LSH, counts, handle, *_ = dispatch(buffer)
    assert counts.tolist() == [[1, 0], [0, 0]][group.rank], "only its own"
    assert combined(buffer, x_LSH, handle)[:, 0].tolist() == [[0.5, 0.0, 0.0], [0.0]][group.rank]
    buffer.low_latency_clean_mask_buffer()
    assert dispatch(buffer)[1].tolist() == [[2, 1], [1, 1]][group.rank]
    with pytest.raises(RuntimeError, match="enable_shrink"):
        buffer_of(group).low_latency_update_mask_buffer(0, True)


@on_each_rank(2)
def test_high_throughput_calls_leave_the_buffer_dirty(group: ThreadCommunicator) -> None:
    nvl = deep_ep.Buffer.get_dispatch_config(2).get_nvl_buffer_size_hint(2 * HIDDEN, 2)
    buffer = buffer_of(group, num_nvl_bytes=nvl)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDS[group.rank], EXPERTS)
    buffer.dispatch(
        rows(group.rank), None, per_rank, per_node, in_rank, per_expert, IDS[group.rank], WEIGHTS[group.rank]
    )
    with pytest.raises(RuntimeError, match="clean_low_latency_buffer comes after"):
        dispatch(buffer)
    buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
    dispatch(buffer)


@pytest.mark.parametrize("wrong,stated", [
    ({"x": torch.zeros(1, 2048)}, "x is contiguous bf16"),
    ({"x": torch.zeros(1, 2000, dtype=torch.bfloat16)}, "Unsupported hidden 2000"),
    ({"x": torch.zeros(1, 8192, dtype=torch.bfloat16)}, r"layout.total_bytes \(\d+\) <= num_rdma_bytes"),
    ({"x": torch.zeros(5, 2048, dtype=torch.bfloat16), "ids": torch.zeros(5, 1, dtype=torch.int64)},
     r"x.size\(0\) <= num_max_dispatch_tokens_per_rank"),
    ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "topk_idx.size"),
    ({"ids": torch.zeros(1, 2, dtype=torch.int32)}, "topk_idx is torch.int64"),
    ({"ids": torch.zeros(1, 12, dtype=torch.int64)}, "num_topk <= 11"),
    ({"ids": torch.full((1, 2), 4)}, "topk_idx < num_experts"),
    ({"use_fp8": True, "use_ue8m0": True}, "round_scale"),
    ({"dispatch_wait_recv_cost_stats": torch.zeros(1, 1, dtype=torch.int64)}, "int64 .ranks"),
])  # fmt: skip
@on_each_rank(1)
def test_what_the_kernels_are_not_built_for_is_refused(
    group: ThreadCommunicator, wrong: dict[str, Any], stated: str
) -> None:
    x = {"x": torch.zeros(1, 2048, dtype=torch.bfloat16), "ids": torch.zeros(1, 1, dtype=torch.int64)}
    with pytest.raises(RuntimeError, match=stated):
        dispatch(buffer_of(group), **{**x, **wrong})


@on_each_rank(1)
def test_the_call_itself_is_checked(group: ThreadCommunicator) -> None:
    one, x = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 2048, dtype=torch.bfloat16)
    buffer = buffer_of(group, num_rdma_bytes=low_latency_bytes(600, HIDDEN, EXPERTS))
    with pytest.raises(RuntimeError, match="% 4 == 0"):
        buffer.low_latency_dispatch(x, one, 3, EXPERTS)
    with pytest.raises(AssertionError):  # a queue pair of depth 1024 holds 511 tokens
        buffer.low_latency_dispatch(x, one, 512, EXPERTS)
    with pytest.raises(RuntimeError, match="low_latency_mode"):
        buffer_of(group, low_latency_mode=False).low_latency_dispatch(x, one, MOST, EXPERTS)
    with pytest.raises(ValueError, match="Either 'group' or 'comm'"):
        deep_ep.Buffer(None)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        buffer.destroy()
