"""What a message looks like on a stream of bytes: a header of 32 bytes, then its payload.

immediate u32 | size u32 | at u64 | value u64 | part u16 | covers u16 | serial u32
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from moe_mk.comm.network.sequence import Immediate, Kind
from moe_mk.errors import MoEMKError

_LAYOUT = struct.Struct("<IIQQHHI")
HEADER_BYTES = _LAYOUT.size


class LinkError(MoEMKError, RuntimeError):
    """A link that cannot be used: it has ended, nobody answered, or a frame was refused."""


class LinkEnded(LinkError):
    """The bytes have stopped: the connection was closed or reset. The same peer may be called again."""


class FrameError(LinkError):
    """A frame that is refused before anything of it is written or allocated.

    peer: the rank that sent it; None where a frame is checked without knowing its link.
    """

    def __init__(self, text: str, peer: int | None = None) -> None:
        self.text, self.peer = text, peer
        super().__init__(text if peer is None else f"rank {peer} sent a frame that is refused: {text}")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message on its way, without its payload."""

    kind: Kind
    number: int = 0
    """Of its group, modulo TURN."""
    part: int = 0
    """Which part of the group the payload is."""
    covers: int = 0
    """Of a control message: how many parts the group has, its own payload included."""
    size: int = 0
    at: int = 0
    flag: int = 0
    value: int = 0
    serial: int = 0
    """For the sender's log: the number of the last command behind it, plus one; 0 if there is none. Lower 32 bits."""

    def pack(self) -> bytes:
        """The header."""
        immediate = Immediate(self.number, self.kind, self.flag).pack()
        return _LAYOUT.pack(immediate, self.size, self.at, self.value, self.part, self.covers, self.serial & 0xFFFFFFFF)

    @classmethod
    def unpack(cls, header: bytes | bytearray) -> Frame:
        """Raises FrameError for bytes that are no header."""
        immediate, size, at, value, part, covers, serial = _LAYOUT.unpack(header)
        try:
            known = Immediate.unpack(immediate)
        except ValueError as problem:
            raise FrameError(f"no message begins with {bytes(header[:4]).hex()}: {problem}") from problem
        return cls(known.kind, known.number, part, covers, size, at, known.flag, value, serial)
