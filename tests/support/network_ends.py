"""Two ends of a link by hand: exchanges over real or shuffled links, moved by the test itself."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from types import ModuleType

import pytest
import torch

from moe_mk.comm.network.channel import Channel
from moe_mk.comm.network.command import CommandRing, Op, TransferCommand, ring_bytes
from moe_mk.comm.network.events import OnStep, Watch
from moe_mk.comm.network.exchange import Exchange, no_step
from moe_mk.comm.network.frames import LinkError
from moe_mk.comm.network.link import LINKS, Link, Links, LinksContext, Pipe, PipeLink
from moe_mk.comm.network.tcp import TcpPipe
from moe_mk.comm.network.window import OwnWindow
from moe_mk.comm.symmetric.flags import words_of
from moe_mk.external.library import find, installed
from moe_mk.trace.clock import now
from tests.support import nixl_standin
from tests.support.network_shuffled import ShuffledLink

NEEDS_NIXL = pytest.mark.skipif("nixl" not in installed(), reason="nixl is not installed: make nixl has it")
FLAGS, COUNTERS, RANKS, FLAG_BYTES = 8, 2, 4, 64


def own_window(data_bytes: int, registered_bytes: int | None = None) -> OwnWindow:
    """Flags, then one word for each counter and rank, and data of their own."""
    flags = torch.zeros((FLAGS + COUNTERS * RANKS) * FLAG_BYTES, dtype=torch.uint8)
    data, words = torch.zeros(registered_bytes or data_bytes, dtype=torch.uint8), words_of(flags)
    return OwnWindow(
        data.numpy().data, data_bytes, FLAGS, words, lambda flag: flag * FLAG_BYTES, RANKS, COUNTERS, Event(),
        counter_flags=range(FLAGS, FLAGS + COUNTERS * RANKS),
    )  # fmt: skip


CHOSEN = {"link": "tcp"}
"""The network link of tests that name none; the fixture `link` sets it."""


def links_of(window: OwnWindow, name: str = "") -> Links:
    """What carries messages over loopback; its library must be installed."""
    kind, registered = LINKS[name or CHOSEN["link"]], torch.frombuffer(window.registered, dtype=torch.uint8)
    return kind(LinksContext(registered, "127.0.0.1", now, library_of(kind)))


def library_of(kind: type[Links]) -> ModuleType | None:
    """The library; where nixl is not installed, what stands in for it between agents of one process."""
    if not kind.library:
        return None
    return find(kind.library) if kind.library in installed() else nixl_standin


@dataclass
class End:
    rank: int
    exchange: Exchange
    window: OwnWindow
    seen: list[object] = field(default_factory=list)

    @property
    def link(self) -> Link:
        """That to the first peer."""
        return next(iter(self.exchange.channel.streams.values())).link  # type: ignore[return-value]

    def flag(self, flag: int) -> int:
        return self.window.words.load(flag * FLAG_BYTES)

    def commit(self, *commands: TransferCommand) -> None:
        for command in commands:
            assert self.exchange.channel.ring.push(command)

    def turn(self) -> None:
        self.exchange.send()
        for peer in self.exchange.channel.streams:
            self.exchange.arrive(peer)

    @property
    def is_done(self) -> bool:
        return self.exchange.channel.is_idle


def an_end(
    rank: int, peers: list[int], *, data_bytes: int = 1 << 16, capacity: int = 999, most_bytes: int = 1 << 20,
    on_step: OnStep = no_step, clock: Callable[[], float] = now,
) -> End:  # fmt: skip
    window = own_window(data_bytes)
    ring = CommandRing(torch.zeros(ring_bytes(capacity), dtype=torch.uint8), capacity)
    return End(rank, Exchange(Channel(0, ring, peers), window, Watch(), clock, most_bytes, on_step), window)


class SharedPipe(Pipe):
    """Two rings of bytes in memory that both sides map; head and tail count bytes since the beginning.

    [ head | tail | bytes ] from side 0 to side 1, then the same from side 1 to side 0
    """

    HEAD_AT, TAIL_AT, ENDED_AT, BYTES_AT = 0, 128, 256, 384

    def __init__(self, memory: torch.Tensor, side: int) -> None:
        """memory: uint8 zeros, of an even size."""
        half = memory.numel() // 2
        self._room = half - self.BYTES_AT
        assert self._room > 0 and half % 8 == 0
        ours, theirs = (memory[which * half : (which + 1) * half] for which in (side, 1 - side))
        self._out, self._in = ours.numpy().data[self.BYTES_AT :], theirs.numpy().data[self.BYTES_AT :]
        self._out_words, self._in_words = words_of(ours), words_of(theirs)

    def send(self, parts: list[memoryview]) -> int:
        head, sent = self._out_words.load(self.HEAD_AT), 0
        if self._in_words.load(self.ENDED_AT):
            raise LinkError("the other side has closed")
        for part in parts:
            room = self._room - (head - self._out_words.load(self.TAIL_AT))
            piece = part[:room]
            self._copy_in(head, piece)
            head, sent = head + piece.nbytes, sent + piece.nbytes
            if piece.nbytes < part.nbytes:
                break
        self._out_words.store(self.HEAD_AT, head)
        return sent

    def receive(self, into: memoryview) -> int:
        tail, there = self._in_words.load(self.TAIL_AT), self._in_words.load(self.HEAD_AT)
        count, first = min(there - tail, into.nbytes), tail % self._room
        if not count and self._in_words.load(self.ENDED_AT):
            raise LinkError("the other side has closed")
        before_end = min(count, self._room - first)
        into[:before_end] = self._in[first : first + before_end]
        into[before_end:count] = self._in[: count - before_end]
        self._in_words.store(self.TAIL_AT, tail + count)
        return count

    def close(self) -> None:
        self._out_words.store(self.ENDED_AT, 1)

    def _copy_in(self, head: int, piece: memoryview) -> None:
        first = head % self._room
        before_end = min(piece.nbytes, self._room - first)
        self._out[first : first + before_end] = piece[:before_end]
        self._out[: piece.nbytes - before_end] = piece[before_end:]


def tcp_pipes() -> tuple[TcpPipe, TcpPipe]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return TcpPipe(one), TcpPipe(other)


def links(kind: str, seed: int = 0) -> tuple[Link, Link]:
    if kind == "shuffled":
        return ShuffledLink.pair(seed)
    if kind == "shuffled twice":
        return ShuffledLink.pair(seed, twice=0.3)
    if kind == "shared memory":
        memory = torch.zeros(2 * 1384, dtype=torch.uint8)  # room for 1000 bytes: less than messages, no power of two
        return PipeLink(SharedPipe(memory, 0)), PipeLink(SharedPipe(memory, 1))
    one, other = tcp_pipes()
    return PipeLink(one), PipeLink(other)


KINDS = ("tcp", "shared memory", "shuffled", "shuffled twice", "nixl")


def joined(kind: str = "tcp", seed: int = 0, **settings: object) -> tuple[End, End]:
    ends = an_end(0, [1], **settings), an_end(1, [0], **settings)  # type: ignore[arg-type]
    made = nixl_links(*(end.window for end in ends)) if kind == "nixl" else links(kind, seed)
    for end, peer, link in zip(ends, (1, 0), made, strict=True):
        end.exchange.channel.begin_anew(peer, link, 0)
    return ends


def nixl_links(zero: OwnWindow, one: OwnWindow) -> tuple[Link, Link]:
    """Both ends of a link that writes into these windows."""
    ours, theirs = links_of(zero, "nixl"), links_of(one, "nixl")
    ours.connect({1: theirs.metadata})
    theirs.connect({0: ours.metadata})
    while ours.unreached or theirs.unreached:
        ours.progress()
        theirs.progress()
    pipe, other = tcp_pipes()
    return ours.link(pipe, (1, 0, 1)), theirs.link(other, (0, 0, 1))


def run(*ends: End, turns: int = 20_000) -> None:
    """Move everything until all that was committed is confirmed."""
    for turn in range(turns):
        for end in ends:
            end.turn()
            if turn % 7 == 6:
                end.exchange.close_groups()
        if all(end.is_done for end in ends):
            return
    raise AssertionError(f"not done after {turns} turns")


def put(peer: int, source: int, at: int, size: int) -> TransferCommand:
    return TransferCommand(Op.PUT, peer, size, source, at)


def store(peer: int, flag: int, word: int) -> TransferCommand:
    return TransferCommand(Op.STORE, peer, flag=flag, value=word)


def add(peer: int, counter: int, number: int) -> TransferCommand:
    return TransferCommand(Op.ADD, peer, flag=counter, value=number)
