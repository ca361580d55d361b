"""A thread that serves channels: it reads rings, moves messages, takes calls, and sleeps when all is done.

A doorbell and its record: how a sleeping consumer learns of work, and learns of it although the bell was not heard.

The record is a count in memory: how much work was ever queued, the head of a ring. The doorbell only wakes.
A consumer that wakes for any reason works up to the record, so a lost doorbell costs time and nothing else.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from threading import Event, Lock, Thread

from moe_mk.comm.network.events import Step
from moe_mk.comm.network.exchange import Exchange
from moe_mk.comm.network.frames import Frame, LinkError
from moe_mk.comm.network.link import Links, Pipe
from moe_mk.comm.network.tcp import Acceptor
from moe_mk.errors import unless_signalled
from moe_mk.process import in_child


class Doorbell:
    """Wakes a thread that waits for a file descriptor."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        in_child(self, Doorbell.close)
        self.is_awaited = False
        """Set by the consumer before its last look at the record; an awake consumer needs no ring."""

    def fileno(self) -> int:
        return self._event

    def ring(self) -> None:
        os.eventfd_write(self._event, 1)

    def ring_if_awaited(self) -> None:
        """Wake the consumer if it sleeps, or is about to."""
        if self.is_awaited:
            self.ring()

    def hear(self) -> None:
        """Be ready for the next ring."""
        try:
            os.eventfd_read(self._event)
        except unless_signalled(BlockingIOError):
            return

    def close(self) -> None:
        """Give the descriptor back; it can be rung no more."""
        event, self._event = self._event, -1
        if event >= 0:
            os.close(event)

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            self.close()


THREAD_NAME = "moe-mk proxy"
LONGEST_SLEEP_S = 0.05
"""After so long the record is read although no bell was heard."""
LINGER_S = 0.0005
"""After so long without new commands open groups are closed."""
GOODBYE_S = 1.0
"""So long at most goodbyes may take, and the last turn of a thread after them: a library may hold it up."""
UNSENT_S = 0.02
"""So long at most, of that, payload that is not sent over the connection: a peer that is stuck holds it up."""
_STEPS = {"work_read": Step.WORK_READ, "data_read": Step.DATA_READ, "data_sent": Step.DATA_SENT}

POLL_S, SLOWEST_POLL_S = 5e-5, 1e-3
"""How long a pause between two calls of busy links takes at first, and when nothing has come for a while."""
POLLS_BEFORE_SLOWER = 16

Adopt = tuple[int, int, int, Pipe, Callable[[], int]]
"""Channel, peer, attempt, the pipe, and what gives the groups the peer has applied once its old link is closed."""
Lost = Callable[[int, int, LinkError | None], None]
"""Called with the peer, the channel and what ended the link; None: one has begun."""


