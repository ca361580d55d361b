"""A symmetric heap over the memory of one process: offsets, order, limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.comm import LockstepWorld, Nodes, SingleRank
from moe_mk.comm.failure import Failure
from moe_mk.comm.symmetric.heap import NOTE_BYTES, SymmetricHeap, WindowShape
from moe_mk.comm.symmetric.setup import open_heap
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.trace.clock import now


def heaps(ranks: int, num_flags: int = 2, data_bytes: int = 64) -> list[SymmetricHeap]:
    return [open_heap(comm, num_flags, data_bytes, now) for comm in LockstepWorld(ranks).communicators()]


def row(*numbers: int) -> Tensor:
    return torch.tensor([numbers], dtype=torch.uint8)


def test_puts_land_at_their_offset_of_the_peer_alone_and_get_copies() -> None:
    zero, one, two = heaps(3, data_bytes=6)
    before, window = two.get(1, 2, 1), one.data(1, 0, 6)
    zero.put(1, 2, row(7, 8))
    assert before.tolist() == [0] and window.tolist() == [0, 0, 7, 8, 0, 0] == two.get(1, 0, 6).tolist()
    assert not zero.data(0, 0, 6).any() and not two.data(2, 0, 6).any()
    rows = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.uint8)
    for chosen in ([0, 2], []):
        zero.put(1, 0, rows, torch.tensor(chosen, dtype=torch.int64))
        assert window.tolist() == [1, 2, 5, 6, 0, 0]


def test_a_signal_carries_the_number_of_rows_put_before_it() -> None:
    zero, one = heaps(2)
    zero.put_signal(1, 0, torch.ones((3, 4), dtype=torch.uint8), flag=1, epoch=5)
    assert one.wait_until({0: 1}, 5, "dispatch") == {0: 3}
    assert one.wait_until({0: 1}, 4, "dispatch") == {0: 3}, "a fast peer is not missed"
    one.quiet()


@pytest.mark.row(44)
def test_every_operation_is_counted_by_peer_and_so_by_link() -> None:
    # Rank 1 of 4 on two nodes: two rows of 3 bytes to rank 0, one to rank 3, a flag to each, and 5 bytes read from 2.
    one = heaps(4)[1]
    one.put_signal(0, 0, torch.ones((2, 3), dtype=torch.uint8), flag=0, epoch=1)
    one.put_signal(3, 0, torch.ones((1, 3), dtype=torch.uint8), flag=0, epoch=1)
    one.put(3, 0, torch.ones((0, 3), dtype=torch.uint8))
    one.get(2, 0, 5)
    one.read(1, 0, 4)
    assert one.traffic.bytes_by_phase == {"put": 9, "signal": 16, "get": 5}
    assert one.traffic.calls_by_phase == {"put": 2, "signal": 2, "get": 2}
    assert one.traffic.by_link(Nodes.of(4, 2), 1) == {"self": 4, "intra_node": 6 + 8, "inter_node": 3 + 8 + 5}


def test_a_missing_call_of_a_virtual_rank_is_an_error_at_once() -> None:
    zero, one = heaps(2)
    zero.signal(1, 0, epoch=1)
    with pytest.raises(CommError, match=r"rank 1, phase 'dispatch', peer 0: epoch 2: has made no such call"):
        one.wait_until({0: 0}, 2, "dispatch")


@pytest.mark.parametrize(("culprit", "named"), [(0, 0), (1, 1), (3, 3), (None, 1)])
def test_a_reported_failure_names_who_caused_it(culprit: int | None, named: int) -> None:
    world = heaps(4, data_bytes=4 * NOTE_BYTES)
    for heap in world:
        heap.notes_at = 0
    world[1].report(Failure("no memory", culprit), [0])
    for waiting in (world[0], world[2]):
        with pytest.raises(CommError, match=f"peer {named}: no memory"):
            waiting.wait_until({1: 0}, 1, "dispatch")


@pytest.mark.parametrize("peer,at,count", [(0, 60, 5), (0, -1, 1), (2, 0, 1), (-1, 0, 1)])
def test_nobody_writes_beyond_a_window(peer: int, at: int, count: int) -> None:
    zero, _ = heaps(2, data_bytes=64)
    with pytest.raises(ShapeError, match=rf"bytes {at} to {at + count} of rank {peer} .* 2 windows of 64 bytes"):
        zero.put(peer, at, torch.zeros((1, count), dtype=torch.uint8))


def test_heaps_of_one_world_are_distinguished_by_their_order() -> None:
    zero, one = LockstepWorld(2).communicators()
    first, second = open_heap(zero, 1, 8, now), open_heap(zero, 1, 8, now)
    theirs = [open_heap(one, 1, 8, now) for _ in range(2)]
    first.put(1, 0, row(1))
    second.put(1, 0, row(2))
    assert [heap.get(1, 0, 1).item() for heap in theirs] == [1, 2]
    with pytest.raises(CommError, match=r"rank 0, phase 'window set-up', peer 1: opens \d+ bytes .* this rank \d+"):
        open_heap(one, 1, 8, now), open_heap(zero, 1, 5000, now)


def test_a_group_that_shares_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a SingleRank joins neither processes nor virtual ranks"):
        open_heap(SingleRank(), 1, 8, now)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 100_000))
def test_windows_neither_overlap_nor_leave_the_memory(ranks: int, num_flags: int, data_bytes: int) -> None:
    shape = WindowShape(ranks + 1, num_flags, data_bytes)
    assert shape.data_at >= (num_flags + ranks + 1) * 128 and shape.data_at % 4096 == 0
    assert shape.data_at + data_bytes <= shape.window_bytes
    assert shape.total_bytes == (ranks + 1) * shape.window_bytes
