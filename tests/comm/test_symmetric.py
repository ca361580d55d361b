"""A symmetric heap over the memory of one process: offsets, order, limits; then the same between two processes."""

from __future__ import annotations

import ctypes
import os
import random
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.comm import DistributedCommunicator, LockstepWorld, Nodes, SingleRank
from moe_mk.comm.symmetric import SymmetricHeap, WindowShape
from moe_mk.comm.symmetric_memory import FOLDER, Memory, SharedMemory, attach, create, unlink
from moe_mk.comm.symmetric_setup import open_heap
from moe_mk.comm.symmetric_wait import Process, WaitingForProcess
from moe_mk.comm.symmetric_words import LIBATOMIC, AtomicWords, PlainWords, Words, is_behind, word_of, words_of
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.testing.processes import RankError, RankWorld
from moe_mk.trace.clock import now


def heaps(ranks: int, num_flags: int = 2, data_bytes: int = 64) -> list[SymmetricHeap]:
    return [open_heap(comm, num_flags, data_bytes, now) for comm in LockstepWorld(ranks).communicators()]


def row(*numbers: int) -> Tensor:
    return torch.tensor([numbers], dtype=torch.uint8)


# One process.


def test_a_put_lands_at_the_same_offset_of_the_peer_and_nowhere_else() -> None:
    zero, one, two = heaps(3, data_bytes=6)
    zero.put(1, 2, row(7, 8))
    assert one.data(1, 0, 6).tolist() == [0, 0, 7, 8, 0, 0] == two.get(1, 0, 6).tolist()
    assert not zero.data(0, 0, 6).any() and not two.data(2, 0, 6).any()


def test_chosen_rows_are_gathered_into_the_window() -> None:
    zero, one = heaps(2, data_bytes=4)
    rows = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.uint8)
    zero.put(1, 0, rows, torch.tensor([0, 2]))
    assert one.data(1, 0, 4).tolist() == [1, 2, 5, 6]
    zero.put(1, 0, rows, torch.tensor([], dtype=torch.int64))
    assert one.data(1, 0, 4).tolist() == [1, 2, 5, 6]


def test_get_is_a_copy_and_data_is_not() -> None:
    zero, one = heaps(2)
    before, window = zero.get(1, 0, 1), zero.data(1, 0, 1)
    one.put(1, 0, row(9))
    assert before.tolist() == [0] and window.tolist() == [9]


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


@pytest.mark.parametrize("peer,at,count", [(0, 60, 5), (0, -1, 1), (2, 0, 1), (-1, 0, 1)])
def test_nobody_writes_beyond_a_window(peer: int, at: int, count: int) -> None:
    zero, _ = heaps(2, data_bytes=64)
    with pytest.raises(ShapeError, match=rf"bytes {at} to {at + count} of rank {peer} .* 2 windows of 64 bytes"):
        zero.put(peer, at, torch.zeros((1, count), dtype=torch.uint8))


def test_heaps_of_one_world_are_told_apart_by_their_order() -> None:
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


# Words.


def test_epochs_wrap_and_counts_stay_beside_them() -> None:
    assert word_of(3, 5) == 3 * 2**32 + 5
    assert [is_behind(word_of(4, 9), epoch) for epoch in (3, 4, 5)] == [False, False, True]
    assert is_behind(word_of(2**32 - 1, 0), 2**32) and not is_behind(word_of(2**32, 0), 2**32)


@pytest.mark.parametrize("make", [PlainWords, lambda memory: AtomicWords(memory, ctypes.CDLL(LIBATOMIC))])
def test_words_keep_all_bits(make: type[PlainWords]) -> None:
    memory = Memory(256)
    words: Words = make(memory.bytes)
    words.store(128, 2**64 - 2)
    words.fence()
    assert words.load(128) == 2**64 - 2 and words.load(0) == 0
    assert memory.bytes[128:136].tolist() == [254] + [255] * 7


