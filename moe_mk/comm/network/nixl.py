"""The link `nixl`: payload is written into the memory of peers by NIXL, headers go over the connection of the proxies.

    sender     posts the header, and starts a WRITE of the payload with a notification: channel, attempt, number
    receiver   checks the header, and yields the message when the notification of its number has arrived

NIXL delivers a notification after the bytes that precede it are in place, so a flag is never seen before its rows. The
header wakes the receiver, which then polls: NIXL has no descriptor to wait for, and UCX moves data over TCP only while
both processes call it. Messages keep the order of their headers. The connection of the proxies stays what detects the
end of a process, proves the identity of a peer, and is resumed.

One agent per heap registers the memory of this rank once and serves all channels. Its metadata is bytes of NIXL's own
format, which peers receive over the group of the ranks; nothing is pickled.

A link that has ended leaves writes that may still be under way. `link` opens no other one to the same peer until they
are done, since a late write could overwrite rows of a later call.

Source: the Python API of nixl-cu12 1.5.1 (PyPI), and the UCX plugin of github.com/ai-dynamo/nixl at 8770b655a (August
2026): a write is complete when its endpoint was flushed, and its notification is sent after that.
"""

from __future__ import annotations

import logging
import secrets
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from moe_mk.comm.network.frames import Frame, FrameError, Kind, LinkEnded, LinkError
from moe_mk.comm.network.link import LINKS, NOTHING, Link, LinkKey, Links, LinksContext, OnSent, Pipe, PipeLink, Place
from moe_mk.comm.network.tcp import own_addresses
from moe_mk.process import in_child

PLUGIN = "UCX"
MEMORY = "DRAM"
RDMA_DEVICES = Path("/sys/class/infiniband")
"""Of Linux: a name for each InfiniBand, RoCE or EFA device."""
NAME_BYTES = 16
_HEAD = struct.Struct(f"<QQ{2 * NAME_BYTES}s")
"""Before the metadata of NIXL: where the registered memory begins and how long it is, and the name of the agent."""
_NOTE = struct.Struct("<IIQ")
"""A notification: channel, attempt, number of the write; number 0 greets, before there is a channel."""
GREETING = _NOTE.pack(0, 0, 0)
MOST_METADATA_BYTES = 1 << 20
MOST_HELD = 1 << 13
"""Messages whose payload has not arrived, and notifications of one link whose header has not."""
BYE_S = 0.5
"""How long a goodbye of the peer may take to arrive after NIXL has reported its end."""
DRAIN_S, DRAIN_POLL_S = 0.25, 1e-4
"""How long writes of a link that has ended may hold up the thread that opens the next one."""
ALERT_S = 1.0
"""How long this rank polls after a link has ended: the writes of the peer need it."""

_ONE_AT_A_TIME = Lock()
"""Held while the level of NIXL's logger is changed."""
_OF_PARENT: list[object] = []
"""In a forked child: agents that are the parent's to end, kept so that their destructors never run here."""


def ucx_options(address: str, devices: Mapping[str, str], *, has_rdma: bool) -> str:
    """Options of UCX for the network of an address; variables UCX_TLS and UCX_NET_DEVICES of a user come before them.

    devices: the address of each network device. Shared memory of the host is left out, since ranks of one host do not
    use links. Without an RDMA device, UCX listens on the device of the address and on no other.
    """
    if has_rdma:
        return "TLS=^tcp"
    device = next((name for name, own in devices.items() if own == address), "")
    return "TLS=tcp" + (f",NET_DEVICES={device}" if device else "")


def has_rdma_device(folder: Path = RDMA_DEVICES) -> bool:
    """Whether this host has an InfiniBand, RoCE or EFA device."""
    return folder.is_dir() and any(folder.iterdir())


@contextmanager
def _quiet() -> Iterator[None]:
    """NIXL prints lines on standard output when an agent is made; they would be among the output of a command."""
    logger = logging.getLogger("nixl")
    with _ONE_AT_A_TIME:
        level = logger.level
        logger.setLevel(max(level, logging.WARNING))
        try:
            yield
        finally:
            logger.setLevel(level)


@contextmanager
def _calling(what: str) -> Iterator[None]:
    try:
        yield
    except LinkError:
        raise
    except Exception as problem:
        kind = type(problem).__name__
        ended = ": its process has ended or cannot be reached" if "RemoteDisconnect" in kind else ""
        raise LinkError(f"NIXL cannot {what}: {kind}: {problem}{ended}") from problem


