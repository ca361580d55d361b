"""The link `nixl`: what carries its bytes, what it refuses, how it is opened and closed, and its options of UCX."""

import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_mk.comm.network.command import TransferCommand
from moe_mk.comm.network.frames import Frame, FrameError, Kind, LinkEnded, LinkError
from moe_mk.comm.network.heap import NetworkHeap
from moe_mk.comm.network.link import LINKS, PipeLink
from moe_mk.comm.network.nixl import _HEAD, _NOTE, NixlLink, NixlLinks, has_rdma_device, ucx_options
from moe_mk.comm.network.proxy import Proxy, ProxySettings
from moe_mk.comm.network.worker import GOODBYE_S
from moe_mk.comm.threads import ThreadWorld
from moe_mk.errors import CommError
from moe_mk.trace.clock import now
from tests.support.network_ends import NEEDS_NIXL, links_of, own_window, put, store, tcp_pipes
from tests.support.network_proxies import cut, flag_of, proxies, wait_for
from tests.support.networked_heaps import X, in_threads, opened

BYTES_ACKED_AT = 120
"""Of tcpi_bytes_acked in struct tcp_info of Linux."""


def test_ucx_uses_the_device_of_the_address_alone_where_there_is_no_rdma_device(tmp_path: Path) -> None:
    devices = {"lo": "127.0.0.1", "eth0": "10.0.0.7"}
    assert ucx_options("10.0.0.7", devices, has_rdma=False) == "TLS=tcp,NET_DEVICES=eth0"
    assert ucx_options("127.0.0.9", devices, has_rdma=False) == "TLS=tcp"
    assert ucx_options("10.0.0.7", devices, has_rdma=True) == "TLS=^tcp"
    assert not has_rdma_device(tmp_path) and not has_rdma_device(tmp_path / "none")
    (tmp_path / "mlx5_0").mkdir()
    assert has_rdma_device(tmp_path)


def test_links_are_found_by_name() -> None:
    assert list(LINKS) == ["tcp", "nixl"] and LINKS["nixl"] is NixlLinks
    assert [kind.library for _, kind in LINKS.items()] == ["", "nixl"]


def acked_bytes(proxy: Proxy, peer: int) -> int:
    """Bytes that the kernel has seen acknowledged on the connections of a proxy to a peer."""
    total = 0
    for channel in proxy.channels:
        link = channel.streams[peer].link
        assert link is not None
        with socket.socket(fileno=os.dup(link.fileno())) as connected:
            info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("<Q", info, BYTES_ACKED_AT)[0]
    return total


def commit(proxy: Proxy, *commands: TransferCommand) -> None:
    for command in commands:
        wait_for(lambda command=command: proxy.commit(0, command))


