"""A symmetric heap over four processes that are two hosts of two, and what ends in errors."""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_mk.errors import CommError
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.trace.clock import now
from tests.support.networked_heaps import X, opened
from tests.support.one_sided_ranks import world_comm


@pytest.fixture(scope="module")
def world(world_link: str) -> Iterator[RankWorld]:
    with RankWorld(4) as ranks:
        yield ranks


def fuzz(rank: int, rounds: int, per_node: int, link: str) -> dict[str, object]:
    """Random rows to every peer, each announced by a flag; what a flag announces must be there."""
    heap = opened(world_comm(), per_node=per_node, link=link)
    draw, wrong, size, region = random.Random(rank), 0, heap.size, 8000
    for epoch in range(1, rounds + 1):
        for peer in draw.sample(range(size), size):
            if peer != rank:
                count = draw.choice((0, 1, 7, 80))
                heap.put_signal(
                    peer, rank * region, torch.full((count, 100), (epoch + rank) % 256).to(torch.uint8), rank, epoch
                )
        for peer, count in heap.wait_until({p: p for p in range(size) if p != rank}, epoch, "rows").items():
            wrong += int((heap.data(rank, peer * region, count * 100) != (epoch + peer) % 256).sum())
        heap.add((rank + 1) % size if per_node == 1 else rank, 0, epoch)
        heap.barrier()
    heap.quiet()
    heap.barrier()
    return {"wrong": wrong, "far": sorted(heap.far), "counter": heap.counter(0), "shared": heap.is_concurrent}


@pytest.mark.row(149)
def test_rows_and_flags_between_hosts_and_inside_them(world: RankWorld, world_link: str) -> None:
    total = sum(range(1, 61))
    for rank, found in enumerate(world.call(fuzz, 60, 2, world_link)):
        far = [2, 3] if rank < 2 else [0, 1]
        assert found == {"wrong": 0, "far": far, "counter": total, "shared": True}
    for rank, found in enumerate(world.call(fuzz, 30, 1, world_link)):
        others = [peer for peer in range(4) if peer != rank]
        assert found == {"wrong": 0, "far": others, "counter": sum(range(1, 31)), "shared": False}


def leave_nothing(rank: int, link: str) -> list[int]:
    """Files and threads more than before, after heaps were used and dropped."""
    opened(world_comm(), per_node=2, link=link).barrier()

    def now_open() -> list[int]:
        threads = [thread for thread in threading.enumerate() if thread.name == "moe-mk proxy"]
        return [len(os.listdir("/proc/self/fd")), len(threads)]

    before = now_open()
    for _ in range(3):
        heap = opened(world_comm(), per_node=2, link=link)
        heap.barrier()
        del heap
    return [after - earlier for after, earlier in zip(now_open(), before, strict=True)]


def test_a_dropped_heap_leaves_no_thread_and_no_file(world: RankWorld, world_link: str) -> None:
    for files, threads in world.call(leave_nothing, world_link):
        assert files <= 0 and threads <= 0


def until_one_dies(rank: int, how: str, signs: str, link: str) -> str:
    """What a rank is reported of rank 2, which is killed, or is stuck until the others have been reported."""
    heap = opened(world_comm(timeout_s=30.0 if how == "killed" else 3.0), per_node=2, link=link)
    for epoch in range(1, 30):
        if epoch == 20 and rank == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            deadline = now() + 50.0
            while len(list(Path(signs).iterdir())) < 3 and now() < deadline:  # stuck, with every connection open
                time.sleep(0.02)
            return ""
        start = now()
        try:
            for peer in range(4):
                if peer != rank:
                    heap.put_signal(peer, rank * 12, X, rank, epoch)
            heap.wait_until({peer: peer for peer in range(4) if peer != rank}, epoch, "dispatch")
        except CommError as error:
            (Path(signs) / str(rank)).touch()
            return f"{now() - start < 20.0} {error}"
    return "nobody died"


def test_a_stuck_peer_ends_in_an_error_at_the_deadline(world: RankWorld, world_link: str, tmp_path: Path) -> None:
    texts = world.call(until_one_dies, "stuck", str(tmp_path), world_link)
    for rank in (0, 1, 3):
        assert texts[rank].startswith(
            f"True rank {rank}, phase 'dispatch', layer 'layers.3', peer 2: epoch 20: sent no"
        )


# Last of all: the world does not outlive it.
def test_a_killed_peer_is_named_long_before_the_deadline(world: RankWorld, world_link: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="1 of 4 ranks failed\nrank 2: the process ended with exit code -9") as caught:
        world.call(until_one_dies, "killed", str(tmp_path), world_link)
    for rank in (0, 1, 3):
        text = str(caught.value.results[rank])
        # What it had committed last may be lost with it: then it is missed one epoch earlier.
        where = rf"True rank {rank}, phase 'dispatch', layer 'layers.3', peer 2: epoch (19|20): (its process|link )"
        assert re.match(where, text) and "has ended" in text, text
