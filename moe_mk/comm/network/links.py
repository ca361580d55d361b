"""Network links by name: what carries the messages of a proxy once it is connected to a peer.

    tcp     headers and payload over the connection of the proxies
    nixl    headers over that connection, payload by writes of the NIXL library (`nixl.py`)

A rank opens one `Links` for each heap; its `link` is called for every connection to a peer. A link keeps the order of
messages, and yields one only when its payload is in place; what a message does is decided by its receiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from torch import Tensor

from moe_mk.comm.network.link import Link, OnSent, Pipe, PipeLink
from moe_mk.registry import Registry

LinkKey = tuple[int, int, int]
"""Peer, channel, and the attempt that opened the connection: both ends of a connection have the same two numbers, and a
later connection for the same channel has a higher attempt."""


@dataclass(frozen=True)
class LinksContext:
    """What links are opened with."""

    registered: Tensor
    """uint8 (bytes): the memory that commands of this rank name and that peers write."""
    address: str
    """The IPv4 address at which this rank listens."""
    clock: Callable[[], float]
    """Seconds."""
    library: ModuleType | None = None
    """The imported library, for links that need one."""


class Links(ABC):
    """What carries the messages of one heap to all peers."""

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
        """What each peer must have before `connect`; empty if nothing."""
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
