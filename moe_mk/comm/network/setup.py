"""Opening a symmetric heap over hosts: who shares memory with whom, who listens where, and then everybody connects.

The group is used for small gathers: where each rank listens, with its token, and what the memory of its host is called;
whether all could map that and open their links; what links need of each other (bytes, of checked size); whether all are
connected. A rank that could not ends the attempt on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from types import ModuleType
from typing import Any

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S, DistributedCommunicator
from moe_mk.comm.header import host_number
from moe_mk.comm.network.command import FIELD_BITS
from moe_mk.comm.network.events import OnStep
from moe_mk.comm.network.exchange import no_step
from moe_mk.comm.network.frames import LinkEnded, LinkError
from moe_mk.comm.network.heap import CHUNK_BYTES, NetworkHeap, Staging, WaitingForHosts
from moe_mk.comm.network.link import LINKS, Links, LinksContext
from moe_mk.comm.network.proxy import RESUME_S, Proxy, ProxySettings
from moe_mk.comm.network.tcp import LOOPBACK, Address, listen
from moe_mk.comm.network.window import OwnWindow
from moe_mk.comm.symmetric.flags import (
    Clock,
    Words,
    reasons_against_words,
    words_of,
)
from moe_mk.comm.symmetric.heap import FLAG_BYTES, WindowShape, aligned
from moe_mk.comm.symmetric.memory import Memory
from moe_mk.comm.symmetric.setup import PHASE, Opening
from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.comm.traffic import Nodes
from moe_mk.errors import CommError, ConfigError, UnsupportedError, unless_signalled
from moe_mk.process import Process, WatchedProcess

MOST_RANKS = 1 << FIELD_BITS["peer"]
MOST_METADATA_BYTES = 1 << 20
"""What the links of one rank may have others know."""
STAGING_BYTES = 64 << 20
"""For rows that are being sent; puts of more rows wait."""


@dataclass(frozen=True)
class Network:
    """Where ranks lie, where they listen, and how much their proxies may take."""

    nodes: Nodes
    """Ranks of one node share memory; all others, and all if there is but one node, are reached over sockets."""
    addresses: str = LOOPBACK
    """The IPv4 network whose address each rank listens on, such as 10.0.0.0/24. Never more than that is bound."""
    proxy: ProxySettings = field(default_factory=ProxySettings)
    staging_bytes: int = STAGING_BYTES
    link: str = "tcp"
    """What carries messages between proxies: a name of `LINKS`, the same on all ranks."""
    library: ModuleType | None = None
    """The library of that link, imported; None for links without one."""
    on_step: OnStep = no_step

    def near(self, comm: Communicator) -> list[int]:
        """The ranks that share memory with one, itself included: only processes can."""
        if self.nodes.num_nodes == 1 or not isinstance(comm, DistributedCommunicator):
            return [comm.rank]
        return list(self.nodes.members(self.nodes.node_of_W[comm.rank]))


def reasons_against_network(comm: Communicator) -> list[str]:
    """Why a group cannot have windows over sockets, as far as one rank can determine; empty if it can."""
    kinds = (ThreadCommunicator, DistributedCommunicator)
    reasons = [] if isinstance(comm, kinds) else [f"ranks of a {type(comm).__name__} cannot wait for each other"]
    if comm.size > MOST_RANKS:
        reasons.append(f"a command names ranks below {MOST_RANKS}, the group has {comm.size}")
    return [*reasons, *filter(None, [reasons_against_words()])]


def open_network_heap(
    comm: Communicator, num_flags: int, data_bytes: int, clock: Clock, network: Network, num_counters: int = 0
) -> NetworkHeap:
    """Open the same heap on every rank; all ranks must do so in the same order. Blocks until all are connected.

    Raises UnsupportedError for a group that cannot, CommError if ranks disagree, are late, or cannot reach each other.
    """
    if reasons := reasons_against_network(comm):
        raise UnsupportedError("no windows can be opened over this network", reasons)
    staging = max(network.staging_bytes, 2 * CHUNK_BYTES)
    shape = WindowShape(comm.size, num_flags + num_counters * comm.size, aligned(data_bytes) + staging)
    with _Opening(comm, shape, aligned(data_bytes), num_flags, num_counters, clock, network) as opening:
        return opening.open()


class _Opening(Opening):
    """State of a heap that is being opened."""

    failed = "not all ranks can open windows over the network"
    remedy = ""
    problems = (OSError, LinkError, ConfigError)

    def __init__(
        self, comm: Communicator, shape: WindowShape, data_bytes: int, num_flags: int, num_counters: int, clock: Clock,
        network: Network,
    ) -> None:  # fmt: skip
        super().__init__(comm, shape, network.near(comm))
        self.clock, self.network, self.far = clock, network, frozenset(range(comm.size)) - set(self.near)
        self.data_bytes, self.num_flags, self.num_counters = data_bytes, num_flags, num_counters
        waits = comm.world if isinstance(comm, ThreadCommunicator) else comm
        self.timeout_s = float(getattr(waits, "timeout_s", DEFAULT_TIMEOUT_S))
        self._links: Links | None = None

    def open(self) -> NetworkHeap:
        listening, problem = self.tried(lambda: listen(self.network.addresses))
        proxy = None
        try:
            mapping = self.tried(self.create)[1]
            address = listening[1] if listening else Address("", 0, b"")
            notes = self.agreed(
                {
                    "host": address.host, "port": address.port, "token": address.token.hex(), "name": self.name,
                    "link": self.network.link, "kernel": host_number(), "problem": problem or mapping,
                }
            )  # fmt: skip
            link = self.network.link
            if other := next(((peer, note["link"]) for peer, note in enumerate(notes) if note["link"] != link), None):
                text = f"uses network link {other[1]!r}, this rank {link!r}"
                self.fail(f"{text} [kernel.network_link: the same on all ranks]", other[0])
            attaching = self.tried(lambda: self.attach(notes))[1]
            own, opening = (b"", "") if attaching else self.tried(lambda: self._open_links(address.host))
            known = self.agreed({"metadata": (own or b"").hex(), "problem": attaching or opening})
            assert self.memory is not None and listening is not None and self._links is not None
            if any(note["metadata"] for note in known):  # before threads work: a greeting of an unknown rank is lost
                theirs = {peer: bytes.fromhex(known[peer]["metadata"]) for peer in sorted(self.far)}
                for peer, metadata in theirs.items():
                    if (size := len(metadata)) > MOST_METADATA_BYTES:
                        text = f"describes its {link} links in {size} bytes, more than {MOST_METADATA_BYTES}"
                        self.fail(text, peer)
                self.agreed({"problem": self.tried(partial(self._links.connect, theirs))[1]})
            words = words_of(self.memory.bytes)
            proxy = Proxy(
                self.comm.rank, sorted(self.far), self._own_window(self.memory, words), listening, self.clock,
                self.network.proxy, self._links, self.network.on_step, min(RESUME_S, self.timeout_s / 2),
            )  # fmt: skip
            self._connect(proxy, notes)
            return self._heap(proxy, self.memory, words, self._processes(notes))
        except BaseException:
            if proxy is not None:
                proxy.close(0.0)
            elif listening is not None:
                listening[0].close()
            if self._links is not None:
                self._links.close()
            raise

    def _processes(self, notes: list[dict[str, Any]]) -> list[WatchedProcess]:
        """The processes of all ranks; those that another kernel runs get a namespace in which nothing can be seen."""
        own = notes[self.comm.rank]["kernel"]
        processes = [Process(**note["process"]) for note in notes]
        return [
            WatchedProcess.of(each if note["kernel"] == own != 0 or peer in self.near else replace(each, namespace=-1))
            for peer, (each, note) in enumerate(zip(processes, notes, strict=True))
        ]

    def _open_links(self, address: str) -> bytes:
        """Open the links of this rank; returns what others must know of them."""
        assert self.memory is not None
        kind, shape = LINKS[self.network.link], self.shape
        data_at = self.comm.rank * shape.window_bytes + shape.data_at
        if kind.writes_memory:
            self.memory.reserve(data_at, shape.data_bytes)
        registered = self.memory.bytes[data_at : data_at + shape.data_bytes]
        self._links = kind(LinksContext(registered, address, self.clock, self.network.library))
        return self._links.metadata

    def _connect(self, proxy: Proxy, notes: list[dict[str, Any]]) -> None:
        """Call the far ranks below this one, and wait for the calls of those above, all until one deadline.

        A rank that is late raises here at once. Ranks are not asked whether they are connected then: the exchange of
        their answers would wait for the late one as long again, and close the connections of the group.
        """
        addresses = {
            rank: Address(note["host"], int(note["port"]), bytes.fromhex(note["token"]))
            for rank, note in enumerate(notes)
        }
        proxy.start({rank: addresses[rank] for rank in self.far})
        until, problem, attempt = self.clock() + self.timeout_s, "", ""
        try:
            proxy.connect(self.timeout_s)
            while (proxy.missing or proxy.links.unreached) and not proxy.lost and self.clock() < until:
                proxy.window.arrived.clear()
                proxy.window.arrived.wait(0.01)
        except LinkEnded as ended:
            attempt = str(ended)
        except unless_signalled(OSError, LinkError) as refused:
            problem = str(refused)
        if not problem and proxy.lost:
            problem = "; ".join(proxy.lost.values())
        elif not problem and (proxy.missing or proxy.links.unreached):
            raise self._late(proxy, attempt)
        self.agreed({"problem": problem})

    def _late(self, proxy: Proxy, attempt: str) -> CommError:
        """Name the first rank that has not connected, or this one if it could not take the calls of others."""
        late = proxy.missing or proxy.links.unreached
        peer, missing = late[0], ", ".join(map(str, late[:9]))
        over = "" if proxy.missing else f" over {self.network.link}"
        text = f"ranks [{missing}] have not connected{over} within {self.timeout_s:g} s [kernel.timeout_s]"
        text = f"{text}: {attempt}" if attempt else text
        if proxy.trouble:
            peer = self.comm.rank
            text += f"; this rank cannot take their calls: {proxy.trouble} [ulimit -n]"
        return CommError(text, rank=self.comm.rank, phase=PHASE, layer=self.comm.layer, peer=peer)

    def _own_window(self, memory: Memory, words: Words) -> OwnWindow:
        base, shape = self.comm.rank * self.shape.window_bytes, self.shape
        data_at = base + shape.data_at
        return OwnWindow(
            registered=memory.bytes.numpy().data[data_at : data_at + shape.data_bytes],
            data_bytes=self.data_bytes,
            num_flags=shape.num_flags + shape.ranks,
            words=words,
            flag_at=lambda flag: base + flag * FLAG_BYTES,
            sources=self.comm.size,
            num_counters=self.num_counters,
            arrived=Event(),
            reserve=lambda start, num_bytes: memory.reserve(data_at + start, num_bytes),
            counter_flags=range(self.num_flags, shape.num_flags),
        )

    def _heap(self, proxy: Proxy, memory: Memory, words: Words, peers: list[WatchedProcess]) -> NetworkHeap:
        staging_bytes = self.shape.data_bytes - self.data_bytes
        channels = proxy.channels
        staging = Staging(self.data_bytes, staging_bytes, lambda channel, place: channels[channel].ring.tail > place)
        rank, layer = self.comm.rank, self.comm.layer
        waits = partial(  # numbers and the proxy alone, so that the heap keeps no group alive
            WaitingForHosts, rank, peers=peers, timeout_s=self.timeout_s, clock=self.clock, far=self.far, proxy=proxy
        )
        return NetworkHeap(
            memory, words, self.shape, rank, waits, proxy=proxy, far=self.far, staging=staging, layer=layer
        )