class Worker:
    """One thread of a proxy. All state of commands and peers is in its exchanges."""

    def __init__(
        self, exchanges: list[Exchange], links: Links, lost: Lost, failed: Callable[[BaseException], None]
    ) -> None:
        self._exchanges = {exchange.channel.number: exchange for exchange in exchanges}
        self._carrying, self._lost, self._failed = links, lost, failed
        self.doorbell, self._adoptions = Doorbell(), deque[Adopt]()
        self._stop, self._leaving, self._epoll = Event(), Event(), select.epoll()
        self._door: Acceptor | None = None
        self._links: dict[int, tuple[Exchange, int]] = {}
        """By file descriptor."""
        self._writing: set[int] = set()
        """Descriptors that are also waited for to take more."""
        self._idle_polls = 0
        self._thread = Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._beginning, self._has_begun = Lock(), False
        in_child(self, Worker._leave_to_parent)

    def start(self, door: Acceptor | None = None) -> None:
        """door: where it takes calls too."""
        self._door = door
        self._epoll.register(self.doorbell.fileno(), select.EPOLLIN)
        if door:
            self._epoll.register(door.fileno(), select.EPOLLIN)
        self._thread.start()

    def adopt(self, channel: int, peer: int, attempt: int, pipe: Pipe, applied: Callable[[], int]) -> None:
        """Go on with a peer over a new pipe; from any thread."""
        self._adoptions.append((channel, peer, attempt, pipe, applied))
        self.doorbell.ring()

    def leave(self) -> None:
        """Say goodbye to every peer, then end."""
        self._leaving.set()
        self.doorbell.ring()
        if self._has_begun:
            self._thread.join(GOODBYE_S)
        self.stop()

    def stop(self) -> None:
        """End the thread where it stands; one that has not begun never will.

        An exception of a signal handler within `start` leaves it open whether the system has a thread, which `join`
        refuses to wait for until it runs.
        """
        with self._beginning:
            self._stop.set()
        self.doorbell.ring()
        if self._has_begun:
            self._thread.join(GOODBYE_S)

    def _leave_to_parent(self) -> None:
        """In a forked child: what is registered there stays so for the parent."""
        self._epoll.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        with self._beginning:
            if self._stop.is_set():
                return
            self._has_begun = True
        try:
            while not self._stop.is_set() and not self._leaving.is_set():
                self._turn()
            if self._leaving.is_set():
                self._go()
        except BaseException as problem:  # reported to those who wait
            self._failed(problem)
        finally:
            for exchange, peer in list(self._links.values()):
                self._drop(exchange, peer)
            while self._adoptions:  # other threads may still add to it
                self._adoptions.popleft()[3].close()
            self._epoll.close()

    def _turn(self) -> None:
        while self._adoptions:
            self._take_in(*self._adoptions.popleft())
        if self._door:
            self._door.tend()
        worked = False
        for exchange in self._exchanges.values():
            worked |= exchange.send()
        self._carrying.progress()
        for exchange, peer in list(self._links.values()):
            worked |= self._move(exchange, peer)
        if worked:
            self._idle_polls = 0
            self._heard(self._epoll.poll(0))
        elif self._is_busy():
            self._poll()
        else:
            self._idle_polls = 0
            self._wait(LINGER_S)

    def _go(self) -> None:
        for exchange in self._exchanges.values():
            exchange.say_goodbye()
        began_s: float | None = None
        while self._links and not self._stop.is_set():
            for exchange, peer in list(self._links.values()):
                self._move(exchange, peer)
                link = exchange.channel.streams[peer].link
                began_s = exchange.clock() if began_s is None else began_s
                is_awaited = link is not None and link.has_unsent and exchange.clock() - began_s < UNSENT_S
                if link is not None and not link.wants_to_send and not is_awaited:
                    self._drop(exchange, peer)
            self._watch_writers()
            self._epoll.poll(LINGER_S)

    def _move(self, exchange: Exchange, peer: int) -> bool:
        try:
            return exchange.arrive(peer)
        except LinkError as problem:
            self._drop(exchange, peer)
            self._lost(peer, exchange.channel.number, problem)
            return True

    def _is_busy(self) -> bool:
        links = (exchange.channel.streams[peer].link for exchange, peer in self._links.values())
        return self._carrying.is_busy or any(link is not None and link.is_busy for link in links)

    def _poll(self) -> None:
        """Pause before links are looked at again, longer where nothing comes, and close what is open meanwhile."""
        self._idle_polls += 1
        self._watch_writers()
        if self._idle_polls <= POLLS_BEFORE_SLOWER:
            self._stop.wait(POLL_S)
            self._heard(self._epoll.poll(0))
            return
        for exchange in self._exchanges.values():
            exchange.close_groups()
        self._heard(self._epoll.poll(SLOWEST_POLL_S))

    def _wait(self, seconds: float) -> None:
        """Sleep until something comes: a little, then close what is open, then longer."""
        self.doorbell.is_awaited = True
        if any(exchange.channel.has_news for exchange in self._exchanges.values()):  # the record, after the flag
            self.doorbell.is_awaited = False
            return
        self._watch_writers()
        events = self._epoll.poll(seconds)
        if not events:
            for exchange in self._exchanges.values():
                exchange.close_groups()
            for exchange, peer in list(self._links.values()):
                self._move(exchange, peer)
            self._watch_writers()
            events = self._epoll.poll(LONGEST_SLEEP_S)
        self.doorbell.is_awaited = False
        self._heard(events)

    def _heard(self, events: list[tuple[int, int]]) -> None:
        descriptors = {descriptor for descriptor, _ in events}
        if self.doorbell.fileno() in descriptors:
            self.doorbell.hear()
        if self._door and self._door.fileno() in descriptors:
            self._door.answer()

    def _watch_writers(self) -> None:
        for descriptor, (exchange, peer) in self._links.items():
            link = exchange.channel.streams[peer].link
            wants = link is not None and link.wants_to_send
            if wants != (descriptor in self._writing):
                self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wants else 0))
                (self._writing.add if wants else self._writing.discard)(descriptor)

    def _take_in(self, channel: int, peer: int, attempt: int, pipe: Pipe, applied: Callable[[], int]) -> None:
        exchange = self._exchanges[channel]
        self._drop(exchange, peer)

        def on_sent(frame: Frame, what: str) -> None:
            if frame.serial:
                exchange.on_step(_STEPS[what], (channel, frame.serial - 1))

        try:
            link = self._carrying.link(pipe, (peer, channel, attempt), on_sent)
            exchange.channel.begin_anew(peer, link, applied())
        except LinkError as problem:
            pipe.close()
            self._lost(peer, exchange.channel.number, problem)
            return
        self._links[pipe.fileno()] = (exchange, peer)
        self._epoll.register(pipe.fileno(), select.EPOLLIN)
        self._lost(peer, channel, None)

    def _drop(self, exchange: Exchange, peer: int) -> None:
        stream = exchange.channel.streams[peer]
        if stream.link is None:
            return
        descriptor = stream.link.fileno()
        if self._links.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            self._writing.discard(descriptor)
        stream.link.close()
        stream.link = None
