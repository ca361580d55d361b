"""The proxy of one rank: threads that execute the commands of its rings, and receive what its peers send.

    producer            rings               threads                 links             peers' threads
    push(command)  ->   channel 0    ->     take, merge, number ->  TCP connection -> receive, restore order, apply
                        channel 1 ...                               of each channel   confirm

The division of work is that of UCCL-EP: a producer packs commands, and a CPU thread, which can use any network, runs
them. Committed commands survive the link that sent them. If a connection ends and the peer has not sent goodbye, the
rank that connected reconnects for a while (`RESUME_S`), and both continue where the receiver stopped:

    caller    drops the old link, then sends the number of groups it has applied    nothing more can arrive over it
    called    drops its old link, then answers with the number it has applied       nor over this one
    both      number on from there, and send what the other has not applied         each group is applied exactly once

A frame that is refused ends a link for good, and so does a peer that does not come back. A thread that an exception
ends within a step leaves a fault, which ends the calls of this rank; its peers lose their links to it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event, Lock, Thread

import torch

from moe_mk.comm.network.channel import Channel
from moe_mk.comm.network.command import CommandRing, TransferCommand, ring_bytes
from moe_mk.comm.network.events import OnStep, Step, Watch
from moe_mk.comm.network.exchange import Exchange, no_step
from moe_mk.comm.network.frames import LinkEnded, LinkError
from moe_mk.comm.network.link import Links
from moe_mk.comm.network.tcp import WELCOME_BYTES, Acceptor, Address, Hello, TcpPipe, call, welcome
from moe_mk.comm.network.window import OwnWindow
from moe_mk.comm.network.worker import Worker
from moe_mk.errors import ConfigError, Suppress
from moe_mk.process import FORKED, in_child

HANDSHAKE_S = 10.0
RESUME_S = 4.0
"""How long a link that has ended may take to be resumed: one side may notice the end 2 s after the other."""
RETRY_S = 0.05
MOST_FUTILE = 8
"""How often one link may end in succession without anything confirmed or applied in between."""


@dataclass(frozen=True)
class ProxySettings:
    """How much a proxy may take."""

    threads: int = 1
    channels: int = 2
    """Rings, each with a connection of its own to every peer; a peer that is slow holds up those of its channel."""
    ring_capacity: int = 1000
    """Commands of one ring."""
    most_in_flight_bytes: int = 8 << 20
    """Sent to one peer on one channel and not confirmed."""

    def __post_init__(self) -> None:
        wrong = {name: number for name, number in vars(self).items() if number < 1}
        if wrong or self.threads > self.channels:
            text = ", ".join(f"{name}={number} must be 1 or more" for name, number in wrong.items())
            text = text or f"{self.threads} threads have {self.channels} channels to serve; lower threads"
            raise ConfigError(f"proxy: {text}")


@dataclass
class Outage:
    """A link that has ended and may be resumed."""

    began_s: float
    cause: str
    attempt: str = ""
    """Why the last attempt to resume it failed."""
    has_caller: bool = False
    """Whether a thread of this rank calls the peer."""


class Proxy:
    """Executes the commands of one rank."""

    def __init__(
        self, rank: int, peers: list[int], window: OwnWindow, listening: tuple[socket.socket, Address],
        clock: Callable[[], float], settings: ProxySettings, links: Links, on_step: OnStep = no_step,
        resume_s: float = RESUME_S,
    ) -> None:  # fmt: skip
        """peers: the ranks it reaches; it calls those below its own and is called by those above.

        listening: see `tcp.listen`; links: what carries messages over its connections; the proxy closes both.
        resume_s: how long a link that has ended may be without one.
        """
        self.rank, self.window, self.settings, self.watch = rank, window, settings, Watch()
        self.left: dict[int, str] = {}
        """Peers that have ended on purpose, with the links to them that had ended before."""
        self.fault: BaseException | None = None
        """What ended a thread."""
        self._clock, self._peers, self._resume_s, self.links, self._on_step = clock, peers, resume_s, links, on_step
        self._addresses: dict[int, Address] = {}
        self._lost: dict[int, str] = {}
        # All by (peer, channel):
        self._linked: set[tuple[int, int]] = set()
        self._joined: set[tuple[int, int]] = set()
        self._outages: dict[tuple[int, int], Outage] = {}
        self._futile: dict[tuple[int, int], tuple[int, int, int]] = {}
        """How often a link has ended with the same two counts, and these: groups applied, and confirmed."""
        self._attempts: dict[tuple[int, int], int] = {}
        """Of this rank where it calls, else the last of the peer that was admitted."""
        self._changing, self._closing = Lock(), Event()
        self._door = Acceptor(*listening, clock, self._admit, self._awaited)
        self._num_awaited = sum(peer > rank for peer in peers)
        """See `_awaited`."""
        numbers, capacity = range(settings.channels), settings.ring_capacity
        memories = [torch.zeros(ring_bytes(capacity), dtype=torch.uint8, device="cpu") for _ in numbers]
        self.channels = [Channel(number, CommandRing(memories[number], capacity), peers) for number in numbers]
        most = settings.most_in_flight_bytes
        self._exchanges = [Exchange(c, window, self.watch, clock, most, on_step) for c in self.channels]
        self._workers: list[Worker] = []
        in_child(self, Proxy._leave_to_parent)

    @property
    def address(self) -> Address:
        return self._door.address

    def start(self, addresses: Mapping[int, Address]) -> None:
        """Start the threads; they take calls from here on. addresses: of all peers."""
        self._addresses = dict(addresses)
        threads = self.settings.threads
        self._workers = [
            Worker(self._exchanges[number::threads], self.links, self._note_link, self._note_fault)
            for number in range(threads)
        ]
        for number, worker in enumerate(self._workers):
            worker.start(None if number else self._door)

    def connect(self, timeout_s: float = HANDSHAKE_S) -> None:
        """Call every peer below this rank, on every channel. Raises LinkError where one does not answer in time."""
        until = self._clock() + timeout_s
        for peer in (peer for peer in self._peers if peer < self.rank):
            for channel in self.channels:
                while True:
                    try:
                        self._call(peer, channel.number, max(min(until - self._clock(), HANDSHAKE_S), RETRY_S))
                        break
                    except LinkEnded:
                        if self._closing.is_set() or self._clock() + RETRY_S > until:
                            raise
                    self._closing.wait(RETRY_S)

    @property
    def missing(self) -> list[int]:
        """Peers to which not every channel has ever had a link."""
        joined = tuple(self._joined)  # at once: threads that work on channels add to it
        have = {peer: sum(each == peer for each, _ in joined) for peer in self._peers}
        return [peer for peer, count in have.items() if count < len(self.channels)]

    @property
    def trouble(self) -> str:
        """Why this rank cannot take calls now; empty if it can."""
        return self._door.trouble

    @property
    def lost(self) -> Mapping[int, str]:
        """Peers with a link that was lost for good, with the ranks, the link and the cause; the first lost first."""
        self._give_up_late_ones()
        return self._lost

    def resuming(self, peer: int | None = None) -> str:
        """The links that have ended and may yet be resumed, of one peer or of all, each with its cause; or nothing."""
        outages = [(key, outage) for key, outage in list(self._outages.items()) if peer in (None, key[0])]
        return "; ".join(f"{self._names(key)} has ended: {outage.cause}" for key, outage in outages)

    def commit(self, channel: int, command: TransferCommand) -> bool:
        """Commit one command to a ring, and ring the bell; False if the ring is full. From one thread at a time."""
        ring = self.channels[channel].ring
        if not ring.has_room:
            return False
        key = (channel, ring.head)
        self._on_step(Step.DATA_PRODUCED, key)
        self._on_step(Step.REQUEST_WRITTEN, key)
        ring.push(command)
        self._worker_of(channel).doorbell.ring_if_awaited()
        return True

    @property
    def is_idle(self) -> bool:
        """Whether everything committed has been confirmed."""
        return all(channel.is_idle for channel in self.channels)

    def close(self, patience_s: float) -> None:
        """Wait a while until all is confirmed by the peers that are still there, then end."""
        until = self._clock() + patience_s
        while not self.fault and all(worker.is_alive for worker in self._workers) and self._clock() < until:
            gone = set(self.lost) | set(self.left)
            if not any(channel.awaits(gone) for channel in self.channels):
                break
            self.window.arrived.clear()
            self.window.arrived.wait(0.01)
        self._closing.set()
        for worker in self._workers:
            worker.leave()
        self._door.close()
        self.links.close()
        # Nothing is left that refers to this proxy: its memory goes when its owner does.
        self._workers, self._exchanges = [], []

    def _leave_to_parent(self) -> None:
        """In a forked child there are no threads; sockets close themselves."""
        self.fault, self._workers, self._exchanges = LinkError(FORKED), [], []

    def _worker_of(self, channel: int) -> Worker:
        return self._workers[channel % self.settings.threads]

    def _call(self, peer: int, channel: int, timeout_s: float) -> None:
        """Bring a peer a new link for a channel that has none; so what was applied stays as it is meanwhile."""
        key, address = (peer, channel), self._addresses[peer]
        self._attempts[key] = self._attempts.get(key, 0) + 1
        applied = self.channels[channel].streams[peer].inbox.applied
        hello = Hello(address.token, self.rank, channel, self._attempts[key], applied)
        pipe, theirs = call(address, hello, self.address.token, timeout_s, self._clock)
        with self._changing:
            if self._closing.is_set() or not self._workers:
                pipe.close()
            else:
                self._worker_of(channel).adopt(channel, peer, hello.attempt, pipe, lambda: theirs)

    def _admit(self, hello: Hello, pipe: TcpPipe) -> None:
        """A peer has connected. Its old link is closed before it is sent the number of applied groups."""
        key = hello.rank, hello.channel
        if hello.rank not in self._peers or hello.rank < self.rank or hello.channel >= len(self.channels):
            raise LinkError(f"rank {hello.rank} has no channel {hello.channel} to call here")
        if hello.rank in self._lost or hello.attempt <= self._attempts.get(key, 0):
            raise LinkError(f"rank {hello.rank} was given up, or this call was")
        self._attempts[key] = hello.attempt

        def answered() -> int:
            token = self._addresses[hello.rank].token
            stream = self.channels[hello.channel].streams[hello.rank]
            if pipe.send([memoryview(welcome(token, stream.inbox.applied))]) < WELCOME_BYTES:
                raise LinkEnded("the peer takes no answer")
            return hello.applied

        self._worker_of(hello.channel).adopt(hello.channel, hello.rank, hello.attempt, pipe, answered)

    def _note_link(self, peer: int, channel: int, problem: LinkError | None) -> None:
        """A link has begun, or a problem has ended one. By the thread that works on the channel."""
        key = peer, channel
        with self._changing:
            self._linked.discard(key)
            if problem is None:
                self._linked.add(key)
                self._joined.add(key)
                self._outages.pop(key, None)
            elif any(each.streams[peer].has_left for each in self.channels):
                self.left.setdefault(peer, self.resuming(peer))
                for other in [other for other in self._outages if other[0] == peer]:
                    del self._outages[other]
            elif not isinstance(problem, LinkEnded) or (key in self._joined and self._is_futile(key)):
                self._lost.setdefault(peer, f"{self._names(key)} was lost: {problem}")
            elif key in self._joined and not self._closing.is_set():  # before, the peer calls until it has an answer
                # One that ends again before it is adopted has no more time for that.
                outage = self._outages.setdefault(key, Outage(self._clock(), str(problem)))
                self._call_again(key, outage)
            self._count_awaited()
        if self._workers:
            self._workers[0].doorbell.ring()  # whose door may have to open or close
        self.window.arrived.set()

    def _call_again(self, key: tuple[int, int], outage: Outage) -> None:
        """Resume a link to a peer below this rank, on a thread; while the system has none, at a later look."""
        outage.has_caller |= key[0] >= self.rank
        if not outage.has_caller:
            with Suppress(RuntimeError, MemoryError):
                Thread(target=self._resume, args=key, name="moe-mk proxy link", daemon=True).start()
                outage.has_caller = True

    def _resume(self, peer: int, channel: int) -> None:
        while not self._closing.is_set() and (outage := self._outages.get((peer, channel))) is not None:
            left_s = outage.began_s + self._resume_s - self._clock()
            if left_s <= 0:
                return
            try:
                self._call(peer, channel, left_s)
                return
            except Exception as problem:  # of the peer, or memory and descriptors that this process lacks for a moment
                outage.attempt = str(problem) or type(problem).__name__
            self._closing.wait(RETRY_S)

    def _give_up_late_ones(self) -> None:
        for key, outage in list(self._outages.items()):
            if self._clock() - outage.began_s > self._resume_s:
                why = outage.attempt or f"rank {key[0]} has not called again"
                text = f"({outage.cause}) and not resumed within {self._resume_s:g} s ({why})"
                with self._changing:
                    if self._outages.pop(key, None) is not None:
                        text = f"{self._names(key)} was lost {text}: its process has ended or cannot be reached"
                        self._lost.setdefault(key[0], text)
                        self._count_awaited()
            elif not outage.has_caller:
                with self._changing:
                    self._call_again(key, outage)

    def _is_futile(self, key: tuple[int, int]) -> bool:
        stream = self.channels[key[1]].streams[key[0]]
        times, applied, confirmed = self._futile.get(key, (0, -1, -1))
        is_same = (applied, confirmed) == (stream.inbox.applied, stream.confirmed)
        times = times + 1 if is_same else 0
        self._futile[key] = times, stream.inbox.applied, stream.confirmed
        return times >= MOST_FUTILE

    def _awaited(self) -> int:
        """How many peers are to call: those above this rank to which a channel has no link."""
        self._give_up_late_ones()
        return self._num_awaited

    def _count_awaited(self) -> None:
        numbers = range(len(self.channels))
        gone = set(self.left) | set(self._lost)
        above = [peer for peer in self._peers if peer > self.rank and peer not in gone]
        self._num_awaited = sum(any((peer, n) not in self._linked for n in numbers) for peer in above)

    def _names(self, key: tuple[int, int]) -> str:
        address = self._addresses[key[0]]
        return f"link {key[1]} between ranks {self.rank} and {key[0]} ({address.host}:{address.port})"

    def _note_fault(self, problem: BaseException) -> None:
        self.fault = problem
        self.window.arrived.set()
