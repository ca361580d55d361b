"""One-sided transport over several hosts: the protocol of `one_sided`, with CPU proxies that send puts over a link.

For CPU ranks on several hosts without a communication library. Inside a host ranks write each other's memory; between
hosts a rank packs commands of 16 bytes, and a thread of the rank executes them (`comm/network`).

    dispatch  put rows at the peer, then one flag with their count, sent with the last of them
    combine   put each remote peer its sums, then one flag; peers of the same host read theirs in place

On a single host every peer is reached through proxies over loopback, for tests; `one_sided` is the choice there. The
division of work between producer and proxy is that of UCCL-EP. Results equal those of `all_to_all` bit for bit.

`kernel.network_link` chooses what carries rows between proxies (`comm/network/link.py`): TCP, which needs no library,
or NIXL, which writes them by RDMA where there is a device for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.network import LINKS, ProxySettings
from moe_mk.comm.network.heap import NetworkHeap
from moe_mk.comm.network.setup import STAGING_BYTES, Network, open_network_heap, reasons_against_network
from moe_mk.comm.network.tcp import network_of
from moe_mk.comm.symmetric.heap import PAGE_BYTES, aligned
from moe_mk.comm.traffic import Nodes
from moe_mk.config.problem import Problem, Reason
from moe_mk.external.library import LIBRARIES, RDMA, find, installed
from moe_mk.prepare_finalize.base import (
    PREPARE_FINALIZE,
    Budget,
    LinkChoice,
    PrepareFinalize,
    TransportContext,
    TransportTraits,
)
from moe_mk.prepare_finalize.one_sided.buffers import FLAGS_OF_RANK, OneSidedBufferPool, OneSidedBufferSlot, RegionShape
from moe_mk.prepare_finalize.one_sided.transport import OneSided
from moe_mk.quant.wire import row_bytes
from moe_mk.trace.clock import now


@dataclass(frozen=True)
class NetworkRegion(RegionShape):
    """A window with room for the sums that far peers bring, behind the sums of its owner."""

    nodes: Nodes
    addresses: str
    threads: int = ProxySettings.threads
    """Of the proxy of each rank."""
    link: str = "tcp"
    """A name of `LINKS`."""

    @property
    def proxy(self) -> ProxySettings:
        """A ring of commands for each thread at least."""
        return ProxySettings(threads=self.threads, channels=max(self.threads, ProxySettings.channels))

    def data_bytes(self, ranks: int) -> int:
        return self.brought_at(ranks, ranks)

    def brought_at(self, ranks: int, peer: int) -> int:
        """Where a far peer puts the sums of the rows it was sent."""
        own = aligned(super().data_bytes(ranks), PAGE_BYTES)
        return own + peer * aligned(self.rows * self.sum_bytes, PAGE_BYTES)


class NetworkBufferSlot(OneSidedBufferSlot):
    """The windows of all ranks of all hosts for one call at a time. Sums are brought to far peers, not fetched."""

    region: NetworkRegion
    heap: NetworkHeap

    def _open(self, comm: Communicator) -> NetworkHeap:
        self._received: dict[int, int] = {}
        needs = LINKS[self.region.link].library
        network = Network(
            self.region.nodes, self.region.addresses, self.region.proxy, link=self.region.link,
            library=find(needs) if needs else None,
        )  # fmt: skip
        return open_network_heap(comm, FLAGS_OF_RANK * comm.size, self.region.data_bytes(comm.size), now, network)

    def await_rows(self) -> dict[int, int]:
        """Wait until every peer has written; returns how many rows each did."""
        self._received = super().await_rows()
        return self._received

    def show_sums(self, peer: int, first: int) -> None:
        """Send a peer the sums of its rows, or signal where they begin if it can read them there."""
        width = self.region.sum_bytes
        if peer in self.heap.far and (count := self._received[peer]):
            sums = self.heap.data(self.rank, self.sums_at + first * width, count * width)
            self.heap.put(peer, self.region.brought_at(self.size, self.rank), sums.view(count, width))
        super().show_sums(peer, first)

    def sums_of(self, peer: int, first: int, count: int) -> Tensor:
        """The sums that a peer has brought, or has for this rank in its window."""
        if peer not in self.heap.far:
            return super().sums_of(peer, first, count)
        width = self.region.sum_bytes
        return self.heap.data(self.rank, self.region.brought_at(self.size, peer), count * width).view(count, width)


class NetworkBufferPool(OneSidedBufferPool):
    """The windows that layers of a group over several hosts share."""

    slot = NetworkBufferSlot


@PREPARE_FINALIZE.register("one_sided_network")
class OneSidedNetwork(OneSided):
    """Puts and flags in shared memory inside a host, and by proxies over TCP or NIXL between hosts."""

    name: ClassVar[str] = "one_sided_network"
    pool: ClassVar[type[OneSidedBufferPool]] = NetworkBufferPool
    collectives: ClassVar[int] = 4
    """Each of the two flags passes a proxy on either side."""
    traits: ClassVar[TransportTraits] = replace(
        OneSided.traits,
        summary="writes into the memory of peers, by CPU proxies over TCP or NIXL; one copy of a token per rank",
        one_node=False,
        blocking=True,
        comm_unit="threads",
        met="NIXL 1.5 over UCX, on CPUs",
    )
    fuse_layer = PrepareFinalize.fuse_layer

    def _reasons_against_group(self, context: TransportContext) -> list[str]:
        return [*reasons_against_network(context.comm), *_idle_threads(context.comm_units, context.comm.size)]

    def _shape(self, parts: tuple[int, int, int, int]) -> NetworkRegion:
        """Raises ConfigError for a kernel.network or kernel.network_link that is none, LibraryMissing for a link with a
        library that is not installed.
        """
        c = self.context
        network_of(c.network)
        link = link_choice(c.network_link, installed()).name
        if LINKS[link].library:
            find(LINKS[link].library)
        nodes, threads = Nodes.of(c.comm.size, c.ranks_per_node), c.comm_units or ProxySettings.threads
        return NetworkRegion(*parts, nodes, c.network, threads, link)

    @classmethod
    def own_budget(cls, problem: Problem) -> Budget:
        """Return the default number of proxy threads, the same for every problem."""
        del problem
        return Budget(cls.traits.comm_unit, ProxySettings.threads, "the default")

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Limits of `one_sided`, and no more threads than peers."""
        fix = f"kernel.comm_units = {problem.ranks - 1}"
        idle = _idle_threads(problem.config.kernel.comm_units, problem.ranks)
        return [
            *super().reasons_against(problem),
            *(Reason("comm_units", text, fix) for text in idle),
            *_reasons_against_link(problem.config.kernel.network_link, problem.installed),
        ]

    @classmethod
    def link(cls, problem: Problem) -> LinkChoice | None:
        """As `kernel.network_link` names it, or by what is installed."""
        return None if problem.ranks == 1 else link_choice(problem.config.kernel.network_link, problem.installed)

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """One window of this rank, the sums that peers bring, and rows that are being sent."""
        sums = problem.ranks * problem.num_tokens * row_bytes(problem.sums, problem.config.model.hidden_size)
        return super().buffer_bytes(problem) + sums + STAGING_BYTES