@dataclass(eq=False)
class _Write:
    """A payload on its way."""

    frame: Frame
    payload: memoryview
    note: bytes
    handle: Any = None
    state: str = ""


@dataclass
class _Arrivals:
    """Notifications of one connection."""

    numbers: set[int] = field(default_factory=set)
    problem: str = ""


@LINKS.register("nixl")
class NixlLinks(Links):
    """Payload by NIXL over UCX: InfiniBand, RoCE, EFA, else TCP."""

    summary = "headers over TCP connections of the proxies, payload by NIXL writes over UCX"
    library = "nixl"
    writes_memory = True

    def __init__(self, context: LinksContext) -> None:
        """Make the agent and register the memory. Raises LinkError with NIXL's reason."""
        super().__init__(context)
        assert context.library is not None
        self._lock = Lock()
        self._peers: dict[int, tuple[str, int]] = {}
        """The names of their agents, and the addresses of their registered memory in their processes."""
        self._rank_of: dict[str, int] = {}
        self._unheard: set[int] = set()
        self._arrivals: dict[LinkKey, _Arrivals] = {}
        self._latest: dict[tuple[int, int], int] = {}
        self._left_over: dict[int, list[_Write]] = {}
        self._alert_until_s = 0.0
        self.problem = ""
        """Why nothing can be received any more; empty if it can."""
        self.name = secrets.token_hex(NAME_BYTES)
        self._base, self._num_bytes = context.registered.data_ptr(), context.registered.numel()
        options = ucx_options(context.address, own_addresses(), has_rdma=has_rdma_device())
        with _calling(f"open its {PLUGIN} plugin with {options} and register memory"):
            with _quiet():
                settings = context.library.nixl_agent_config(
                    enable_prog_thread=False,  # it would poll without a pause
                    backends=[],
                    sync_mode=context.library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
                )
                self._agent: Any = context.library.nixl_agent(self.name, settings)
                self._agent.create_backend(PLUGIN, {"engine_config": options})
            self._memory = self._agent.register_memory([(self._base, self._num_bytes, 0, "")], MEMORY, [PLUGIN])
        in_child(self, NixlLinks._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: the destructor of the agent would speak to peers over connections of the parent."""
        _OF_PARENT.append(self._agent)
        self._agent = None

    @property
    def metadata(self) -> bytes:
        """Where the memory is, the name of the agent, and what NIXL needs to reach it."""
        with _calling("describe this agent"):
            own: bytes = self._agent.get_partial_agent_metadata(self._memory, True, [PLUGIN])
        return _HEAD.pack(self._base, self._num_bytes, self.name.encode()) + own

    def connect(self, metadata: Mapping[int, bytes]) -> None:
        """Load the agents of peers and greet each; see `Links.connect`."""
        for rank, theirs in metadata.items():
            self._load(rank, theirs)
        self._unheard = set(self._peers)
        for rank, (name, _) in self._peers.items():
            with _calling(f"reach rank {rank}"):
                self._agent.send_notif(name, GREETING)

    def _load(self, rank: int, metadata: bytes) -> None:
        if not _HEAD.size < len(metadata) <= MOST_METADATA_BYTES:
            text = f"rank {rank} sent {len(metadata)} bytes of NIXL metadata; {_HEAD.size + 1} to {MOST_METADATA_BYTES}"
            raise LinkError(f"{text} are accepted")
        base, num_bytes, word = _HEAD.unpack_from(metadata)
        name = word.decode("ascii", "replace")
        if num_bytes != self._num_bytes or name in self._rank_of or name == self.name:
            text = f"rank {rank} registers {num_bytes} bytes, this rank {self._num_bytes}"
            raise LinkError(text if num_bytes != self._num_bytes else f"rank {rank} has the agent name of another rank")
        with _calling(f"load the agent of rank {rank}"):
            loaded = self._agent.add_remote_agent(metadata[_HEAD.size :])
        loaded = loaded.decode("ascii", "replace") if isinstance(loaded, bytes) else loaded
        if loaded != name:
            raise LinkError(f"the NIXL metadata of rank {rank} describes agent {loaded!r}, not {name!r}")
        self._peers[rank], self._rank_of[name] = (name, base), rank

    @property
    def unreached(self) -> list[int]:
        """Peers that have not been heard."""
        return sorted(self._unheard)

    @property
    def is_busy(self) -> bool:
        """While peers are unheard, or writes of ended links may be under way on either side."""
        return bool(self._unheard or self._left_over) or self.context.clock() < self._alert_until_s

    def progress(self) -> None:
        """Let UCX work, and sort notifications by connection."""
        with self._lock:
            if self._agent is None:
                return
            try:
                with _calling("receive"):
                    arrived = self._agent.get_new_notifs([PLUGIN])
            except LinkError as problem:
                self.problem = str(problem)
                return
            for name, notes in arrived.items():
                rank = self._rank_of.get(name)
                if rank is not None:
                    for note in notes:
                        self._take(rank, note)
            for rank in list(self._left_over):
                self._left_over[rank] = [write for write in self._left_over[rank] if not self._is_over(write)]
                if not self._left_over[rank]:
                    del self._left_over[rank]

    def _take(self, rank: int, note: bytes) -> None:
        if len(note) != _NOTE.size:
            self._refuse(rank, f"a notification of {len(note)} bytes, not {_NOTE.size}")
            return
        channel, attempt, number = _NOTE.unpack(note)
        if not number:
            self._unheard.discard(rank)
        elif attempt >= self._latest.get((rank, channel), 0):
            arrivals = self._arrivals.setdefault((rank, channel, attempt), _Arrivals())
            arrivals.numbers.add(number)
            if len(arrivals.numbers) > MOST_HELD or len(self._arrivals) > MOST_HELD:
                self._refuse(rank, f"more than {MOST_HELD} notifications without a header")

    def _refuse(self, rank: int, text: str) -> None:
        for key, arrivals in self._arrivals.items():
            if key[0] == rank:
                arrivals.problem = arrivals.problem or text
                arrivals.numbers.clear()

    def link(self, pipe: Pipe, key: LinkKey, on_sent: OnSent | None = None) -> Link:
        until = self.context.clock() + DRAIN_S
        while key[0] in self._left_over:
            if self.context.clock() > until:
                raise LinkEnded("writes of the link that has ended are still under way")
            self.progress()
            time.sleep(DRAIN_POLL_S)
        with self._lock:
            for old in [old for old in self._arrivals if old[:2] == key[:2] and old[2] < key[2]]:
                del self._arrivals[old]
            self._latest[key[:2]] = key[2]
            arrivals = self._arrivals.setdefault(key, _Arrivals())
        noted = on_sent or (lambda frame, what: None)
        control = PipeLink(pipe, lambda frame, what: None if frame.size else noted(frame, what))  # payload goes its way
        return NixlLink(self, key, control, arrivals, noted)

    def start(self, rank: int, write: _Write) -> None:
        """Begin a write. Raises LinkError."""
        (name, base), size = self._peers[rank], write.payload.nbytes
        source = np.frombuffer(write.payload, dtype=np.uint8).__array_interface__["data"][0]
        agent = self._agent
        with _calling(f"write {size} bytes to rank {rank}"), self._lock:
            ours = agent.get_xfer_descs([(source, size, 0)], MEMORY)
            theirs = agent.get_xfer_descs([(base + write.frame.at, size, 0)], MEMORY)
            write.handle = agent.initialize_xfer("WRITE", ours, theirs, name, write.note, [PLUGIN])
            write.state = agent.transfer(write.handle)

    def is_done(self, rank: int, write: _Write) -> bool:
        """Whether a write is complete. Raises LinkError for one that has failed."""
        size = write.payload.nbytes
        with _calling(f"write {size} bytes to rank {rank}"), self._lock:
            if write.state == "PROC":
                write.state = self._agent.check_xfer_state(write.handle)
            if write.state not in ("PROC", "DONE"):
                raise LinkError(f"NIXL reports {write.state} for {size} bytes to rank {rank}")
            if write.state == "DONE":
                write.handle.release()
        return write.state == "DONE"

    def _is_over(self, write: _Write) -> bool:
        try:
            return bool(self._agent.check_xfer_state(write.handle) != "PROC")
        except Exception:  # its endpoint has failed, and with it the write
            return True

    def abandon(self, key: LinkKey, writes: list[_Write]) -> None:
        """A link has ended with these writes under way."""
        with self._lock:
            if self._agent is None:
                return
            under_way = [write for write in writes if write.state == "PROC" and not self._is_over(write)]
            if under_way:
                self._left_over.setdefault(key[0], []).extend(under_way)
            self._alert_until_s = self.context.clock() + ALERT_S

    def close(self) -> None:
        """End the agent: no peer can write the memory of this rank any more."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            try:
                for name, _ in self._peers.values():
                    agent.remove_remote_agent(name)
                agent.deregister_memory(self._memory, [PLUGIN])
            except Exception:  # a peer that has gone; the destructor of the agent frees the rest
                self._peers.clear()
            self._left_over.clear()


class NixlLink(Link):
    """Messages to one peer on one channel, over one connection."""

    def __init__(self, links: NixlLinks, key: LinkKey, control: PipeLink, arrivals: _Arrivals, on_sent: OnSent) -> None:
        self._links, self._key, self._control, self._arrivals, self._on_sent = links, key, control, arrivals, on_sent
        self._waiting: deque[_Write] = deque()
        self._under_way: list[_Write] = []
        self._held: deque[tuple[Frame, int]] = deque()
        """Messages in their order, each with the number of the write that it waits for, 0 for none."""
        self._posted = self._announced = 0
        self._problem, self._failed_at_s = "", 0.0
        """As text: an exception refers to its frames, and they to this link, which would keep the agent."""

    def post(self, frame: Frame, payload: memoryview = NOTHING) -> None:
        """Queue a message: its header, and a write where it has payload."""
        if payload.nbytes:
            self._posted += 1
            _, channel, attempt = self._key
            self._waiting.append(_Write(frame, payload, _NOTE.pack(channel, attempt, self._posted)))
        self._control.post(frame)

    @property
    def wants_to_send(self) -> bool:
        return self._control.wants_to_send

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._under_way or self._held or self._problem)

    @property
    def has_unsent(self) -> bool:
        return bool(self._waiting or self._under_way) or self._control.wants_to_send

    def fileno(self) -> int:
        return self._control.fileno()

    def close(self) -> None:
        self._control.close()
        self._links.abandon(self._key, self._under_way)
        self._under_way = []

    def progress(self, place: Place) -> Iterator[Frame]:
        self._write()
        ended = self._read(place)
        self._links.progress()
        if problem := self._arrivals.problem:
            raise FrameError(problem)
        while self._held:
            frame, number = self._held[0]
            if number and number not in self._arrivals.numbers:
                break
            self._arrivals.numbers.discard(number)
            self._held.popleft()
            if frame.kind is Kind.ACK:
                self._write()  # what it confirms is done: noted before
            yield frame
        self._raise(ended)

    def _write(self) -> None:
        """Start writes and take off those that are done; keeps what NIXL reports against it."""
        try:
            while self._waiting and not self._problem:
                write = self._waiting.popleft()
                self._links.start(self._key[0], write)
                self._under_way.append(write)
                self._on_sent(write.frame, "work_read")
                self._on_sent(write.frame, "data_read")
            for write in list(self._under_way):
                if self._links.is_done(self._key[0], write):
                    self._under_way.remove(write)
                    self._on_sent(write.frame, "data_sent")
        except LinkError as problem:
            self._fail(str(problem))

    def _read(self, place: Place) -> str:
        """Take headers off the connection; returns why it has ended. Raises FrameError for one that is refused."""

        def checked(frame: Frame) -> memoryview:
            place(frame)  # whose answer is where the peer has written, or writes
            return NOTHING

        try:
            for frame in self._control.progress(checked):
                self._announced += bool(frame.size)
                self._held.append((frame, self._announced if frame.size else 0))
        except LinkEnded as ended:
            return str(ended)
        if len(self._held) > MOST_HELD:
            raise FrameError(f"{len(self._held)} messages without their payload")
        return ""

    def _fail(self, problem: str) -> None:
        if problem and not self._problem:
            self._problem, self._failed_at_s = problem, self._links.context.clock()

    def _raise(self, ended: str) -> None:
        """End the link where it has to; a goodbye that is on its way is awaited for a moment."""
        self._fail(self._links.problem)
        says_goodbye = any(frame.kind is Kind.BYE for frame, _ in self._held)
        if ended and not says_goodbye:
            raise LinkError(self._problem) if self._problem else LinkEnded(ended)
        self._fail(ended)
        if self._problem and self._links.context.clock() - self._failed_at_s > BYE_S:
            raise LinkError(self._problem)
