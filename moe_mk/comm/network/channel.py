"""A channel: one ring of commands and one stream of groups to each peer. Order is kept within one channel only.

The state of a channel outlives the thread that works on it. Commands read from the ring stay in `taken` until the peer
has confirmed them, and the group of each is recorded before it is sent. A thread that takes over therefore learns from
the peer how many groups arrived and sends the rest.

Commands become messages: adjacent puts are merged, and a flag is attached to the last put before it.

    put 0..99, put 100..199                   1 message      source and target both continue where the last one ended
    put 0..99, put 120..199                   2 messages     a gap
    put 0..99, store                          1 message      the flag is visible once the bytes are there

Merging corresponds to coalesced stores of a GPU warp; attaching the flag halves the messages of a signalled put
(UCCL-EP).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from moe_mk.comm.network.command import FIELD_BITS, MOST_BYTES, CommandRing, Op, TransferCommand
from moe_mk.comm.network.frames import TURN, WINDOW, Frame, FrameError, Kind, Reorder
from moe_mk.comm.network.link import Link

_KIND = {Op.PUT: Kind.PAYLOAD, Op.STORE: Kind.STORE, Op.ADD: Kind.ADD, Op.GET: Kind.GET}
MOST_OPEN_PARTS = 256
"""A group is closed after so many parts, so that they are confirmed."""


@dataclass(eq=False)
class Taken:
    """A command that the proxy has read from its ring and that is not known to be done."""

    command: TransferCommand
    place: int
    """Its number in the ring."""
    number: int | None = None
    """The group it went out with, None before; written before the message is."""


@dataclass
class Message:
    """Bytes that are sent to one peer in one piece."""

    peer: int
    kind: Kind
    size: int = 0
    source: int = 0
    at: int = 0
    """Where the bytes go; what a get asks for."""
    flag: int = 0
    value: int = 0
    taken: list[Taken] = field(default_factory=list)
    """The commands it executes."""
    serial: int = -1
    """The number of its last command in the ring; -1 for a message that no command asked for."""


def messages_of(taken: Iterable[Taken], most_bytes: int = MOST_BYTES) -> list[Message]:
    """The fewest messages that execute commands in their order for each peer."""
    made: list[Message] = []
    last_of: dict[int, Message] = {}
    for each in taken:
        command = each.command
        last = last_of.get(command.peer)
        if last is not None and _merged(last, command, most_bytes):
            message = last
        elif command.op is Op.GET:  # the request carries no bytes; its length and target travel as the value
            value = command.source << 24 | command.size
            made.append(message := Message(command.peer, _KIND[command.op], at=command.at, value=value))
        else:
            body = command.size, command.source, command.at, command.flag, command.value
            made.append(message := Message(command.peer, _KIND[command.op], *body))
        last_of[command.peer] = message
        message.taken.append(each)
        message.serial = each.place
    return made


def _merged(last: Message, command: TransferCommand, most_bytes: int) -> bool:
    if last.kind is not Kind.PAYLOAD:
        return False
    if command.op is Op.PUT:
        follows = (last.source + last.size, last.at + last.size) == (command.source, command.at)
        if not follows or last.size + command.size > most_bytes:
            return False
        last.size += command.size
        return True
    if command.op in (Op.STORE, Op.ADD):
        last.kind, last.flag, last.value = _KIND[command.op], command.flag, command.value
        return True
    return False


@dataclass
class Flying:
    """A message that is not confirmed."""

    message: Message
    number: int
    began_s: float


@dataclass
class Stream:
    """Messages to and from one peer on one channel."""

    link: Link | None = None
    number: int = 0
    """Of the group that is open."""
    parts: int = 0
    """Sent of the open group."""
    confirmed: int = 0
    """Groups that the peer has applied."""
    in_flight_bytes: int = 0
    flying: deque[Flying] = field(default_factory=deque)
    inbox: Reorder[Frame] = field(default_factory=Reorder)
    acknowledged: int = 0
    """Groups of the peer that it knows to be applied."""
    is_asked: bool = False
    """Whether the peer waits for that number."""
    has_left: bool = False
    """Whether the peer has ended on purpose."""
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Gets that the peer has not answered, by the number of their group: where the bytes go, and how many."""

    def may_post(self, size: int, most_bytes: int) -> bool:
        """Whether one more message may be in flight."""
        fits = not self.in_flight_bytes or self.in_flight_bytes + size <= most_bytes
        return self.link is not None and fits and self.number - self.confirmed < WINDOW

    def frame(self, message: Message) -> Frame:
        """Give a message its place in the stream; the commands behind it note the group first."""
        for taken in message.taken:
            taken.number = self.number
        payload, closes = int(message.size > 0), message.kind is not Kind.PAYLOAD
        number, part = self.number, self.parts
        self.parts = 0 if closes else part + payload
        self.number += closes
        if message.kind is Kind.GET:
            self.asked[number] = (message.value >> FIELD_BITS["size"], message.value & MOST_BYTES)
        return Frame(
            message.kind, number, part, part + payload if closes else 0, message.size, message.at, message.flag,
            message.value, message.serial + 1,
        )  # fmt: skip

    def confirm(self, applied: int) -> Iterator[Flying]:
        """The peer has applied so many groups; yields the messages that this confirms. Raises FrameError."""
        self._check_applied(applied)
        if unanswered := [number for number in self.asked if number < applied]:
            raise FrameError(f"it confirms {applied} groups and has not answered the get of group {unanswered[0]}")
        self.confirmed = max(self.confirmed, applied)
        while self.flying and self.flying[0].number < self.confirmed:
            done = self.flying.popleft()
            self.in_flight_bytes -= done.message.size
            yield done

    def answered(self, frame: Frame) -> tuple[int, int]:
        """Where a reply goes and how long it is. Raises FrameError for an unrequested one, or one of other size."""
        number = self.confirmed + (frame.number - self.confirmed) % TURN
        wanted = self.asked.get(number)
        if wanted is None:
            raise FrameError(f"a reply of {frame.size} bytes to group {frame.number}, in which no get awaits one")
        if wanted != (frame.at, frame.size):
            text = f"a reply of {frame.size} bytes for place {frame.at}, asked were {wanted[1]} bytes for {wanted[0]}"
            raise FrameError(text)
        return self.asked.pop(number)

    def begin_anew(self, link: Link, applied: int) -> None:
        """Go on over another link behind what the peer has applied. Raises FrameError if that cannot be."""
        self._check_applied(applied)
        if applied < self.confirmed:
            raise FrameError(f"it has applied {applied} groups after it confirmed {self.confirmed}")
        self.link, self.number, self.parts, self.confirmed = link, applied, 0, applied
        self.in_flight_bytes, self.acknowledged, self.has_left = 0, self.inbox.applied, False
        self.flying.clear()
        self.asked.clear()
        self.inbox.forget_parts()

    def _check_applied(self, applied: int) -> None:
        if applied > self.number:
            raise FrameError(f"it has applied {applied} groups of {self.number} that were sent")


