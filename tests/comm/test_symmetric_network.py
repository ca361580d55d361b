"""A symmetric heap over hosts: ranks in threads, four processes that are two hosts of two, and what ends in errors."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from moe_mk.comm import Communicator, DistributedCommunicator, LockstepWorld, SingleRank
from moe_mk.comm.proxy.proxy import ProxySettings
from moe_mk.comm.symmetric_network import CHUNK_BYTES, NetworkHeap
from moe_mk.comm.symmetric_network_setup import Network, open_network_heap, reasons_against_network
from moe_mk.comm.symmetric_network_wait import Staging
from moe_mk.comm.threads import ThreadWorld
from moe_mk.comm.traffic import Nodes
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.testing.processes import RankError, RankWorld
from moe_mk.trace.clock import now

X = torch.arange(12, dtype=torch.uint8).view(4, 3)


def opened(
    comm: Communicator, data_bytes: int = 1 << 16, per_node: int | None = None, **network: object
) -> NetworkHeap:
    nodes = Nodes.of(comm.size, per_node)
    return open_network_heap(comm, 4, data_bytes, now, Network(nodes, **network), num_counters=2)  # type: ignore[arg-type]


def in_threads(
    ranks: int, job: Callable[[int, NetworkHeap], object], timeout_s: float = 20.0, **settings: object
) -> list:  # type: ignore[type-arg]
    """One job a rank, each with a heap; every rank is a host of its own."""
    world = ThreadWorld(ranks, timeout_s=timeout_s)

    def whole(comm: Communicator) -> object:
        heap = opened(comm, **settings)  # type: ignore[arg-type]
        try:
            return job(comm.rank, heap)
        finally:
            heap.close()

    return world.together([lambda comm=comm: whole(comm) for comm in world.communicators()])  # type: ignore[misc]


def all_operations(rank: int, heap: NetworkHeap) -> dict[str, object]:
    """Rank 0 puts rows 1 and 3 of X at byte 5 of rank 1, then the whole of X at 100; rank 1 gets from rank 0."""
    peer = 1 - rank
    if rank == 0:
        heap.data(0, 200, 6).copy_(torch.tensor([9, 8, 7, 6, 5, 4], dtype=torch.uint8))
        heap.put(1, 5, X, torch.tensor([1, 3]))
        heap.put_signal(1, 100, X, flag=2, epoch=1)
        heap.add(1, 1, 40)
    counts = heap.wait_until({0: 2}, 1, "rows") if rank == 1 else {}
    own = heap.data(rank, 0, 112)
    found = {"counts": counts, "gathered": own[5:11].tolist(), "whole": own[100:112].tolist()}
    heap.add(peer, 1, 2)
    heap.add(rank, 1, 100)
    heap.barrier()
    heap.quiet()
    found |= {"counter": heap.counter(1), "got": heap.get(0, 200, 6).tolist() if rank == 1 else []}
    found["moved"] = dict(heap.traffic.bytes_by_phase)
    heap.barrier()
    return found


@pytest.mark.row(55)
def test_operations_by_hand() -> None:
    zero, one = in_threads(2, all_operations)
    assert one["counts"] == {0: 4} and one["gathered"] == [3, 4, 5, 9, 10, 11] and one["whole"] == list(range(12))
    assert one["counter"] == 142 and zero["counter"] == 102
    assert one["got"] == [9, 8, 7, 6, 5, 4]
    assert zero["moved"] == {"put": 18, "signal": 16, "add": 16} and one["moved"] == {"signal": 8, "add": 8, "get": 6}


def test_more_than_the_staging_holds_waits_for_confirmations() -> None:
    rows, width = 700, 10_000  # 7 MB through 2 MiB

    def job(rank: int, heap: NetworkHeap) -> bool:
        x_TB = torch.randint(0, 255, (rows, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
        index_X = torch.arange(rows - 1, -1, -1)
        heap.put(1 - rank, 0, x_TB, index_X)
        heap.signal(1 - rank, rank, 1, rows)
        heap.wait_until({1 - rank: 1 - rank}, 1, "rows")
        peer = torch.Generator().manual_seed(1 - rank)
        theirs_TB = torch.randint(0, 255, (rows, width), dtype=torch.uint8, generator=peer)
        same = torch.equal(heap.data(rank, 0, rows * width).view(rows, width), theirs_TB.flip(0))
        back = torch.equal(heap.get(1 - rank, 0, rows * width).view(rows, width), x_TB.flip(0))
        heap.barrier()
        return same and back

    found = in_threads(2, job, data_bytes=rows * width, staging_bytes=1, proxy=ProxySettings(ring_capacity=3))
    assert found == [True, True]


def test_rows_of_the_own_window_travel_without_a_copy() -> None:
    def job(rank: int, heap: NetworkHeap) -> tuple[int, bool]:
        own = heap.data(rank, 0, 3 * CHUNK_BYTES)
        own.fill_(rank + 1)
        heap.put(1 - rank, 4 * CHUNK_BYTES, own.view(3, CHUNK_BYTES))
        heap.signal(1 - rank, 0, 1)
        heap.wait_until({1 - rank: 0}, 1, "rows")
        there = heap.data(rank, 4 * CHUNK_BYTES, 3 * CHUNK_BYTES)
        staged = heap._staging._taken
        heap.barrier()
        return staged, bool((there == 2 - rank).all())

    assert in_threads(2, job, data_bytes=7 * CHUNK_BYTES) == [(0, True), (0, True)]


def test_what_lies_outside_or_elsewhere_is_refused() -> None:
    def job(rank: int, heap: NetworkHeap) -> list[str]:
        said = []
        for attempt in (
            lambda: heap.data(1 - rank, 0, 4),
            lambda: heap.put(1 - rank, (1 << 16) - 11, X),
            lambda: heap.get(1 - rank, -1, 4),
        ):
            with pytest.raises(ShapeError) as told:
                attempt()
            said.append(str(told.value))
        heap.barrier()
        return said

    for rank, said in enumerate(in_threads(2, job)):
        assert said[0] == f"the window of rank {1 - rank} lies on another host; put into it, or get from it"
        assert "bytes 65525 to 65537 of rank" in said[1] and "bytes -1 to 3 of rank" in said[2]


def test_groups_that_cannot_wait_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="ranks of a SingleRank cannot wait for each other"):
        opened(SingleRank())
    assert reasons_against_network(LockstepWorld(2).communicators()[0])
    many = ThreadWorld(257).communicators()[0]
    assert reasons_against_network(many) == ["a command names ranks below 256, the group has 257"]


def test_a_network_without_this_host_ends_the_opening_on_every_rank() -> None:
    world = ThreadWorld(2, timeout_s=10.0)

    def job(comm: Communicator) -> str:
        with pytest.raises(CommError) as told:
            opened(comm, addresses="203.0.113.0/24" if comm.rank else "127.0.0.0/8")
        return str(told.value)

    for rank, text in enumerate(world.together([lambda c=c: job(c) for c in world.communicators()])):  # type: ignore[misc]
        assert text.startswith(f"rank {rank}, phase 'window set-up': not all ranks can open windows over the network")
        assert "rank 1: kernel.network=203.0.113.0/24 holds no address of this host" in text


def test_ranks_that_open_other_windows_are_told() -> None:
    world = ThreadWorld(2, timeout_s=10.0)

    def job(comm: Communicator) -> str:
        with pytest.raises(CommError) as told:
            opened(comm, data_bytes=4096 * (1 + comm.rank))
        return str(told.value)

    texts = world.together([lambda c=c: job(c) for c in world.communicators()])  # type: ignore[misc]
    assert all("opens windows of" in text and f"peer {1 - rank}" in text for rank, text in enumerate(texts))


def test_a_late_peer_is_named_with_phase_and_epoch() -> None:
    def job(rank: int, heap: NetworkHeap) -> str:
        heap.barrier()
        if rank == 1:
            time.sleep(1.0)
            return ""
        began = now()
        with pytest.raises(CommError) as told:
            heap.wait_until({1: 1}, 7, "dispatch")
        assert 0.4 < now() - began < 5.0
        return str(told.value)

    zero, _ = in_threads(2, job, timeout_s=0.5)
    assert zero.startswith("rank 0, phase 'dispatch', peer 1: epoch 7: sent nothing within 0.5 s [kernel.timeout_s]")


def test_staging_is_taken_and_freed_in_order() -> None:
    done: set[int] = set()
    staging = Staging(1000, 100, lambda channel, place: place in done)
    assert staging.take(60) == 1000
    staging.used(0, 0)
    assert staging.take(60) is None, "40 bytes are left"
    assert staging.take(40) == 1060
    staging.used(0, 1)
    done.add(1)
    assert staging.take(10) is None, "the first is not done"
    done.add(0)
    assert staging.take(70) == 1000
    staging.used(0, 2)
    assert staging.take(40) is None and staging.take(30) == 1070


# Four processes: two hosts of two.


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(4) as ranks:
        yield ranks


def comm_of_world(timeout_s: float = 30.0) -> DistributedCommunicator:
    assert dist.group.WORLD is not None
    return DistributedCommunicator(dist.group.WORLD, timeout_s=timeout_s, layer="layers.3")


def fuzz(rank: int, rounds: int, per_node: int) -> dict[str, object]:
    """Random rows to every peer, each announced by a flag; what a flag announces must be there."""
    heap = opened(comm_of_world(), per_node=per_node)
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
def test_rows_and_flags_between_hosts_and_inside_them(world: RankWorld) -> None:
    total = sum(range(1, 61))
    for rank, found in enumerate(world.call(fuzz, 60, 2)):
        far = [2, 3] if rank < 2 else [0, 1]
        assert found == {"wrong": 0, "far": far, "counter": total, "shared": True}
    for rank, found in enumerate(world.call(fuzz, 30, 1)):
        others = [peer for peer in range(4) if peer != rank]
        assert found == {"wrong": 0, "far": others, "counter": sum(range(1, 31)), "shared": False}


def leave_nothing(rank: int) -> list[int]:
    """Files and threads more than before, after heaps were used and dropped."""
    opened(comm_of_world(), per_node=2).barrier()

    def now_open() -> list[int]:
        threads = [thread for thread in threading.enumerate() if thread.name == "moe-mk proxy"]
        return [len(os.listdir("/proc/self/fd")), len(threads)]

    before = now_open()
    for _ in range(3):
        heap = opened(comm_of_world(), per_node=2)
        heap.barrier()
        del heap
    return [after - earlier for after, earlier in zip(now_open(), before, strict=True)]


def test_a_dropped_heap_leaves_no_thread_and_no_file(world: RankWorld) -> None:
    for files, threads in world.call(leave_nothing):
        assert files <= 0 and threads <= 0


def until_one_dies(rank: int, how: str) -> str:
    heap = opened(comm_of_world(timeout_s=30.0 if how == "killed" else 1.5), per_node=2)
    for epoch in range(1, 30):
        if epoch == 20 and rank == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3.0)  # stuck, with every connection open
            return ""
        start = now()
        try:
            for peer in range(4):
                if peer != rank:
                    heap.put_signal(peer, rank * 12, X, rank, epoch)
            heap.wait_until({peer: peer for peer in range(4) if peer != rank}, epoch, "dispatch")
        except CommError as error:
            return f"{now() - start < 10.0} {error}"
    return "nobody died"


def test_a_stuck_peer_ends_in_an_error_at_the_deadline(world: RankWorld) -> None:
    texts = world.call(until_one_dies, "stuck")
    for rank in (0, 1, 3):
        assert texts[rank].startswith(
            f"True rank {rank}, phase 'dispatch', layer 'layers.3', peer 2: epoch 20: sent no"
        )


# Last of all: the world does not outlive it.
def test_a_killed_peer_is_named_long_before_the_deadline(world: RankWorld) -> None:
    with pytest.raises(RankError, match="1 of 4 ranks failed\nrank 2: the process ended with exit code -9") as caught:
        world.call(until_one_dies, "killed")
    for rank in (0, 1, 3):
        text = str(caught.value.results[rank])
        # What it had committed last may be lost with it: then it is missed one epoch earlier.
        where = rf"True rank {rank}, phase 'dispatch', layer 'layers.3', peer 2: epoch (19|20): its (process|proxy)"
        assert re.match(where, text) and "has ended" in text, text
