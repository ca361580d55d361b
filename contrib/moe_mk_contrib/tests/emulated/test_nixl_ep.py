"""Where NIXL EP differs from deep_ep: signatures, ids, handles, masks, how ranks meet."""

from typing import Any

import pytest
import torch
from moe_mk_contrib.emulated import nixl_ep

from contrib.moe_mk_contrib.tests.emulated.signatures import DEEPEP, PACKAGE
from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.external.deepep_limits import low_latency_bytes
from tests.testing.emulated.deepep_worlds import IDS, WEIGHTS, differences, rows
from tests.testing.emulated.row_library_ranks import on_each_rank

MOST, HIDDEN, EXPERTS = 4, 2048, 4
BYTES = low_latency_bytes(MOST, HIDDEN, EXPERTS)


def test_nixl_has_its_own_names_and_no_emulated_high_throughput() -> None:
    wrong, absent = differences("nixl_ep", DEEPEP, PACKAGE)
    assert wrong == []
    assert absent == {
        f"Buffer.{name}"
        for name in (
            "is_sm90_compiled", "set_num_sms", "get_comm_stream", "get_local_buffer_tensor", "get_dispatch_config",
            "get_combine_config", "get_dispatch_layout", "ht_dispatch", "ht_combine",
        )
    }  # fmt: skip
    assert nixl_ep.topk_idx_t is torch.int32


def open_nixl(group: ThreadCommunicator, connect: bool = True) -> nixl_ep.Buffer:
    buffer = nixl_ep.Buffer(rank=group.rank, group=group)
    buffer.update_memory_buffers(2, 2, BYTES)
    if connect:
        buffer.connect_ranks([1 - group.rank])
    return buffer


def nixl_dispatch(buffer: nixl_ep.Buffer, **more: Any) -> Any:
    return buffer.dispatch(rows(buffer.rank), IDS[buffer.rank].to(torch.int32), MOST, use_fp8=False, **more)


def status_of(buffer: nixl_ep.Buffer) -> list[int]:
    status = torch.zeros(2, dtype=torch.int32)
    buffer.query_mask_buffer(status)
    return status.tolist()


@on_each_rank(2)
def test_nixl_ids_are_int32_and_a_handle_has_four_parts(group: ThreadCommunicator) -> None:
    buffer = open_nixl(group)
    x, counts, handle, *_ = nixl_dispatch(buffer)
    assert counts.tolist() == [[2, 1], [1, 1]][group.rank] and len(handle) == 4
    out, *_ = buffer.combine(x, IDS[group.rank].to(torch.int32), WEIGHTS[group.rank], handle)
    assert out[:, 0].tolist() == [[0.75, 2.0, 0.0], [4.375]][group.rank]
    with pytest.raises(RuntimeError, match="topk_idx is torch.int32"):
        buffer.dispatch(rows(group.rank), IDS[group.rank], MOST)
    with pytest.raises(RuntimeError, match="num_experts is the physical capacity"):
        nixl_dispatch(buffer, num_experts=8)


@on_each_rank(2)
def test_nixl_ranks_take_part_once_connected_and_anything_but_zero_is_masked(group: ThreadCommunicator) -> None:
    buffer = open_nixl(group, connect=False)
    assert status_of(buffer)[1 - group.rank] == -1 and status_of(buffer)[group.rank] == 0
    assert nixl_dispatch(buffer)[1].tolist() == [[1, 0], [0, 0]][group.rank], "only its own"
    buffer.connect_ranks([1 - group.rank])
    assert status_of(buffer) == [0, 0] and nixl_dispatch(buffer)[1].tolist() == [[2, 1], [1, 1]][group.rank]
    buffer.update_mask_buffer(1 - group.rank, True)
    assert status_of(buffer)[1 - group.rank] == 1
    assert nixl_dispatch(buffer)[1].tolist() == [[1, 0], [0, 0]][group.rank]
    buffer.clean_mask_buffer()
    assert status_of(buffer) == [0, 0]
    with pytest.raises(RuntimeError, match="the local rank cannot be masked"):
        buffer.update_mask_buffer(group.rank, True)


@on_each_rank(2)
def test_nixl_lets_only_the_last_ranks_go(group: ThreadCommunicator) -> None:
    buffer = open_nixl(group)
    if group.rank == 0:
        buffer.disconnect_ranks([1])
        assert status_of(buffer) == [0, -1]
    with pytest.raises(RuntimeError, match="remote_ranks are the last ones"):
        buffer.disconnect_ranks([0])
    fresh = nixl_ep.Buffer(rank=group.rank, group=group)
    with pytest.raises(RuntimeError, match="update_memory_buffers comes"):
        fresh.connect_ranks([1 - group.rank])
    with pytest.raises(RuntimeError, match="rank is that of the group"):
        nixl_ep.Buffer(rank=5, group=group)


@on_each_rank(1)
def test_nixl_kernels_know_one_more_length_and_more_experts_a_token(group: ThreadCommunicator) -> None:
    hint = nixl_ep.Buffer.get_rdma_size_hint(MOST, 3584, 1, 16)
    assert hint == nixl_ep.Buffer.get_low_latency_buffer_size_hint(MOST, 3584, 1, 16)
    buffer = nixl_ep.Buffer(rank=0, group=group)
    buffer.update_memory_buffers(1, 16, hint)
    ids = torch.arange(16, dtype=torch.int32)[None]
    counts = buffer.dispatch(torch.ones(1, 3584, dtype=torch.bfloat16), ids, MOST)[1]
    assert counts.tolist() == [1] * 16
