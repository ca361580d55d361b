"""Links: messages to one peer and from it, over whatever moves bytes.

    Pipe      a stream of bytes that never blocks: a TCP socket (`tcp.py`)
    Link      posts messages and hands over those that have come
    Links     what carries the messages of a proxy once it is connected to its peers, by name:
                  tcp     headers and payload over the connection of the proxies
                  nixl    headers over that connection, payload by writes of the NIXL library (`nixl.py`)

A rank opens one `Links` for each heap; its `link` is called for every connection to a peer. A link keeps the order of
messages, and yields one only when its payload is in place. It knows nothing of groups, flags or windows: where a
payload goes is asked of the receiver before its bytes are read, so that they arrive in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from torch import Tensor

from moe_mk.comm.network.frames import HEADER_BYTES, Frame, LinkEnded, LinkError
from moe_mk.registry import Registry

Place = Callable[[Frame], memoryview]
"""Called with each message before its payload is read: returns the destination, with the size of the payload.

Raises LinkError where a message is refused.
"""
OnSent = Callable[[Frame, str], None]
"""Called with the progress of a posted message: "work_read", "data_read", "data_sent"."""
NOTHING = memoryview(b"")


class Pipe(ABC):
    """A bidirectional stream of bytes. Raises LinkError when it has ended."""

    @abstractmethod
    def send(self, parts: list[memoryview]) -> int:
        """Take some bytes off the front of the parts; how many, 0 if none now."""

    @abstractmethod
    def receive(self, into: memoryview) -> int:
        """Fill the front of a buffer; how many bytes, 0 if none now."""

    @abstractmethod
    def close(self) -> None:
        """End it, for the other side too."""

    def fileno(self) -> int:
        """File descriptor to wait for; -1 if the stream must be polled."""
        return -1


class Link(ABC):
    """Messages to one peer and from it."""

    @abstractmethod
    def post(self, frame: Frame, payload: memoryview = NOTHING) -> None:
        """Queue a message. The payload must stay as it is until the peer has it."""

    @abstractmethod
    def progress(self, place: Place) -> Iterator[Frame]:
        """Send what can be sent, and yield what has come in whole. Raises LinkError."""

    @abstractmethod
    def close(self) -> None:
        """Close the link and free its resources."""

    @property
    def wants_to_send(self) -> bool:
        """Whether something is queued that `fileno` must become writable for."""
        return False

    @property
    def has_unsent(self) -> bool:
        """Whether something has not gone out."""
        return self.wants_to_send

    @property
    def is_busy(self) -> bool:
        """Whether `progress` must be called often now, since `fileno` does not report all that arrives."""
        return False

    def fileno(self) -> int:
        """File descriptor to wait for; -1 if the stream must be polled."""
        return -1


@dataclass
class _Outgoing:
    frame: Frame
    header: memoryview
    payload: memoryview
    begun: bool = False


class PipeLink(Link):
    """Messages one behind the other on a pipe."""

    AT_ONCE = 16
    """Messages that one call may send together."""
    TURN_BYTES = 4 << 20
    """After so much received, others have their turn."""
    MOST_QUEUED = 1 << 13
    """Messages that wait to be sent: more than 16 unconfirmed groups of 256 parts, their replies and confirmations.

    More gather only where a peer asks and does not read the answers.
    """

    def __init__(self, pipe: Pipe, on_sent: OnSent | None = None) -> None:
        self._pipe, self._on_sent = pipe, on_sent
        self._queue: deque[_Outgoing] = deque()
        self._header = bytearray(HEADER_BYTES)
        self._have, self._into = 0, NOTHING
        self._frame: Frame | None = None

    def post(self, frame: Frame, payload: memoryview = NOTHING) -> None:
        self._queue.append(_Outgoing(frame, memoryview(frame.pack()), payload))

    @property
    def wants_to_send(self) -> bool:
        return bool(self._queue)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def close(self) -> None:
        self._pipe.close()

    def progress(self, place: Place) -> Iterator[Frame]:
        ended, received = None, 0
        try:
            self._send()
        except LinkEnded as problem:
            ended = problem  # what came before the end is still there to be read: a goodbye among it
        while received < self.TURN_BYTES:
            if len(self._queue) > self.MOST_QUEUED:
                text = f"{len(self._queue)} messages wait to be sent: the peer asks and does not read the answers"
                raise LinkError(text)
            frame = self._receive(place)
            if frame is None:
                break
            received += HEADER_BYTES + frame.size
            yield frame
        if ended is not None and frame is None:
            raise ended

    def _send(self) -> None:
        while self._queue:
            batch = [self._queue[number] for number in range(min(len(self._queue), self.AT_ONCE))]
            for out in batch:
                if not out.begun:
                    out.begun = True
                    self._notify(out.frame, "work_read")
                    self._notify(out.frame, "data_read")
            parts = [part for out in batch for part in (out.header, out.payload) if part.nbytes]
            sent = self._pipe.send(parts)
            if not sent:
                return
            self._take_off(sent)

    def _take_off(self, sent: int) -> None:
        while sent:
            out = self._queue[0]
            from_header = min(sent, out.header.nbytes)
            out.header = out.header[from_header:]
            from_payload = min(sent - from_header, out.payload.nbytes)
            out.payload = out.payload[from_payload:]
            sent -= from_header + from_payload
            if not out.header.nbytes and not out.payload.nbytes:
                self._queue.popleft()
                self._notify(out.frame, "data_sent")

    def _notify(self, frame: Frame, what: str) -> None:
        if self._on_sent is not None:
            self._on_sent(frame, what)

    def _receive(self, place: Place) -> Frame | None:
        while self._frame is None:
            got = self._pipe.receive(memoryview(self._header)[self._have :])
            if not got:
                return None
            self._have += got
            if self._have == HEADER_BYTES:
                frame = Frame.unpack(self._header)
                self._into = place(frame)
                self._frame, self._have = frame, 0
        while self._into.nbytes:
            got = self._pipe.receive(self._into)
            if not got:
                return None
            self._into = self._into[got:]
        frame, self._frame = self._frame, None
        return frame


LinkKey = tuple[int, int, int]
"""Peer, channel, and the attempt that opened the connection: both ends of a connection have the same two numbers, and a
later connection for the same channel has a higher attempt."""


@dataclass(frozen=True)
class LinksContext:
    """Arguments with which links are opened."""

    registered: Tensor
    """uint8 (bytes): the memory that commands of this rank name and that peers write."""
    address: str
    """The IPv4 address at which this rank listens."""
    clock: Callable[[], float]
    """Seconds."""
    library: ModuleType | None = None
    """The imported library, for links that need one."""


class Links(ABC):
    """Links that carry the messages of one heap to all peers."""

    summary: ClassVar[str]
    """In half a line: what carries headers and payload."""
    library: ClassVar[str] = ""
    """The optional library it needs; empty for none."""
    writes_memory: ClassVar[bool] = False
    """Whether payload is written without a look at the header first, so that all pages must be there from the start."""

    def __init__(self, context: LinksContext) -> None:
        """Raises LinkError where the library refuses."""
        self.context = context

    @property
    def metadata(self) -> bytes:
        """Metadata that each peer needs before `connect`; may be empty."""
        return b""

    def connect(self, metadata: Mapping[int, bytes]) -> None:
        """Begin to reach peers. metadata: theirs, by rank. Raises LinkError for one that cannot be used."""
        del metadata

    @property
    def unreached(self) -> list[int]:
        """Peers that are not reached yet, apart from their connections."""
        return []

    @property
    def is_busy(self) -> bool:
        """Whether `progress` must be called often now."""
        return False

    def progress(self) -> None:
        """Take what has arrived; from any thread."""
        return

    @abstractmethod
    def link(self, pipe: Pipe, key: LinkKey, on_sent: OnSent | None = None) -> Link:
        """Use a connection to a peer. Raises LinkEnded while that has to wait; the pipe is then the caller's."""

    def close(self) -> None:
        """Give everything back; no link is used any more."""
        return


LINKS: Registry[type[Links]] = Registry("network link", Links, group="moe_mk.network_links")


@LINKS.register("tcp")
class TcpLinks(Links):
    """Headers and payload over the connection of the proxies; needs no library."""

    summary = "headers and payload over TCP connections of the proxies"

    def link(self, pipe: Pipe, key: LinkKey, on_sent: OnSent | None = None) -> Link:
        """Messages one behind the other on the connection."""
        del key
        return PipeLink(pipe, on_sent)
