"""The proxy of one rank: threads that carry out the commands of its rings, and take in what those of its peers send.

    producer            rings               threads                 links             peers' threads
    push(command)  ->   channel 0    ->     take, merge, number ->  TCP connection -> land, restore order, apply
                        channel 1 ...                               of each channel   confirm

The split of duties is that of UCCL-EP: a producer packs commands, and a processor, which can drive any network,
executes them. What is committed survives the threads: `restart` goes on where the stopped ones were.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from moe_mk.comm.proxy.channel import Channel
from moe_mk.comm.proxy.command import TransferCommand
from moe_mk.comm.proxy.door import Door
from moe_mk.comm.proxy.events import OnStep, Step
from moe_mk.comm.proxy.exchange import Exchange, no_step
from moe_mk.comm.proxy.frames import LinkError
from moe_mk.comm.proxy.ring import CommandRing, ring_bytes
from moe_mk.comm.proxy.tcp import Address, Hello, TcpPipe, call, welcome
from moe_mk.comm.proxy.watch import Watch
from moe_mk.comm.proxy.window import OwnWindow
from moe_mk.comm.proxy.worker import Worker
from moe_mk.errors import ConfigError

HANDSHAKE_S = 10.0


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


class Proxy:
    """What carries out the commands of one rank."""

    def __init__(
        self, rank: int, peers: list[int], window: OwnWindow, listening: tuple[socket.socket, Address],
        clock: Callable[[], float], settings: ProxySettings, on_step: OnStep = no_step,
    ) -> None:  # fmt: skip
        """peers: the ranks it reaches. listening: see `tcp.listen`; the proxy closes it."""
        self.rank, self.window, self.settings, self.watch = rank, window, settings, Watch()
        self.lost: dict[int, str] = {}
        """Peers without a link, with what ended it, the first to be lost first."""
        self.left: set[int] = set()
        """Peers that have ended on purpose."""
        self.fault: BaseException | None = None
        """What ended a thread."""
        self._addresses: dict[int, Address] = {}
        self._joined: set[tuple[int, int]] = set()
        self.on_step: Callable[[Step, tuple[int, int]], None] = on_step
        self._clock, self._peers = clock, peers
        self._door = Door(*listening, clock, self._admit)
        self.channels = [Channel(number, self._ring(), peers) for number in range(settings.channels)]
        most = settings.most_in_flight_bytes
        self._exchanges = [Exchange(c, window, self.watch, clock, most, self._noted) for c in self.channels]
        self._workers: list[Worker] = []

    @property
    def address(self) -> Address:
        """Where peers call."""
        return self._door.address

    def start(self, addresses: Mapping[int, Address]) -> None:
        """Start the threads; they take calls from here on. addresses: of all peers."""
        self._addresses, count = dict(addresses), self.settings.threads
        self._workers = [Worker(self._exchanges[n::count], self._note_lost, self._note_fault) for n in range(count)]
        self._workers[0].listen(self._door)
        for worker in self._workers:
            worker.start()

    def connect(self, peers: list[int]) -> None:
        """Call some peers, on every channel. Raises LinkError where one does not answer."""
        for peer in peers:
            for channel in self.channels:
                hello = Hello(
                    self._addresses[peer].token, self.rank, channel.number, channel.streams[peer].inbox.applied
                )
                pipe, applied = call(self._addresses[peer], hello, self.address.token, HANDSHAKE_S)
                self._worker_of(channel.number).adopt(channel.number, peer, pipe, partial(int, applied))

    @property
    def missing(self) -> list[int]:
        """Peers to which not every channel has ever had a link."""
        have = {peer: sum(each == peer for each, _ in self._joined) for peer in self._peers}
        return [peer for peer, count in have.items() if count < len(self.channels)]

    def commit(self, channel: int, command: TransferCommand) -> bool:
        """Commit one command to a ring, and ring the bell; False if the ring is full. From one thread at a time."""
        ring = self.channels[channel].ring
        if not ring.has_room:
            return False
        key = (channel, ring.head)
        self.on_step(Step.DATA_PRODUCED, key)
        self.on_step(Step.REQUEST_WRITTEN, key)
        ring.push(command)
        self._worker_of(channel).doorbell.ring_if_awaited()
        return True

    @property
    def is_idle(self) -> bool:
        """Whether everything committed has been confirmed."""
        return all(channel.is_idle for channel in self.channels)

    def dead_peer(self, patience_s: float) -> int | None:
        """The first peer that was lost and has ended itself: nobody listens where it did."""
        for peer in list(self.lost):
            if self._addresses[peer].is_reachable(patience_s) is False:
                return peer
        return None

    def stop(self) -> None:
        """End the threads where they stand."""
        for worker in self._workers:
            worker.stop()

    def restart(self) -> None:
        """Start threads anew after a stop or a fault, and call every peer; nothing committed is lost or done twice.

        Raises LinkError where a peer does not answer. Of two ranks one restarts at a time.
        """
        self.stop()
        self.fault = None
        self.start(self._addresses)
        self.connect(self._peers)

    def close(self, patience_s: float) -> None:
        """Wait a while until all is confirmed by the peers that are still there, then end."""
        until = self._clock() + patience_s
        while self._can_work() and self._clock() < until:
            gone = set(self.lost) | self.left
            if not any(channel.awaits(gone) for channel in self.channels):
                break
            self.window.arrived.clear()
            self.window.arrived.wait(0.01)
        for worker in self._workers:
            worker.leave()
        self._door.close()
        # Nothing is left that refers to this proxy: its memory goes when its owner does.
        self._workers, self._exchanges = [], []

    def _can_work(self) -> bool:
        return not self.fault and all(worker.is_alive for worker in self._workers)

    def _ring(self) -> CommandRing:
        capacity = self.settings.ring_capacity
        return CommandRing(torch.zeros(ring_bytes(capacity), dtype=torch.uint8, device="cpu"), capacity)

    def _worker_of(self, channel: int) -> Worker:
        return self._workers[channel % self.settings.threads]

    def _admit(self, hello: Hello, pipe: TcpPipe) -> None:
        """A member has called. Its old link is closed before it is told what was applied."""
        if hello.rank not in self._peers or hello.channel >= len(self.channels):
            raise LinkError(f"rank {hello.rank} has no channel {hello.channel} here")

        def answered() -> int:
            token = self._addresses[hello.rank].token
            stream = self.channels[hello.channel].streams[hello.rank]
            pipe.send([memoryview(welcome(token, stream.inbox.applied))])
            return hello.applied

        self._worker_of(hello.channel).adopt(hello.channel, hello.rank, pipe, answered)

    def _noted(self, step: Step, key: tuple[int, int]) -> None:
        self.on_step(step, key)

    def _note_lost(self, peer: int, channel: int, reason: str) -> None:
        if not reason:
            self.lost.pop(peer, None)
            self._joined.add((peer, channel))
        elif any(each.streams[peer].has_left for each in self.channels):
            self.left.add(peer)
        else:
            self.lost.setdefault(peer, reason)
        self.window.arrived.set()

    def _note_fault(self, problem: BaseException) -> None:
        self.fault = problem
        self.window.arrived.set()
