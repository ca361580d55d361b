"""A symmetric heap over hosts: ranks in threads, each a host of its own."""

import errno
import os
import socket
import time
from collections.abc import Mapping
from typing import NoReturn

import pytest
import torch

from moe_mk.comm import Communicator, LockstepWorld, SingleRank
from moe_mk.comm.network import setup as symmetric_network_setup
from moe_mk.comm.network.heap import CHUNK_BYTES, NetworkHeap, Staging
from moe_mk.comm.network.proxy import Proxy, ProxySettings
from moe_mk.comm.network.setup import reasons_against_network
from moe_mk.comm.network.tcp import Address, listen
from moe_mk.comm.threads import ThreadWorld
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.flight import wait
from moe_mk.trace.clock import now
from tests.support.networked_heaps import X, in_threads, opened

pytestmark = pytest.mark.usefixtures("link")


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
    def job(rank: int, heap: NetworkHeap) -> list[tuple[int, bool]]:
        own, found = heap.data(rank, 0, 3 * CHUNK_BYTES).view(6, -1), []
        own.copy_(torch.arange(6)[:, None] + 6 * rank)
        for epoch, rows_RB in enumerate((own, own[::2]), 1):  # the own ones as they are, every second one is gathered
            heap.put(1 - rank, 4 * CHUNK_BYTES, rows_RB)
            heap.signal(1 - rank, 0, epoch)
            heap.wait_until({1 - rank: 0}, epoch, "rows")
            there = heap.data(rank, 4 * CHUNK_BYTES, rows_RB.numel()).view(rows_RB.shape)
            found.append((heap._staging._taken, torch.equal(there, rows_RB - 6 * rank + 6 * (1 - rank))))
            heap.barrier()
        return found

    expected = [(0, True), (3 * CHUNK_BYTES // 2, True)]
    assert in_threads(2, job, data_bytes=7 * CHUNK_BYTES) == [expected] * 2


def test_what_lies_outside_or_elsewhere_is_refused() -> None:
    def job(rank: int, heap: NetworkHeap) -> list[str]:
        stated = []
        for attempt in (
            lambda: heap.data(1 - rank, 0, 4),
            lambda: heap.put(1 - rank, (1 << 16) - 11, X),
            lambda: heap.get(1 - rank, -1, 4),
        ):
            with pytest.raises(ShapeError) as reported:
                attempt()
            stated.append(str(reported.value))
        heap.barrier()
        return stated

    for rank, stated in enumerate(in_threads(2, job)):
        assert stated[0] == f"the window of rank {1 - rank} is on another host; put into it, or get from it"
        assert "bytes 65525 to 65537 of rank" in stated[1] and "bytes -1 to 3 of rank" in stated[2]


def test_groups_that_cannot_wait_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="ranks of a SingleRank cannot wait for each other"):
        opened(SingleRank())
    assert reasons_against_network(LockstepWorld(2).communicators()[0])
    many = ThreadWorld(257).communicators()[0]
    assert reasons_against_network(many) == ["a command names ranks below 256, the group has 257"]


def test_a_network_without_this_host_ends_the_opening_on_every_rank() -> None:
    world = ThreadWorld(2, timeout_s=10.0)

    def job(comm: Communicator) -> str:
        with pytest.raises(CommError) as reported:
            opened(comm, addresses="203.0.113.0/24" if comm.rank else "127.0.0.0/8")
        return str(reported.value)

    for rank, text in enumerate(world.together([lambda c=c: job(c) for c in world.communicators()])):  # type: ignore[misc]
        assert text.startswith(f"rank {rank}, phase 'window set-up': not all ranks can open windows over the network")
        assert "rank 1: kernel.network=203.0.113.0/24 holds no address of this host" in text


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


def test_a_rank_without_descriptors_states_so_when_its_peers_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        def accept(self) -> NoReturn:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def listen_in_vain(network: str) -> tuple[socket.socket, Address]:
        listener, address = listen(network)
        return Full(fileno=listener.detach()), address

    monkeypatch.setattr(symmetric_network_setup, "listen", listen_in_vain)
    world = ThreadWorld(2, timeout_s=1.5)

    def job(comm: Communicator) -> CommError:
        with pytest.raises(CommError) as caught:
            opened(comm)
        return caught.value

    first, second = world.together([lambda c=c: job(c) for c in world.communicators()])  # type: ignore[misc]
    assert first.peer == second.peer == 0, "whoever takes no calls is to blame, not the callers"
    assert "ranks [1] have not connected within 1.5 s [kernel.timeout_s]; this rank cannot take" in str(first)
    assert "their calls: Too many open files [ulimit -n]" in str(first)
    assert "ranks [0] have not connected within 1.5 s" in str(second) and "has not answered" in str(second)


def test_a_rank_that_stops_while_ranks_connect_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timeout_s, late_s = 2.0, [3.2]
    start = Proxy.start

    def stopped(proxy: Proxy, addresses: Mapping[int, Address]) -> None:
        if proxy.rank == 1 and late_s:
            time.sleep(late_s.pop())
        start(proxy, addresses)

    monkeypatch.setattr(Proxy, "start", stopped)
    world = ThreadWorld(3, timeout_s=timeout_s)

    def job(comm: Communicator) -> tuple[int | None, float]:
        began = now()
        with pytest.raises(CommError) as caught, comm.abort_on_error():
            opened(comm)
        took_s = now() - began
        wait(comm.recover())
        opened(comm).barrier()
        return caught.value.peer, took_s

    found = world.together([lambda c=c: job(c) for c in world.communicators()])  # type: ignore[misc]
    for rank in (0, 2):
        peer, took_s = found[rank]
        assert peer == 1 and timeout_s <= took_s < 1.4 * timeout_s, found
