"""A symmetric heap between two processes."""

import ctypes
import os
import random
import time
from pathlib import Path

import pytest
import torch

from moe_mk.comm.symmetric.flags import LIBATOMIC, AtomicWords
from moe_mk.comm.symmetric.memory import FOLDER, SharedMemory, attach, create
from moe_mk.comm.symmetric.setup import open_heap
from moe_mk.errors import CommError
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.trace.clock import now
from tests.comm.symmetric.test_heap import row
from tests.support.one_sided_ranks import world_comm
from tests.support.worlds import world_of

pytestmark = pytest.mark.slow
world = world_of(2)


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
    for result in world.call(exchange_randomly, 2_000, use_libatomic):
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
        patch.setattr("moe_mk.comm.symmetric.setup.create", noted)
        patch.setattr("moe_mk.comm.symmetric.setup.attach", lambda name, size: attach(name, size, Path(folder)))
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