@pytest.mark.parametrize("link", ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_the_kernel_counts_payload_on_the_connections_of_tcp_and_headers_alone_with_nixl(
    monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    payload, rounds = 1 << 20, 20
    written: list[int] = []
    is_done = NixlLinks.is_done

    def measured(self: NixlLinks, rank: int, write: object) -> bool:
        done = is_done(self, rank, write)  # type: ignore[arg-type]
        if done and write.state == "DONE":  # type: ignore[attr-defined]
            written.append(write.payload.nbytes)  # type: ignore[attr-defined]
        return done

    monkeypatch.setattr(NixlLinks, "is_done", measured)
    with proxies(2, ProxySettings(channels=1), data_bytes=2 * payload, link=link) as (zero, one):
        for number in range(1, rounds + 1):
            zero.window.registered[:payload] = bytes([number]) * payload
            commit(zero, put(1, 0, payload, payload), store(1, 0, number))
            wait_for(lambda number=number: flag_of(one, 0) == number and zero.is_idle)
            assert one.window.registered[payload:] == zero.window.registered[:payload]
        on_connections = acked_bytes(zero, 1)
    if link == "tcp":
        assert on_connections >= rounds * payload and not written
    else:
        assert on_connections < rounds * 1000 and sum(written) == rounds * payload


@pytest.fixture
def two() -> Iterator[tuple[NixlLinks, NixlLinks]]:
    """The links of ranks 0 and 1, not connected."""
    made = [links_of(own_window(1 << 16), "nixl") for _ in range(2)]
    yield made[0], made[1]  # type: ignore[misc]
    for links in made:
        links.close()


@pytest.mark.parametrize(
    "change,text",
    [
        (lambda own: b"", r"rank 1 sent 0 bytes of NIXL metadata; 49 to 1048576 are accepted"),
        (lambda own: own + b"\0" * (1 << 20), r"rank 1 sent 104\d+ bytes of NIXL metadata"),
        (lambda own: own[: _HEAD.size] + os.urandom(300), "NIXL cannot load the agent of rank 1: nixl"),
        (lambda own: own[:16] + b"f" * 32 + own[_HEAD.size :], r"rank 1 describes agent '[0-9a-f]{32}', not 'ffff"),
        (lambda own: own[:8] + (7).to_bytes(8, "little") + own[16:], "rank 1 registers 7 bytes, this rank 65536"),
    ],
    ids=["none", "too long", "no metadata of NIXL", "another agent", "another size"],
)
def test_metadata_that_cannot_be_used_is_refused(two: tuple[NixlLinks, NixlLinks], change: object, text: str) -> None:
    zero, one = two
    with pytest.raises(LinkError, match=text):
        zero.connect({1: change(one.metadata)})  # type: ignore[operator]


def test_metadata_is_small_and_ranks_with_other_links_end_the_attempt_on_all_ranks() -> None:
    window = own_window(1 << 16)
    links = links_of(window, "nixl")
    assert _HEAD.size < len(links.metadata) < 4096
    links.close()
    world = ThreadWorld(2, timeout_s=20.0)

    def job(rank: int) -> str:
        with pytest.raises(CommError) as caught:
            opened(world.communicators()[rank], link=("tcp", "nixl")[rank])
        return str(caught.value)

    texts = world.together([lambda: job(0), lambda: job(1)])
    assert "peer 1: uses network link 'nixl', this rank 'tcp' [kernel.network_link: the same on all ranks]" in texts[0]
    assert "peer 0: uses network link 'tcp', this rank 'nixl'" in texts[1]


def test_every_rank_of_three_writes_to_every_other() -> None:
    def job(rank: int, heap: NetworkHeap) -> list[int]:
        for peer in {0, 1, 2} - {rank}:
            heap.put_signal(peer, rank * X.nbytes, X + rank, rank, 1)
        heap.wait_until({peer: peer for peer in {0, 1, 2} - {rank}}, 1, "dispatch")
        own = heap.data(rank, 0, 3 * X.nbytes).view(3, -1)
        found = [peer for peer in range(3) if torch.equal(own[peer], (X + peer).flatten().view(torch.uint8))]
        heap.barrier()
        return found

    assert in_threads(3, job, link="nixl") == [[1, 2], [0, 2], [0, 1]]


def connected(two: tuple[NixlLinks, NixlLinks]) -> tuple[NixlLink, NixlLink]:
    zero, one = two
    zero.connect({1: one.metadata})
    one.connect({0: zero.metadata})
    wait_for(lambda: (zero.progress(), one.progress(), not zero.unreached and not one.unreached)[-1])
    pipe, other = tcp_pipes()
    ends = zero.link(pipe, (1, 0, 1)), one.link(other, (0, 0, 1))
    assert isinstance(ends[0], NixlLink) and isinstance(ends[1], NixlLink)
    return ends


@NEEDS_NIXL
@pytest.mark.row(188)
def test_messages_keep_their_order_and_wait_for_their_payload(two: tuple[NixlLinks, NixlLinks]) -> None:
    ours, theirs = connected(two)
    source, into = two[0].context.registered, two[1].context.registered
    source[:100] = 7
    ours.post(Frame(Kind.PAYLOAD, 0, 0, 0, 100, at=50), source.numpy().data[:100])
    ours.post(Frame(Kind.STORE, 0, 1, 1, flag=3, value=9))
    ours._control._send()  # headers go out, and no write has begun
    for _ in range(50):
        assert not list(theirs.progress(lambda frame: memoryview(b"")))
    assert [frame.kind for frame, _ in theirs._held] == [Kind.PAYLOAD, Kind.STORE] and not into.any()
    seen: list[Frame] = []

    def both() -> bool:
        list(ours.progress(refused))
        seen.extend(theirs.progress(lambda frame: memoryview(b"")))
        return len(seen) == 2

    wait_for(both)
    assert [frame.kind for frame in seen] == [Kind.PAYLOAD, Kind.STORE]
    assert into[50:150].eq(7).all() and not into[:50].any() and not into[150:].any()
    assert not theirs.is_busy
    wait_for(lambda: (list(ours.progress(refused)), not ours.is_busy)[-1])


def refused(frame: Frame) -> memoryview:
    raise FrameError(f"{frame} was not expected")


def test_a_header_that_is_refused_ends_the_link_before_its_message_is_seen(two: tuple[NixlLinks, NixlLinks]) -> None:
    ours, theirs = connected(two)
    ours.post(Frame(Kind.PAYLOAD, 0, 0, 0, 100, at=1 << 20), two[0].context.registered.numpy().data[:100])
    ours._control._send()
    with pytest.raises(FrameError, match="was not expected"):
        wait_for(lambda: list(theirs.progress(refused)))
    with pytest.raises(LinkError, match="NIXL cannot write 100 bytes to rank 1: nixl"):  # beyond what rank 1 registered
        wait_for(lambda: list(ours.progress(refused)), seconds=5.0)


@pytest.mark.parametrize("note", [b"short", b"x" * 400])
def test_a_notification_of_another_size_ends_the_link(two: tuple[NixlLinks, NixlLinks], note: bytes) -> None:
    _, theirs = connected(two)
    two[0]._agent.send_notif(two[1].name, note)
    with pytest.raises(FrameError, match=f"a notification of {len(note)} bytes, not 16"):
        wait_for(lambda: (two[0].progress(), list(theirs.progress(refused)))[1])


def test_notifications_of_an_earlier_connection_are_ignored(two: tuple[NixlLinks, NixlLinks]) -> None:
    _, theirs = connected(two)
    pipe, other = tcp_pipes()
    theirs.close()
    later = two[1].link(other, (0, 0, 2))
    assert isinstance(later, NixlLink)
    for attempt in (1, 2):
        two[0]._agent.send_notif(two[1].name, _NOTE.pack(0, attempt, 1))
    wait_for(lambda: (two[0].progress(), two[1].progress(), later._arrivals.numbers == {1})[-1])
    two[1]._rank_of.clear()  # nor are those of an agent that is no rank kept
    two[0]._agent.send_notif(two[1].name, _NOTE.pack(0, 3, 1))
    for each in two * 50:
        each.progress()
    assert set(two[1]._arrivals) == {(0, 0, 2)}
    pipe.close()


def test_no_link_is_opened_while_writes_of_the_last_one_are_under_way(two: tuple[NixlLinks, NixlLinks]) -> None:
    ours, _ = connected(two)
    source = two[0].context.registered
    ours.post(Frame(Kind.PAYLOAD, 0, 0, 0, 60_000), source.numpy().data[:60_000])
    ours._write()  # rank 1 does not take part, so that the write is not done
    assert len(ours._under_way) == 1
    ours.close()
    pipe, other = tcp_pipes()
    with pytest.raises(LinkEnded, match="writes of the link that has ended are still under way"):
        two[0].link(pipe, (1, 0, 2))
    assert two[0].is_busy
    wait_for(lambda: (two[0].progress(), two[1].progress(), not two[0]._left_over)[-1])
    two[0].link(pipe, (1, 0, 2)).close()
    other.close()


@NEEDS_NIXL
@pytest.mark.row(148, 188)
def test_a_link_that_is_cut_under_large_writes_is_resumed_without_a_loss() -> None:
    rows, size = 40, 1 << 20
    with proxies(2, ProxySettings(channels=1), data_bytes=8 * size, link="nixl") as (zero, one):
        for number in range(1, rows + 1):
            at = number % 8 * size
            zero.window.registered[at : at + size] = bytes([number]) * size
            commit(zero, put(1, at, at, size), store(1, 0, number))
            if number % 5 == 0:
                cut(zero, 0, 1)
            if number % 8 == 7:
                wait_for(lambda: zero.is_idle)
        wait_for(lambda: flag_of(one, 0) == rows and zero.is_idle)
        assert one.window.registered == zero.window.registered and not zero.lost and not one.lost


@NEEDS_NIXL
def test_nothing_is_open_after_links_were_closed_and_peers_name_the_end() -> None:
    def now_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    with proxies(3, ProxySettings(channels=1), link="nixl") as made:
        commit(made[0], put(1, 0, 0, 1000), store(1, 0, 1))
        wait_for(lambda: made[0].is_idle)
    before = now_open()
    for _ in range(3):
        with proxies(3, ProxySettings(channels=1), link="nixl") as made:
            commit(made[0], put(1, 0, 0, 1000), store(1, 0, 1))
            wait_for(lambda made=made: made[0].is_idle)
            made[1].links.close()  # as a process that ends
            commit(made[0], put(1, 0, 0, 1000), store(1, 0, 2))
            wait_for(lambda made=made: made[0].lost or made[1].lost)
    assert now_open() <= before


FORKS = """
import os
from tests.support.network_ends import put, store
from tests.support.network_proxies import *
with proxies(2, ProxySettings(channels=1), link="nixl") as (zero, one):
    child = os.fork()
    if not child:
        zero.links.close(), one.links.close()
        del zero, one
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert zero.commit(0, put(1, 0, 0, 1000)) and zero.commit(0, store(1, 0, 5))
    wait_for(lambda: flag_of(one, 0) == 5 and zero.is_idle)
print("went on")
"""


@NEEDS_NIXL
def test_a_forked_child_leaves_the_agent_to_its_parent_and_standard_output_stays_empty() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "went on\n", done.stdout + done.stderr


def test_a_link_without_payload_needs_no_polling() -> None:
    one, other = (PipeLink(pipe) for pipe in tcp_pipes())
    assert not one.is_busy and not one.has_unsent
    one.post(Frame(Kind.BYE))
    assert one.has_unsent and not one.is_busy
    one.close()
    other.close()


@NEEDS_NIXL
def test_a_peer_that_nixl_makes_no_progress_with_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of the proxies lives; rank 1 receives nothing through NIXL any more."""
    is_stuck: list[object] = []
    progress = NixlLinks.progress
    monkeypatch.setattr(NixlLinks, "progress", lambda self: None if self in is_stuck else progress(self))

    def job(rank: int, heap: NetworkHeap) -> str:
        if rank == 1:
            is_stuck.append(heap.proxy.links)
        heap.barrier()
        heap.put_signal(1 - rank, 0, X, rank, 1)
        with pytest.raises(CommError) as caught:
            wait_for_two(heap, 1 - rank)
        return str(caught.value)

    def wait_for_two(heap: NetworkHeap, peer: int) -> None:
        for epoch in (1, 2):
            heap.wait_until({peer: peer}, epoch, "dispatch")

    for rank, text in enumerate(in_threads(2, job, timeout_s=2.0, link="nixl")):
        start = rf"rank {rank}, phase '(dispatch|barrier)', peer {1 - rank}: epoch \d: "
        assert re.match(start + r"(sent nothing within 2 s \[kernel.timeout_s\]|has closed its windows)", str(text)), (
            text
        )


@NEEDS_NIXL
def test_a_rank_that_nixl_cannot_reach_is_named_when_windows_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections of the proxies are there; the greeting of rank 1 is lost."""
    take = NixlLinks._take
    monkeypatch.setattr(NixlLinks, "_take", lambda self, rank, note: None if rank == 1 else take(self, rank, note))
    world = ThreadWorld(2, timeout_s=1.0)

    def job(rank: int) -> str:
        with pytest.raises(CommError) as caught:
            opened(world.communicators()[rank], link="nixl")
        return str(caught.value)

    text = world.together([lambda: job(0), lambda: job(1)])[0]
    assert "peer 1: ranks [1] have not connected over nixl within 1 s [kernel.timeout_s]" in text


def test_a_proxy_whose_peer_is_stuck_ends_soon_after_its_patience() -> None:
    with proxies(2, ProxySettings(channels=1), link="nixl") as (zero, one):
        one.links.progress = lambda: None  # type: ignore[method-assign]
        commit(zero, put(1, 0, 0, 1 << 19), store(1, 0, 1))
        link = zero.channels[0].streams[1].link
        assert isinstance(link, NixlLink)
        wait_for(lambda: link._under_way)
        began = now()
        zero.close(0.2)
        assert 0.2 <= now() - began < 0.2 + GOODBYE_S / 2 and not flag_of(one, 0)
