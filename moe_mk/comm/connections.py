"""Connections of a gloo group: receives that are posted in advance, and the rank that a failed wait reports.

Receives for headers, and one for a failure notice, are posted for every peer at all times, so that the report of a
failing rank arrives while its peers compute. In small groups several receives for headers are posted per peer, and
reposted in batches: each post writes to a socket, during which gloo's I/O thread cannot receive on that connection.

gloo closes all connections of a group when a wait times out, and peers would report the rank that closed first. So a
thread monitors long waits: it detects peer processes on this host that have exited, and reports which rank is
awaited before the connections close. Errors name the end of that chain: a rank that waits for no other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.failure import Failure
from moe_mk.comm.header import (
    EAGER_BYTES,
    EPOCHS,
    HANG_UP_TAG,
    HEADER_BYTES,
    HEADER_TAGS,
    MAGIC,
    NOTICE_TAGS,
    RECOVERY_TAG,
    UNKNOWN,
    Caller,
    Header,
    Kind,
    Posts,
    Receive,
    Recovery,
    host_number,
)  # fmt: skip
from moe_mk.errors import CommError, Suppress, unless_signalled
from moe_mk.flight import Flight, InFlight
from moe_mk.process import Process, WatchedProcess
from moe_mk.trace.clock import now

GRACE_S = 0.3
"""How long after its timeout a rank waits for peers to say for whom they wait."""
FORKED_S = 1.0
"""How long a wait for a process that has ended may go on: its connections may be open in a child of it."""
CLOSING_S = 0.5
"""How long a process may take to end after its connections have."""
PULSE_S = 0.05
"""Interval of the checks during a long wait."""
PARKED_S = 5.0
"""Interval of the checks that the group still exists while no call is made."""
MOST_RECEIVES = 8
"""Receives for headers posted per peer, in groups of up to 8 ranks; fewer in larger ones: 66 kB each."""
LEAST_RECEIVES = 2
"""The least number of these at any time."""


@dataclass
class _Wait:
    """A wait in progress, as the monitoring thread sees it."""

    peer: int
    late_at: float
    noted: bool = False
    ends_at: float | None = None
    """When connections are closed because a process has ended that the wait may never hear of."""


@dataclass(eq=False)
class Connections:
    """Connections of this process to the other ranks of a process group, in one epoch after the other."""

    _group: ref[dist.ProcessGroup]
    rank: int
    size: int

    def __post_init__(self) -> None:
        self.peers = [peer for peer in range(self.size) if peer != self.rank]
        self.left_out: set[int] = set()
        """Ranks that the others go on without."""
        self.closed = ""
        """Why no message can be sent any more; empty while connections are open."""
        self.process, self.host = Process.this(), host_number()
        self.epoch = 0
        self.headers: dict[int, deque[Receive]] = {}
        """Posted receives by peer, in order."""
        self.read_headers: dict[int, list[Receive]] = {peer: [] for peer in self.peers}
        """Completed receives that are to be reposted."""
        self.posted: list[dist.Work] = []
        """Messages of the last call, see `post`."""
        self.unfinished: list[object] = []
        """Works and tensors of calls that failed: gloo may still read or write them."""
        self.watcher: threading.Thread | None = None
        """The thread that monitors long waits; None until the system could start one."""
        self._processes: dict[int, WatchedProcess] = {}
        """Of peers on this host."""
        self._depth = max(2, min(MOST_RECEIVES, MOST_RECEIVES * 8 // self.size))
        self._notices: dict[int, Receive] = {}
        self._standing: tuple[int, list[Receive], Posts] | None = None
        """Receives of headers and notices as they were posted first in an epoch."""
        self._recovery: Recovery | None = None
        """The one in progress, or the last one."""
        self._wait: _Wait | None = None
        self._awake = threading.Event()

    def leave_out(self, ranks: Collection[int]) -> None:
        """Speak to these ranks no more. The others do the same and recover together."""
        self.left_out |= set(ranks)
        self.peers = [peer for peer in self.peers if peer not in self.left_out]

    # Receives that are posted in advance.

    def stand_by(self) -> None:
        """Post the receives of every peer and start the monitoring thread, without which calls work as well."""
        if not self.headers:
            self._await_peers(self.epoch)
        watcher = threading.Thread(target=watch, args=(ref(self),), name="moe-mk group watch", daemon=True)
        with Suppress(RuntimeError, MemoryError):
            watcher.start()
            self.watcher = watcher

    def _await_peers(self, epoch: int) -> None:
        """Await headers and a notice of every peer in an epoch."""
        largest = HEADER_BYTES + EAGER_BYTES
        if self._standing is None or self._standing[0] != epoch:
            receives = [
                Receive.of(peer, HEADER_TAGS + epoch, largest) for peer in self.peers for _ in range(self._depth)
            ]
            receives += [Receive.of(peer, NOTICE_TAGS + epoch) for peer in self.peers]
            self._standing = epoch, receives, Posts([(each.peer, each.tag, each.tensor) for each in receives])
        _, receives, posts = self._standing
        posts.post(self._open_group().recv)
        for receive, work in zip(receives, posts.works, strict=True):
            receive.work = work
        count = self._depth * len(self.peers)
        self.read_headers = {peer: [] for peer in self.peers}
        self._notices = {receive.peer: receive for receive in receives[count:]}
        self.headers = {
            peer: deque(receive for receive in receives[:count] if receive.peer == peer) for peer in self.peers
        }

    def await_next(self, peer: int) -> None:
        """The first header of a peer was read: another one is awaited at the next call, behind those that are awaited.

        Several are posted at a time, after the messages of a call: peers compute with these, and not with receives. At
        least one is awaited at all times.
        """
        read, awaited = self.read_headers[peer], self.headers[peer]
        read.append(awaited.popleft())
        if len(awaited) < LEAST_RECEIVES:
            self._await_headers(peer)

    def await_more(self) -> None:
        """Repost receives for headers of every peer of which half are complete."""
        for peer, read in self.read_headers.items():
            if len(read) >= self._depth // 2 and peer not in self.left_out:
                self._await_headers(peer)

    def _await_headers(self, peer: int) -> None:
        read, awaited = self.read_headers[peer], self.headers[peer]
        while read:
            receive = read.pop()
            receive.has_come = False
            try:
                receive.work = self.post("recv", receive.tensor, peer, HEADER_TAGS + self.epoch)
            except unless_signalled(RuntimeError) as problem:  # for whoever waits for it: some are never needed
                receive.work = problem
            awaited.append(receive)

    # Messages.

    def post(self, how: Literal["send", "recv"], message: Tensor, peer: int, tag: int) -> dist.Work:
        """Post a message and keep it, in one step of the interpreter.

        A pending operation whose buffer is freed blocks its gloo connection for good. An interrupt must therefore not
        drop the returned work, so `map` calls gloo while `extend` stores the result.
        """
        self.posted.extend(map(getattr(self._open_group(), how), ([message],), (peer,), (tag,)))
        return self.posted[-1]

    def _open_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def next_header(self, caller: Caller, phase: str, peer: int, late_at: float) -> Header:
        """Wait for a header of a peer. Raises CommError for the report of a failure."""
        header = self._read(caller, phase, peer, self.headers[peer][0], late_at)
        self.await_next(peer)
        self.note_process(peer, header)
        if header.kind is Kind.FAILED:
            raise self._failed(caller, phase, header)
        return header

    def _read(self, caller: Caller, phase: str, peer: int, receive: Receive, late_at: float) -> Header:
        if not receive.has_come:
            self.finish(caller, phase, peer, receive.work, late_at)
            receive.has_come = True
        try:
            return Header.unpacked(receive.memory)
        except ValueError as problem:
            raise self.error(caller, phase, peer, str(problem)) from problem

    def finish(self, caller: Caller, phase: str, peer: int, work: dist.Work | RuntimeError, late_at: float) -> None:
        """Wait for a message until `late_at`. Raises CommError that names whoever kept it from ending."""
        if isinstance(work, RuntimeError):
            raise self.lost(caller, phase, peer, work) from work
        self._wait = _Wait(peer, late_at)
        if not self._awake.is_set():
            self._awake.set()
        try:
            work.wait(timedelta(seconds=max(late_at + GRACE_S - now(), 0.001)))  # to gloo, 0 is no limit
        except unless_signalled(RuntimeError) as problem:
            raise self.lost(caller, phase, peer, problem, late=now() > late_at) from problem
        finally:
            self._wait = None

    def note_process(self, peer: int, header: Header) -> None:
        """Record the process of a peer on this host, to detect its exit during long waits."""
        if header.process is not None and header.host == self.host != 0:
            self._processes[peer] = WatchedProcess.of(header.process, self.process)

    # Failures.

    def report(self, failure: Failure) -> None:
        """Send a failure to all peers over open connections. Never raises, never waits."""
        culprit = UNKNOWN if failure.culprit is None else failure.culprit
        if self._recovery is not None and self._recovery.has_ended:
            self.unfinished.append(self._recovery)
            self._recovery = None
        self._notify(Header(Kind.FAILED, self.epoch, 0, failure.report, peer=culprit, process=self.process))

    def report_recovery(self, text: str) -> None:
        """End what peers wait for since the recovery of this rank was interrupted: theirs, or the call after it."""
        recovery = self._recovery = self._recovery or Recovery(self.epoch)
        header = Header(Kind.FAILED, max(self.epoch, recovery.epoch + recovery.is_sent), 0, text, peer=self.rank)
        self._notify(header, [] if recovery.is_sent else [RECOVERY_TAG])

    def _notify(self, header: Header, tags: Sequence[int] = ()) -> None:
        """Send a notice to all peers, to where headers are awaited too if it is to end their calls."""
        tags = tags or [NOTICE_TAGS + header.epoch] + [HEADER_TAGS + header.epoch] * (header.kind is Kind.FAILED)
        for peer in [] if self.closed else self.peers:
            for tag in tags:
                with Suppress(RuntimeError, MemoryError):
                    send = self._open_group().send
                    self.unfinished.extend(map(send, ([header.message()],), (peer,), (tag,)))

    def error(self, caller: Caller, phase: str, peer: int | None, text: str) -> CommError:
        """The error of a call, with the ranks as its caller numbers them."""
        number = None if peer is None else caller.rank_of.get(peer)
        if peer is not None and number is None:
            text = f"rank {peer} of the process group: {text}"
        return CommError(text, rank=caller.rank_of[self.rank], phase=phase, layer=caller.layer, peer=number)

    def _failed(self, caller: Caller, phase: str, header: Header) -> CommError:
        culprit = None if header.peer == UNKNOWN else header.peer
        return self.error(caller, phase, culprit, header.text)

    def lost(self, caller: Caller, phase: str, peer: int, problem: RuntimeError, *, late: bool = False) -> CommError:
        """Name the rank that caused the end of a wait, which need not be the one that was awaited."""
        gone = self._ended_processes(0.0 if late else CLOSING_S)
        if gone and not late:  # connections to the others are open
            return self.error(caller, phase, gone[0], self._ended(gone[0]))
        notices: dict[int, Header] = {}
        for each, receive in self._notices.items():  # not waited for: that would close the others
            with suppress(ValueError):
                notices[each] = Header.unpacked(receive.memory)
        # Else it died before its first header, and only its own connections have ended.
        if late or any(header.kind is Kind.WAITING for header in notices.values()):
            self.closed = self.closed or "connections of the group are closed, because a rank died or was late"
        if gone:
            return self.error(caller, phase, gone[0], self._ended(gone[0]))
        for header in notices.values():
            if header.kind is Kind.FAILED:
                return self._failed(caller, phase, header)
        awaited, asked = peer, set[int]()
        while peer not in asked and peer in notices:
            asked.add(peer)
            peer = notices[peer].peer
        if peer == self.rank and not late:
            waiting = sorted(caller.rank_of.get(each, each) for each in notices if notices[each].peer == peer)
            text = f"ranks {waiting} waited for this rank longer than kernel.timeout_s and closed the connections"
        elif late or notices:
            peer = awaited if peer == self.rank else peer  # both wait for each other
            text = f"sent nothing within {caller.timeout_s:g} s [{caller.limit}]; it is dead, stuck or late"
        else:
            text = f"its connection ended: {str(problem).splitlines()[0]}"
        return self.error(caller, phase, peer, text)

    def _ended(self, peer: int) -> str:
        return f"its process {self._processes[peer].process.number} has ended"

    def _ended_processes(self, patience_s: float = 0.0) -> list[int]:
        """Peers whose process has exited. patience_s: how long to wait for that, as sockets close shortly before."""
        until = now() + patience_s
        while True:
            known = [(peer, process) for peer, process in list(self._processes.items()) if peer not in self.left_out]
            gone = [peer for peer, process in known if process.is_gone()]
            if gone or now() >= until:
                return gone
            threading.Event().wait(PULSE_S / 5)

    # Recovery.

    def recover(self, caller: Caller, number: int, start_over: Callable[[], None]) -> Flight[int]:
        """Agree with all peers on an epoch in which nothing of earlier calls is received, and on who is left out.

        start_over: forgets these calls. Returns the largest number of all ranks.
        """
        if self._recovery is not None:  # an interrupt has ended the last call: its round, then one as of all others
            if not self._recovery.has_ended:
                yield from self._recover_once(caller, number, start_over)
            self.report(Failure("its recovery was interrupted", self.rank, here=True))
        return (yield from self._recover_once(caller, number, start_over))

    def _recover_once(self, caller: Caller, number: int, start_over: Callable[[], None]) -> Flight[int]:
        phase = "recovery"
        if self.closed:
            raise self.error(caller, phase, None, f"{self.closed}; build the layer over a new group")
        # Peers may come as late as their own timeout lets them notice the failure.
        caller = replace(caller, timeout_s=2 * caller.timeout_s + 1.0, limit="twice kernel.timeout_s and 1 s")
        recovery = self._recovery = self._recovery or Recovery(self.epoch)
        left_out = sum(1 << rank for rank in self.left_out)
        recovery.call(self._open_group(), self.peers, left_out, number, self.process)
        yield InFlight(phase)
        late_at = now() + caller.timeout_s
        theirs = [self._message_of(caller, phase, recovery, peer, late_at) for peer in self.peers]
        assert recovery.sends is not None  # nothing is sent later than what peers have answered
        for peer, work in zip(self.peers, recovery.sends.works, strict=True):
            if isinstance(work, RuntimeError):
                raise self.lost(caller, phase, peer, work) from work
        epoch = 1 + max([recovery.epoch, *(header.epoch for header in theirs)])
        if epoch == EPOCHS:
            text = f"the group has recovered {EPOCHS - 1} times, its messages cannot distinguish more epochs; "
            raise self.error(caller, phase, None, f"{text}build the layer over a new group")
        self.unfinished += [self.headers, self._notices, *self.posted]
        self._await_peers(epoch)
        self.posted.clear()
        self.epoch = epoch
        start_over()
        recovery.number = max([recovery.number, *(header.num_bytes for header in theirs)])
        recovery.has_ended = True
        return recovery.number

    def _message_of(self, caller: Caller, phase: str, recovery: Recovery, peer: int, late_at: float) -> Header:
        """The message of a peer that recovers and leaves out the same ranks."""
        while True:
            receive, post = recovery.receives[peer]
            receive.work, receive.has_come = post.works[0], receive.memory.startswith(MAGIC)
            header = self._read(caller, phase, peer, receive, late_at)
            if header.kind is Kind.FAILED:
                del recovery.receives[peer]
                if header.epoch >= recovery.epoch:
                    raise self._failed(caller, phase, header)
            elif header.count == recovery.left_out:
                return header
            elif header.count & ~recovery.left_out:
                bits = header.count, recovery.left_out
                lists = [[rank for rank in range(self.size) if each >> rank & 1] for each in bits]
                text = f"goes on without ranks {lists[0]} of the process group, this rank without {lists[1]}"
                raise self.error(caller, phase, peer, text)
            recovery.receives.pop(peer, None)  # of an earlier recovery, or from before it left out as many
            recovery.await_message(peer, self._open_group())

    # The thread that monitors long waits.

    def look(self) -> bool:
        """Check the wait in progress; returns whether there is one."""
        wait = self._wait
        if wait is None:
            return False
        if gone := self._ended_processes():
            if wait.ends_at is None:
                self.report(Failure(self._ended(gone[0]), gone[0]))
                wait.ends_at = now() + FORKED_S
            elif now() > wait.ends_at and wait.peer in gone and self._wait is wait:
                # Close all connections: whoever waits in the group goes on with an error. A peer that lives may come
                # late, and go on over them.
                memory = torch.empty(1, dtype=torch.uint8, device="cpu")
                with Suppress(RuntimeError):
                    self._open_group().recv([memory], self.peers[0], HANG_UP_TAG).wait(timedelta(milliseconds=1))
        elif now() > wait.late_at and not wait.noted:
            self._notify(Header(Kind.WAITING, self.epoch, 0, "", peer=wait.peer, process=self.process))
            wait.noted = True
        return True

    def park(self) -> threading.Event | None:
        """The event that is set when the next wait begins; None if one has begun."""
        self._awake.clear()
        return self._awake if self._wait is None else None


def watch(of: ref[Connections]) -> None:
    """Monitor waits in progress until the group is destroyed.

    An exception of a check, such as for lack of memory or descriptors, does not end the thread: nothing else detects
    before the timeout that a peer has died.
    """
    idle, pulse = 0, threading.Event()
    while (connections := of()) is not None:
        parked = None
        with suppress(Exception):
            idle = 0 if connections.look() else idle + 1
            parked = connections.park() if idle * PULSE_S > 1.0 else None
        del connections
        with suppress(Exception):
            (pulse if parked is None else parked).wait(PULSE_S if parked is None else PARKED_S)