class Channel:
    """Commands in their order, from the ring to the confirmation."""

    def __init__(self, number: int, ring: CommandRing, peers: list[int]) -> None:
        self.number, self.ring = number, ring
        self.streams = {peer: Stream() for peer in peers}
        self.taken: deque[Taken] = deque()
        """From the tail of the ring on, everything that was read."""
        self.backlog: deque[Message] = deque()
        self._tail = ring.tail

    @property
    def is_idle(self) -> bool:
        """Whether everything committed is done."""
        return not self.taken and self.ring.head == self._tail

    def awaits(self, gone: Set[int]) -> bool:
        """Whether a peer that is not gone has something to confirm, or is yet to be sent something. From any thread."""
        if any(each.command.peer not in gone and not self._is_done(each) for each in list(self.taken)):
            return True
        held_up = any(message.peer in gone for message in list(self.backlog)[:1])
        return not held_up and self.ring.head > self._tail + len(self.taken)

    @property
    def has_news(self) -> bool:
        """Whether there are committed commands that are unread and may be read now."""
        return not self.backlog and self.ring.head > self._tail + len(self.taken)

    def take(self, most: int) -> list[Taken]:
        """Read the next commands and put the messages they make into the backlog."""
        first = self._tail + len(self.taken)
        words = self.ring.read(first, most).tolist()
        read = [Taken(TransferCommand.unpack(*pair), first + place) for place, pair in enumerate(words)]
        self.taken.extend(read)
        self.backlog.extend(messages_of(read))
        return read

    def settle(self) -> list[Taken]:
        """Free the places of commands that are done, up to the first that is not; returns those."""
        done = []
        while self.taken and self._is_done(self.taken[0]):
            done.append(self.taken.popleft())
        if done:
            self._tail += len(done)
            self.ring.complete(self._tail)
        return done

    def begin_anew(self, peer: int, link: Link, applied: int) -> None:
        """Send again, over a new link, what a peer has not applied; the order is that of the ring.

        A get is asked again unless it was confirmed on the old link: its bytes may have been lost with that.
        """
        own = [each for each in self.taken if each.command.peer == peer]
        gets = [each for each in own if each.command.op is Op.GET and not self._is_done(each)]
        self.streams[peer].begin_anew(link, applied)  # the first change of state, after all checks
        self.backlog = deque(message for message in self.backlog if message.peer != peer)
        again = [each for each in own if not self._is_done(each) or each in gets]
        for each in again:
            each.number = None
        self.backlog.extendleft(reversed(messages_of(again)))
        self.settle()

    def _is_done(self, taken: Taken) -> bool:
        return taken.number is not None and taken.number < self.streams[taken.command.peer].confirmed
