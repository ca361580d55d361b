"""A link that shuffles: messages overtake each other at will, and some come twice, as a network without order has it.
Nothing is lost for good. For tests of what stands above links, and for whoever writes a link to such a network."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from moe_mk.comm.network.frames import Frame, LinkError
from moe_mk.comm.network.link import NOTHING, Link, Place


@dataclass
class _Air:
    """What is on its way to one end."""

    messages: list[tuple[Frame, bytes]] = field(default_factory=list)
    is_ended: bool = False


class ShuffledLink(Link):
    """One end of a pair; both belong to one thread."""

    def __init__(self, away: _Air, home: _Air, draw: random.Random, twice: float) -> None:
        self._away, self._home, self._draw, self._twice = away, home, draw, twice
        self.order: list[Frame] = []
        """What has come, in the order in which it came."""

    @classmethod
    def pair(cls, seed: int, *, twice: float = 0.0) -> tuple[ShuffledLink, ShuffledLink]:
        """Two ends. twice: how likely a message comes once more, at any later time."""
        one, other, draw = _Air(), _Air(), random.Random(seed)
        return cls(one, other, draw, twice), cls(other, one, draw, twice)

    def post(self, frame: Frame, payload: memoryview = NOTHING) -> None:
        self._away.messages.append((frame, bytes(payload)))

    def progress(self, place: Place) -> Iterator[Frame]:
        if self._home.is_ended:
            raise LinkError("the other side has closed")
        messages = self._home.messages
        for _ in range(self._draw.randint(0, len(messages))):
            number = self._draw.randrange(len(messages))
            frame, payload = messages[number]
            if self._draw.random() >= self._twice:
                messages.pop(number)
            to = place(frame)
            if frame.size:
                to[:] = payload
            self.order.append(frame)
            yield frame

    def close(self) -> None:
        self._away.is_ended = True
