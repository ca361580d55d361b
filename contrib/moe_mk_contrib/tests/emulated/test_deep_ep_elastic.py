"""`ElasticBuffer` as it is emulated: rows in no order, groups with gaps, and what follows the last row."""

from typing import Any

import pytest
import torch
from moe_mk_contrib.emulated import deep_ep

from contrib.moe_mk_contrib.tests.emulated.signatures import DEEPEP, PACKAGE
from moe_mk.comm.threads import ThreadCommunicator
from tests.testing.emulated.deepep_worlds import IDS, WEIGHTS, differences, rows
from tests.testing.emulated.row_library_ranks import on_each_rank, on_ranks

EXPERTS, HIDDEN, MOST = 4, 64, 4
INNER = {  # streams, memory, and what is not about experts
    "ElasticBuffer": {
        "get_engram_storage_size_hint", "get_pp_buffer_size_hint", "get_agrs_num_max_session_bytes",
        "get_agrs_buffer_size_hint", "barrier", "get_comm_stream", "get_physical_domain_size", "engram_write",
        "get_logical_domain_size", "engram_fetch", "pp_set_config", "pp_send", "pp_recv", "create_agrs_session",
        "destroy_agrs_session", "agrs_new_session", "agrs_set_config", "agrs_get_inplace_tensor", "all_gather",
        "get_theoretical_num_sms", "get_theoretical_num_qps",
    },
    "EPHandle": {"deterministic_sort"},
}  # fmt: skip


def test_signatures_are_those_of_the_library() -> None:
    wrong, absent = differences("deep_ep", DEEPEP, PACKAGE)
    assert wrong == [] and absent == {f"{name}.{method}" for name, methods in INNER.items() for method in methods}
    assert deep_ep.topk_idx_t is torch.int64


def open_buffer(group: ThreadCommunicator, **more: Any) -> deep_ep.ElasticBuffer:
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": 2}
    return deep_ep.ElasticBuffer(group, **{**sizes, **more})


def dispatch(buffer: deep_ep.ElasticBuffer, **more: Any) -> Any:
    rank = buffer.exchange.rank
    given = {"x": rows(rank, HIDDEN), "topk_idx": IDS[rank], "topk_weights": WEIGHTS[rank], "num_experts": EXPERTS}
    return buffer.dispatch(**{**given, **more})


@on_each_rank(2)
def test_weights_of_other_ranks_stay_and_rows_are_exact_where_the_host_waits(group: ThreadCommunicator) -> None:
    x, ids, weights, handle, event = dispatch(open_buffer(group, deterministic=True))
    assert event.event is None and x[:, 0].tolist() == [[1.0, 5.0], [1.0, 2.0]][group.rank]
    assert ids.tolist() == [[[0, -1], [0, 1]], [[-1, 1], [0, -1]]][group.rank]
    assert weights.tolist() == [[[0.5, 0.25], [0.75, 0.125]], [[0.5, 0.25], [1.0, 0.0]]][group.rank]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == [[1, 2], [2, 2]][group.rank]
    assert handle.num_recv_tokens_per_expert_list == [[2, 1], [1, 1]][group.rank]
    assert handle.num_unaligned_recv_tokens_per_expert is None


@on_each_rank(2)
def test_without_the_host_everything_behind_the_last_row_is_nothing_at_all(group: ThreadCommunicator) -> None:
    buffer = open_buffer(group)
    x, ids, weights, handle, event = dispatch(buffer, do_cpu_sync=False, async_with_compute_stream=True)
    assert len(x) == 2 * MOST and bool(x.isnan().all()), "not before the event"
    event.current_stream_wait()
    assert bool(x[2:].isnan().all()) and bool(weights[2:].isnan().all())
    assert ids[2:].unique().tolist() == [0], "ids are stale, and look like any other"
    assert handle.num_recv_tokens_per_expert_list == []
    out, _, _ = buffer.combine(x.nan_to_num(0.0), handle)
    assert out[:, 0].tolist() == [[2.0, 2.0, 0.0], [5.0]][group.rank]
    with pytest.raises(RuntimeError, match=r"x.size\(0\) \(2\) == recv_src_metadata.size\(0\) \(8\)"):
        buffer.combine(x[:2].contiguous(), handle)


