"""One channel at work: commands go out as messages, messages of peers come in and are applied.

Nothing here waits: a thread calls `send`, `arrive` and `close_groups` in turn (`worker.py`), a test by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_mk.comm.network.channel import MOST_OPEN_PARTS, Channel, Flying, Message, Stream
from moe_mk.comm.network.command import MOST_BYTES
from moe_mk.comm.network.events import OnStep, Step, Watch
from moe_mk.comm.network.frames import WINDOW, Frame, FrameError, GroupError, Kind
from moe_mk.comm.network.link import NOTHING, Link
from moe_mk.comm.network.window import OwnWindow

AT_ONCE = 64
"""Commands that are read together: what can be merged is among them."""
CONFIRMED_TOGETHER = WINDOW // 2
"""So many groups are confirmed at once, or fewer when nothing else is to do: no rank waits for it in between."""
_OUT_OF_GROUPS = (Kind.ACK, Kind.REPLY, Kind.BYE)
_WITHOUT_PAYLOAD = (Kind.FENCE, Kind.GET, Kind.ACK, Kind.BYE)


def _check_form(frame: Frame) -> None:
    """Raise FrameError for a payload where none belongs, or for parts that the sender never makes."""
    most = 0 if frame.kind in _WITHOUT_PAYLOAD else MOST_BYTES
    if frame.size > most or (frame.kind is Kind.PAYLOAD and not frame.size):
        raise FrameError(f"a {frame.kind.name} message of {frame.size} bytes; it may have at most {most}")
    if frame.kind in _OUT_OF_GROUPS:
        return
    covered = 0 if frame.kind is Kind.PAYLOAD else frame.part + (frame.size > 0)
    if frame.covers != covered or frame.part + (frame.size > 0) > MOST_OPEN_PARTS:
        text = f"a {frame.kind.name} message as part {frame.part} that covers {frame.covers} parts"
        raise FrameError(f"{text}; a group has at most {MOST_OPEN_PARTS}")


def no_step(step: Step, key: tuple[int, int]) -> None:
    """Ignore a step of the exchange."""


@dataclass
class Exchange:
    """One channel, the window it writes into, and what is measured."""

    channel: Channel
    window: OwnWindow
    watch: Watch
    clock: Callable[[], float]
    most_in_flight_bytes: int
    on_step: OnStep = no_step

    def send(self) -> bool:
        """Hand messages to links until there are none or the first may not go; whether any went."""
        worked, backlog = False, self.channel.backlog
        while True:
            if not backlog:
                for taken in self.channel.take(AT_ONCE):
                    self.on_step(Step.REQUEST_SEEN, (self.channel.number, taken.place))
            if not backlog:
                return worked
            message = backlog[0]
            stream = self.channel.streams[message.peer]
            if not stream.may_post(message.size, self.most_in_flight_bytes):
                self.watch.held_back[message.peer] += 1
                if stream.link is not None and stream.parts:
                    self._post(stream, Message(message.peer, Kind.FENCE))
                return worked
            self._post(stream, message)
            backlog.popleft()
            worked = True

    def close_groups(self) -> None:
        """Confirm what came, and have confirmed what went without a control message: nothing else is to do."""
        for peer, stream in self.channel.streams.items():
            self._confirm(stream)
            if stream.link is not None and stream.parts:
                self._post(stream, Message(peer, Kind.FENCE))

    def say_goodbye(self) -> None:
        """Notify every peer that this rank ends on purpose."""
        for stream in self.channel.streams.values():
            self._confirm(stream)
            if stream.link is not None:
                stream.link.post(Frame(Kind.BYE))

    def arrive(self, peer: int) -> bool:
        """Let the link of a peer send and receive, and apply what has come; whether anything has. Raises LinkError."""
        stream = self.channel.streams[peer]
        link, worked = stream.link, False
        if link is None:
            return False
        try:
            for frame in link.progress(lambda frame: self._landing(stream, frame)):
                self._arrived(peer, stream, link, frame)
                worked = True
        except (FrameError, GroupError) as problem:
            raise FrameError(str(problem), peer) from problem
        if stream.is_asked or stream.inbox.applied - stream.acknowledged >= CONFIRMED_TOGETHER:
            self._confirm(stream)
        return worked

    def _confirm(self, stream: Stream) -> None:
        if stream.link is not None and stream.inbox.applied != stream.acknowledged:
            stream.acknowledged, stream.is_asked = stream.inbox.applied, False
            stream.link.post(Frame(Kind.ACK, value=stream.acknowledged))

    def _post(self, stream: Stream, message: Message) -> None:
        assert stream.link is not None
        key, has_commands = (self.channel.number, message.serial), bool(message.taken)
        frame = stream.frame(message)
        payload = self.window.own(message.source, message.size) if message.size else NOTHING
        stream.flying.append(Flying(message, frame.number, self.clock()))
        stream.in_flight_bytes += message.size
        watch, peer = self.watch, message.peer
        watch.messages[peer] += 1
        if message.size:
            watch.sizes[1 << (message.size - 1).bit_length()] += 1
        watch.most_in_flight[peer] = max(watch.most_in_flight[peer], stream.in_flight_bytes)
        stream.link.post(frame, payload)
        for step in (Step.WORK_QUEUED, Step.RECORD_WRITTEN, Step.DOORBELL_RUNG) if has_commands else ():
            self.on_step(step, key)
        if stream.parts >= MOST_OPEN_PARTS:
            self._post(stream, Message(message.peer, Kind.FENCE))

    def _landing(self, stream: Stream, frame: Frame) -> memoryview:
        """Where a payload goes; payload of an applied group goes to scratch memory. Raises FrameError."""
        _check_form(frame)
        self.window.check(frame)
        if frame.kind is Kind.REPLY:
            return self.window.own(*stream.answered(frame))
        if not frame.size:
            return NOTHING
        is_new = stream.inbox.is_new(frame.number)
        place = self.window.incoming(frame)
        return place if is_new else memoryview(bytearray(frame.size))

    def _arrived(self, peer: int, stream: Stream, link: Link, frame: Frame) -> None:
        if frame.kind is Kind.ACK:
            number = self.channel.number
            for flying in stream.confirm(frame.value):
                self.watch.completion[peer].add(self.clock() - flying.began_s)
                if flying.message.taken:
                    self.on_step(Step.COMPLETION_WRITTEN, (number, flying.message.serial))
                    self.on_step(Step.COMPLETION_SEEN, (number, flying.message.serial))
            for taken in self.channel.settle():
                self.on_step(Step.PRODUCER_REPORTED, (number, taken.place))
            self.window.arrived.set()
        if frame.kind is Kind.BYE:
            stream.has_left = True
        if frame.kind in _OUT_OF_GROUPS:
            return
        if frame.size:
            stream.inbox.part(frame.number, frame.part)
        if frame.kind is not Kind.PAYLOAD:
            stream.inbox.control(frame.number, frame.covers, frame)
        for control in stream.inbox.ready():
            self._apply(peer, link, control)

    def _apply(self, peer: int, link: Link, control: Frame) -> None:
        if control.kind is Kind.STORE:
            self.window.words.store(self.window.flag_at(control.flag), control.value)  # `check` has passed it
        elif control.kind is Kind.ADD:
            self.window.add(peer, control.flag, control.value)
        elif control.kind is Kind.FENCE:
            self.channel.streams[peer].is_asked = True
        elif control.kind is Kind.GET:
            self.channel.streams[peer].is_asked = True
            asked = self.window.asked(control)
            link.post(Frame(Kind.REPLY, control.number, size=asked.nbytes, at=control.value >> 24), asked)
        self.window.arrived.set()