def test_a_processor_without_total_store_order_needs_libatomic() -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    memory = Memory(64).bytes
    assert isinstance(words_of(memory, "x86_64", missing), PlainWords)
    assert isinstance(words_of(memory, "aarch64"), AtomicWords)
    with pytest.raises(UnsupportedError, match=r"aarch64 orders memory weakly and libatomic.so.1 is not installed"):
        words_of(memory, "aarch64", missing)


# Files.


def test_a_file_is_its_owners_alone_and_outlives_its_name() -> None:
    name, mine = create(8192)
    found = (FOLDER / name).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_size == 8192 and found.st_blocks == 0
    theirs = attach(name, 8192)
    unlink(name)
    assert not (FOLDER / name).exists()
    mine.reserve(4096, 100)
    mine.bytes[4097] = 5
    assert theirs.bytes[4097] == 5 and theirs.bytes[:4096].sum() == 0


def test_foreign_files_are_not_mapped(tmp_path: Path) -> None:
    name, _ = create(4096, tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / name)
    with pytest.raises(OSError, match="4096 bytes, expected 8192"):
        attach(name, 8192, tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        attach("link", 4096, tmp_path)
    (tmp_path / name).chmod(0o644)
    with pytest.raises(PermissionError, match=r"mode 0o644, expected our own with 0o600"):
        attach(name, 4096, tmp_path)


def test_full_memory_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = WindowShape(2, 2, 1 << 20)
    name, memory = create(shape.total_bytes)
    unlink(name)

    def full(descriptor: int, start: int, count: int) -> None:
        raise OSError(28, "No space left on device")

    heap = SymmetricHeap(memory, words_of(memory.bytes), shape, 0, lambda phase, epoch, layer: pytest.fail("no wait"))
    heap.put(1, 0, torch.ones((2, 8), dtype=torch.uint8))
    monkeypatch.setattr("os.posix_fallocate", full)
    heap.put(1, 0, torch.ones((2, 8), dtype=torch.uint8))  # what was taken before is taken
    with pytest.raises(CommError, match=r"no room for 24 bytes more, \d+ are free: No space.*kernel.max_num_tokens"):
        heap.put(1, 0, torch.ones((3, 8), dtype=torch.uint8))


# Waiting.


def test_a_wait_looks_once_more_before_it_gives_up() -> None:
    me, ticks = Process.this(), iter(range(1, 1000))
    waiting = WaitingForProcess(0, "combine", 3, "layers.1", peers=[me, me], timeout_s=5, clock=lambda: next(ticks))
    for _ in range(1000):
        waiting.pause(1)
        if waiting._verdict:
            break
    with pytest.raises(CommError, match=r"rank 0, phase 'combine', layer 'layers.1', peer 1: epoch 3: .* within 5 s"):
        waiting.pause(1)


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    me = Process.this()
    assert not me.is_gone(me)
    assert Process(me.number, "1", me.namespace).is_gone(me)
    assert Process(2**22 + 1, "1", me.namespace).is_gone(me)
    assert not Process(2**22 + 1, "1", me.namespace + 1).is_gone(me), "nothing is known of another namespace"


def test_a_killed_process_is_gone_before_anybody_has_reaped_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        seen = Process.of(child.pid)
        assert not seen.is_gone(Process.this())
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still there as a zombie
        assert seen.is_gone(Process.this())
        child.wait()
        assert seen.is_gone(Process.this())


# Two processes.


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(2) as ranks:
        yield ranks


def world_comm(timeout_s: float = 20.0) -> DistributedCommunicator:
    group = dist.group.WORLD
    assert group is not None
    return DistributedCommunicator(group, timeout_s=timeout_s, layer="layers.3")


def exchange_randomly(rank: int, epochs: int, use_libatomic: bool) -> dict[str, int]:
    """Put rows and signal, with delays anywhere; the peer checks that whatever was signalled is there."""
    comm, draw, wrong = world_comm(), random.Random(rank), 0
    heap = open_heap(comm, 4, 2 * 4096, now)
    if use_libatomic:
        heap._words = AtomicWords(heap._memory.bytes, ctypes.CDLL(LIBATOMIC))
    peer = 1 - rank
    for epoch in range(1, epochs + 1):
        count = draw.randrange(0, 65)
        rows = torch.full((count, 64), (epoch + rank) % 256, dtype=torch.uint8)
        _delay(draw)
        if epoch % 2:
            heap.put_signal(peer, 0, rows, rank, epoch)
        else:
            heap.put(peer, 0, rows)
            heap.quiet()
            _delay(draw)
            heap.signal(peer, rank, epoch, count)
        seen = heap.wait_until({peer: peer}, epoch, "dispatch")[peer]
        arrived = heap.get(rank, 0, seen * 64)
        wrong += int((arrived != (epoch + peer) % 256).sum())
        _delay(draw)
        heap.signal(peer, 2 + rank, epoch)  # read: the peer may write again
        heap.wait_until({peer: 2 + peer}, epoch, "combine")
    heap.barrier()
    assert isinstance(heap._memory, SharedMemory)
    return {"wrong": wrong, "names of the file": os.fstat(heap._memory._descriptor).st_nlink}


def _delay(draw: random.Random) -> None:
    if draw.random() < 0.05:
        time.sleep(draw.random() * 3e-4)


@pytest.mark.row(55)
@pytest.mark.parametrize("use_libatomic", [False, True])
def test_what_was_put_is_there_when_its_signal_is_seen(world: RankWorld, use_libatomic: bool) -> None:
    for result in world.call(exchange_randomly, 5_000, use_libatomic):
        assert result == {"wrong": 0, "names of the file": 0}


def meet_at_barriers(rank: int) -> list[int]:
    heap, seen = open_heap(world_comm(), 1, 8, now), []
    for turn in range(200):
        if turn % 50 == rank:
            time.sleep(0.005)
        heap.put(rank, 0, row(turn % 251))
        heap.barrier()
        seen.append(int(heap.get(1 - rank, 0, 1)) - turn % 251)
        heap.barrier()
    return sorted(set(seen))


def test_a_barrier_shows_what_every_rank_put_before(world: RankWorld) -> None:
    assert world.call(meet_at_barriers) == [[0], [0]]


def differ_in_size(rank: int) -> None:
    open_heap(world_comm(), 1, 8 + 8192 * rank, now)


def see_another_folder(rank: int, folder: str) -> str:
    """What a container of its own or another host is: the name is not there."""
    names: list[str] = []

    def noted(num_bytes: int) -> tuple[str, SharedMemory]:
        name, memory = create(num_bytes)
        names.append(name)
        return name, memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_mk.comm.symmetric_setup.create", noted)
        patch.setattr("moe_mk.comm.symmetric_setup.attach", lambda name, size: attach(name, size, Path(folder)))
        with pytest.raises(CommError) as caught:
            open_heap(world_comm(), 1, 8, now)
    assert len(names) == (rank == 0) and not any((FOLDER / name).exists() for name in names)
    return str(caught.value)


def test_ranks_that_cannot_share_all_say_so(world: RankWorld, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="2 of 2 ranks failed") as caught:
        world.call(differ_in_size)
    assert all(f"peer {1 - rank}: opens" in text for rank, text in caught.value.problems.items())
    for text in world.call(see_another_folder, str(tmp_path)):
        assert "not all ranks can map one piece of shared memory: rank 1: [Errno 2] No such file" in text
        assert "[kernel.prepare_finalize = all_to_all" in text


def wait_in_vain(rank: int) -> float:
    heap = open_heap(world_comm(timeout_s=0.4), 1, 8, now)
    start = now()
    if rank == 0:
        with pytest.raises(CommError, match=r"peer 1: epoch 1: sent nothing within 0.4 s \[kernel.timeout_s\]"):
            heap.wait_until({1: 0}, 1, "dispatch")
    return now() - start


def test_a_late_peer_is_named_at_the_deadline(world: RankWorld) -> None:
    assert world.call(wait_in_vain)[0] >= 0.4