@on_each_rank(2)
def test_expanded_rows_are_grouped_and_groups_start_at_multiples(group: ThreadCommunicator) -> None:
    buffer = open_buffer(group)
    x, ids, weights, handle, _ = dispatch(buffer, do_expand=True, expert_alignment=4)
    assert ids is None and len(x) == 8
    # rank 0: expert 0 has rows 1 and 5, expert 1 has 5; rank 1: 2, and 1
    assert sorted(x[:4, 0].nan_to_num(0.0).tolist()) == [[0.0, 0.0, 1.0, 5.0], [0.0, 0.0, 0.0, 2.0]][group.rank]
    assert x[4, 0] == [5.0, 1.0][group.rank] and weights[4] == [0.125, 0.25][group.rank]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == [[2, 5], [1, 5]][group.rank]
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == [[2, 1], [1, 1]][group.rank]
    out, _, _ = buffer.combine(torch.where(x.isnan(), 100.0, x), handle)
    assert out[:, 0].tolist() == [[2.0, 2.0, 0.0], [10.0]][group.rank], "gaps go nowhere"
    worst = dispatch(buffer, do_expand=True, do_cpu_sync=False)
    assert len(worst[0]) == 2 * MOST * 2


def test_rows_of_a_source_lie_in_no_order_unless_asked() -> None:
    def job(group: ThreadCommunicator) -> tuple[set[tuple[float, ...]], set[tuple[float, ...]]]:
        ids, weights = torch.zeros(MOST, 1, dtype=torch.int64), torch.ones(MOST, 1)
        x = torch.arange(4.0)[:, None].expand(-1, HIDDEN).bfloat16().contiguous()
        some, same = open_buffer(group, num_topk=1), open_buffer(group, num_topk=1, deterministic=True)

        def orders(buffer: deep_ep.ElasticBuffer) -> set[tuple[float, ...]]:
            calls = [dispatch(buffer, x=x, topk_idx=ids, topk_weights=weights)[0] for _ in range(8)]
            return {tuple(got[:, 0].tolist()) for got in calls}

        return orders(some), orders(same)

    (some, same), _ = on_ranks(2, job)
    assert len(some) > 1 and same == {(0.0, 1.0, 2.0, 3.0) * 2}


@pytest.mark.parametrize("more,stated", [
    ({"previous_event": deep_ep.EventHandle()}, "previous_event wants allocate_on_comm_stream"),
    ({"previous_event": deep_ep.EventOverlap(), "allocate_on_comm_stream": True}, "is an EventHandle"),
    ({"topk_idx": torch.tensor([[0, 0]])}, "at most once in a row"),
    ({"topk_idx": torch.tensor([[0, 1]], dtype=torch.int32)}, "int64"),
    ({"x": torch.zeros(1, 8, dtype=torch.bfloat16)}, "row bytes % 32 == 0"),
    ({"num_experts": None}, "ids, weights, num_experts"),
    ({"x": torch.zeros(5, 64, dtype=torch.bfloat16)}, "num_max_tokens_per_rank"),
    ({"x": (torch.zeros(1, 64).to(torch.float8_e4m3fn), torch.zeros(1, 1, dtype=torch.bfloat16))}, "4 bytes"),
    ({"x": torch.zeros(1, 1 << 19, dtype=torch.bfloat16)}, r"num_bytes \(\d+\) >="),
])  # fmt: skip
@on_each_rank(1)
def test_calls_that_the_library_does_not_take_are_refused(
    group: ThreadCommunicator, more: dict[str, Any], stated: str
) -> None:
    one = {
        "x": torch.zeros(1, HIDDEN, dtype=torch.bfloat16),
        "topk_idx": torch.tensor([[0, 1]]),
        "topk_weights": torch.ones(1, 2),
    }
    with pytest.raises(RuntimeError, match=stated):
        dispatch(open_buffer(group), **{**one, **more})


def test_captured_events_are_handles() -> None:
    assert isinstance(deep_ep.ElasticBuffer.capture(), deep_ep.EventHandle)