def link_choice(asked: str, installed: frozenset[str]) -> LinkChoice:
    """The network link of a setting. installed: optional libraries, and `RDMA` where the host has such a device.

    Raises ConfigError for an unknown name.
    """
    if asked != "auto":
        return LinkChoice(asked, f"{LINKS[asked].summary} [kernel.network_link]")
    library = LINKS["nixl"].library
    against = [] if library in installed else [f"{library} is not installed [{LIBRARIES[library].install}]"]
    if RDMA not in installed:
        against.append("no RDMA device was found, without which it is slower than tcp [kernel.network_link = nixl]")
    if against:
        return LinkChoice("tcp", f"{LINKS['tcp'].summary}; not nixl: {'; '.join(against)}")
    return LinkChoice("nixl", f"{LINKS['nixl'].summary}; the library is installed and an RDMA device was found")


def _reasons_against_link(asked: str, installed: frozenset[str]) -> list[Reason]:
    if asked != "auto" and asked not in LINKS:
        text = f"kernel.network_link={asked!r} is none of auto, {', '.join(LINKS)}"
        return [Reason("network_link", text, "kernel.network_link = auto")]
    library = "" if asked == "auto" else LINKS[asked].library
    if not library or library in installed:
        return []
    fix = f"{LIBRARIES[library].install}, or kernel.network_link = tcp"
    return [Reason("library", f"{library} is not installed, which network link {asked!r} needs", fix)]


def _idle_threads(units: int | None, ranks: int) -> list[str]:
    """A peer is served by one thread, so that a proxy has no use for more threads than peers."""
    if units is None or ranks == 1 or units < ranks:
        return []
    return [f"has {ranks - 1} peers, each served by one thread: {units} threads are too many"]
