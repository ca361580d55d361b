"""Frames of the network protocol, and the order in which a receiver applies them.

    header, 32 bytes      immediate u32 | size u32 | at u64 | value u64 | part u16 | covers u16 | serial u32
    immediate, 32 bits    sequence 4 | lap 12 | kind 4 | flag 12

A network that reorders messages (SRD of EFA) may deliver a flag before the rows it announces. Each message therefore
has the number of a group: payload parts, then the control message that closes the group and states how many parts it
covers. The low four bits of the number select a place in a window of 16 groups that may be in flight. Payload is
written on arrival, in any order; a group is applied when all its parts have arrived and all earlier groups have been
applied.

The lap, the bits above those four, orders nothing. It distinguishes messages of an earlier pass over the window from
those of the current one: a late duplicate is dropped, and more than 16 groups in flight raise an error instead of
setting a wrong flag. Sequence numbers of four bits in immediate data are UCCL-EP's; groups and laps are additions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeVar

from moe_mk.errors import MoEMKError

SEQUENCE_BITS, LAP_BITS, KIND_BITS, FLAG_BITS = 4, 12, 4, 12
WINDOW = 1 << SEQUENCE_BITS
_KIND_AT = SEQUENCE_BITS + LAP_BITS
TURN = 1 << _KIND_AT
"""Numbers repeat after so many groups."""

C = TypeVar("C")


_LAYOUT = struct.Struct("<IIQQHHI")
HEADER_BYTES = _LAYOUT.size


class GroupError(MoEMKError, RuntimeError):
    """A message whose group or part cannot be."""


class WindowOverflow(GroupError):
    """A message of a group that is further ahead than the window reaches."""


class Kind(IntEnum):
    """Effect of a message on arrival."""

    PAYLOAD = 0
    FENCE = 1
    """Closes a group and does no more."""
    STORE = 2
    ADD = 3
    GET = 4
    REPLY = 5
    """The bytes of a get; belongs to no group of its sender."""
    ACK = 6
    """How many groups have been applied; belongs to none either."""
    BYE = 7
    """The last message of a rank that needs its peers no more; without it the end of a link is a loss."""


@dataclass(slots=True)
class _Place(Generic[C]):
    """Received frames of one group."""

    parts: int = 0
    """One bit a part."""
    covers: int = -1
    control: C | None = None


@dataclass
class Reorder(Generic[C]):
    """The receiving end of one stream of groups."""

    applied: int = 0
    """Groups applied since the beginning."""
    _places: list[_Place[C]] = field(default_factory=lambda: [_Place() for _ in range(WINDOW)])

    def is_new(self, number: int) -> bool:
        """Whether a group has not been applied yet. Raises WindowOverflow if it is ahead of the window."""
        ahead = (number - self.applied) % TURN
        if ahead < WINDOW:
            return True
        if ahead >= TURN // 2:
            return False
        raise WindowOverflow(
            f"group {number} is {ahead} ahead of the next one to apply, a window of {SEQUENCE_BITS} bits reaches "
            f"{WINDOW - 1}; the sender must wait for acknowledgements"
        )

    def part(self, number: int, part: int) -> None:
        """A part of a group has arrived; a duplicate is ignored. Raises GroupError behind the last part."""
        if self.is_new(number):
            place = self._places[number % WINDOW]
            place.parts |= 1 << part
            self._check_parts(number, place)

    def control(self, number: int, covers: int, control: C) -> None:
        """The message that closes a group has come. covers: how many parts the group has.

        Raises GroupError where a part behind the last one has come: such a group would never be complete.
        """
        if self.is_new(number):
            place = self._places[number % WINDOW]
            place.covers, place.control = covers, control
            self._check_parts(number, place)

    def _check_parts(self, number: int, place: _Place[C]) -> None:
        if place.control is not None and place.parts >> place.covers:
            last = place.parts.bit_length() - 1
            raise GroupError(f"part {last} of group {number}, which has {place.covers} parts")

    def ready(self) -> list[C]:
        """Frames that can be applied now, in order; each counts as applied from here on."""
        found: list[C] = []
        while True:
            place = self._places[self.applied % WINDOW]
            if place.control is None or place.parts != (1 << place.covers) - 1:
                return found
            found.append(place.control)
            self._places[self.applied % WINDOW] = _Place()
            self.applied += 1

    def forget_parts(self) -> None:
        """The sender begins anew behind what has been applied."""
        self._places = [_Place() for _ in range(WINDOW)]


class LinkError(MoEMKError, RuntimeError):
    """A link that cannot be used: it has ended, the peer did not answer, or a frame was refused."""


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
        assert 0 <= self.flag < 1 << FLAG_BITS
        immediate = self.number % TURN | self.kind << _KIND_AT | self.flag << (_KIND_AT + KIND_BITS)
        return _LAYOUT.pack(immediate, self.size, self.at, self.value, self.part, self.covers, self.serial & 0xFFFFFFFF)

    @classmethod
    def unpack(cls, header: bytes | bytearray) -> Frame:
        """Raises FrameError for bytes that are no header."""
        immediate, size, at, value, part, covers, serial = _LAYOUT.unpack(header)
        try:
            kind = Kind(immediate >> _KIND_AT & ((1 << KIND_BITS) - 1))
        except ValueError as problem:
            raise FrameError(f"no message begins with {bytes(header[:4]).hex()}: {problem}") from problem
        number, flag = immediate & (TURN - 1), immediate >> (_KIND_AT + KIND_BITS)
        return cls(kind, number, part, covers, size, at, flag, value, serial)
