"""Messages between the ranks of a gloo group, each behind a header that states which call it belongs to.

gloo takes a shorter message for a longer one and ends the process for the opposite, so nothing of another call may ever
meet a receive of this one. Every message is announced by a header of fixed size, and carries its call number and size
in its tag:

    header    256 bytes, in order: epoch, call, layer, phase, a count, the bytes that follow, the sender's process;
              up to 64 KiB of rows come with it in one message, which gloo takes into a larger receive
              (`exchange_eager`: in memory of their own, of a number that the receiver learns from the header)
    rows      more than that: tag = epoch, call, size: rows of another call or size never match, whatever they are
    notice    256 bytes, out of order: a rank has failed, or has waited for a peer longer than its timeout

A header of another call, layer or phase ends the call on both sides. Receives of headers and one of a notice stand at
every peer at all times, so that a failing rank's report gets through while its peers compute. In small groups several
receives of headers stand at each peer and are posted again together: each is a write to a socket, during which gloo's
thread cannot take what arrives over the connection and polls for it.

gloo closes all connections of a group when a wait times out, and peers would blame the rank that closed first. So a
thread observes long waits: it detects peer processes on this host that have ended, and sends every peer the rank that
is awaited before connections close. The rank that errors name is the end of that chain: one that waits for no other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.failure import PULSE_S, RECOVERED, Exclusive, Failure, GroupStatus, Watched, watch
from moe_mk.comm.header import (
    ANY,
    EAGER_BYTES,
    EPOCHS,
    HANG_UP_TAG,
    HEADER_BYTES,
    HEADER_TAGS,
    MAGIC,
    NOTICE_TAGS,
    RECOVERY_TAG,
    TEXT_BYTES,
    UNKNOWN,
    Arrival,
    Caller,
    Envelope,
    Header,
    Kind,
    LongRows,
    Posts,
    Receive,
    Recovery,
    RowHeaders,
    Works,
    as_bytes,
    bytes_of,
    described,
    host_number,
    message_memory,
    row_tag,
)  # fmt: skip
from moe_mk.errors import CommError, Suppress, unless_signalled
from moe_mk.flight import Flight, InFlight
from moe_mk.process import FORKED, Process, WatchedProcess, in_child
from moe_mk.trace.clock import now

GRACE_S = 0.3
"""How long after its timeout a rank waits for peers to say for whom they wait."""
FORKED_S = 1.0
"""How long a wait for a process that has ended may go on: its connections may be open in a child of it."""
MOST_RECEIVES = 8
"""How many receives of headers stand at each peer, in groups of up to 8 ranks; fewer in larger ones: 66 kB each."""
LEAST_RECEIVES = 2
"""How many of these stand there at least."""
SPARE_MESSAGES = 64
"""How many pieces of memory for messages are kept between calls: 4 MiB."""
KEPT_HEADERS = 64
"""More than a peer can have unread, which are those of its open calls."""
CLOSING_S = 0.5
"""How long a process may take to end after its connections have."""


@dataclass
class _Wait:
    """A wait that goes on, as the thread sees it that looks after it."""

    peer: int
    late_at: float
    noted: bool = False
    ends_at: float | None = None
    """When connections are closed because a process has ended that the wait may never hear of."""


@dataclass(eq=False)
class GroupMessages(Watched):
    """All messages of this process over one process group, whichever layer they are of."""

    _group: ref[dist.ProcessGroup]
    rank: int
    size: int
    status: GroupStatus = field(default_factory=GroupStatus)

    def __post_init__(self) -> None:
        self.left_out: set[int] = set()
        """Ranks that the others go on without."""
        self.closed = ""
        """Why no message can be sent any more; empty while connections stand."""
        self.lock = threading.RLock()
        """Held by the thread that is in a call over the group."""
        self._process, self._host = Process.this(), host_number()
        self._processes: dict[int, WatchedProcess] = {}
        """Of peers on this host."""
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._epoch = self._call = self._layers = 0
        self._open: dict[int, bool] = {}
        """Calls under way, and those whose flights were dropped (False): what peers send for these is discarded."""
        self._sent: dict[int, deque[dist.Work]] = {peer: deque() for peer in self._peers}
        """Headers on their way to each peer, which end when nothing keeps them."""
        self._early: dict[tuple[int, int], Header] = {}
        """By peer and call: headers that came before they were awaited."""
        self._unfinished: list[object] = []
        """Works and tensors of calls that failed: gloo may still read or write them."""
        self._posted: list[dist.Work] = []
        """Messages of the last call, see `_post_message`."""
        self._row_headers: dict[tuple[str, int], RowHeaders] = {}
        """By phase and layer number, in this epoch."""
        self._senders: dict[int, tuple[int, ...]] = {}
        """What headers of each peer stated last of its process."""
        self._spare: list[tuple[bytearray, Tensor]] = []
        """Memory for messages to come."""
        self._headers: dict[int, deque[Receive]] = {}
        """Those that stand at each peer, in order."""
        self._read_headers: dict[int, list[Receive]] = {peer: [] for peer in self._peers}
        """Those that have come and are to be posted again."""
        self._depth = max(2, min(MOST_RECEIVES, MOST_RECEIVES * 8 // self.size))
        self._notices: dict[int, Receive] = {}
        self._standing: tuple[int, list[Receive], Posts] | None = None
        """Receives of headers and notices as they were posted first in an epoch."""
        self._recovery: Recovery | None = None
        """The one that goes on, or the last one."""
        self._wait: _Wait | None = None
        self._awake = threading.Event()
        self._watcher: threading.Thread | None = None
        """Looks after long waits; None until the system has given a thread."""
        in_child(self, GroupMessages._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: connections are the parent's, and so is the lock that one of its threads may hold."""
        self.closed = FORKED
        self.lock = threading.RLock()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> GroupMessages:
        """The messages of a group, made when first requested: layers, whoever built them, share its connections."""
        with _making:
            messages = _of_group.get(group)
            if messages is None:
                messages = _of_group[group] = cls(ref(group), dist.get_rank(group), dist.get_world_size(group))
        return messages

    def next_layer(self) -> int:
        """A number for one more layer."""
        self._layers += 1
        return self._layers

    def exchange(
        self,
        caller: Caller,
        phase: str,
        counts: Mapping[int, int],
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor | None],
    ) -> Flight[dict[int, int]]:
        """Send a count and rows to some peers, and receive from some; returns the counts by peer.

        counts: for whom a message is. outgoing: the rows of those that get any, dense, on the host, never empty.
        incoming: from whom one is awaited, and where its rows go, None for a count alone. Headers go both ways where
        anything goes either way, so that both sides learn of a call that differs or has failed.
        Raises CommError, after which the group is to be aborted.
        """
        peers = counts.keys() | incoming.keys()
        envelopes = {peer: Envelope.of(outgoing.get(peer), counts.get(peer, 0)) for peer in peers}
        awaited = {peer: bytes_of(incoming.get(peer)) for peer in peers}
        places = [(peer, rows) for peer, rows in incoming.items() if rows is not None]
        long: list[LongRows] = [("recv", *each) for each in places if bytes_of(each[1]) > EAGER_BYTES]
        long += [("send", *each) for each in outgoing.items() if bytes_of(each[1]) > EAGER_BYTES]
        arrived = yield from self.exchange_eager(caller, phase, envelopes, awaited, long)
        for peer, rows in places:
            if arrived[peer].num_bytes:
                as_bytes(rows).copy_(arrived[peer].rows)
        self.give_back(arrived.values())
        return {peer: arrival.num_rows for peer, arrival in arrived.items()}

    def exchange_eager(
        self,
        caller: Caller,
        phase: str,
        outgoing: Mapping[int, Envelope],
        awaited: Mapping[int, int],
        long: Sequence[LongRows] = (),
    ) -> Flight[dict[int, Arrival]]:
        """`exchange` of rows that come with their headers; returns those of each peer in `outgoing`.

        awaited: bytes from each of these peers, or ANY: it may send any number of rows up to EAGER_BYTES, which awaits
        ANY from this rank too. Wherever no side uses ANY, a peer may call `exchange` with the same sizes.
        long: rows of which the envelope is the header alone, and where such rows go.
        """
        posted = self._post(caller, phase, outgoing, awaited, long)
        call, epoch = posted[0], self._epoch
        try:
            yield InFlight(phase)
            if epoch != self._epoch:
                rank = caller.rank_of[self.rank]
                raise CommError(RECOVERED, rank=rank, phase=phase, layer=caller.layer, on_all_ranks=True)
            arrived = self._finish_call(caller, phase, posted, outgoing, awaited)
        except BaseException as error:
            self._unfinished += [outgoing, long, posted]
            if epoch == self._epoch and not isinstance(error, GeneratorExit):
                del self._open[call]
            elif epoch == self._epoch:  # dropped: peers may still send for it
                self._open[call] = False
                for peer in self._peers:
                    self._early.pop((peer, call), None)
            raise
        del self._open[call]
        return arrived

    def exchange_now(
        self,
        caller: Caller,
        phase: str,
        outgoing: Mapping[int, Envelope],
        awaited: Mapping[int, int],
        meanwhile: Callable[[], None] | None,
    ) -> dict[int, Arrival]:
        """`exchange_eager` from beginning to end. meanwhile: called while messages are on their way."""
        posted = self._post(caller, phase, outgoing, awaited)
        try:
            if meanwhile is not None:
                meanwhile()
            return self._finish_call(caller, phase, posted, outgoing, awaited)
        except BaseException:
            self._unfinished.append(outgoing)
            raise
        finally:
            self._open.pop(posted[0], None)

    def skip_call(self) -> None:
        """Count a call in which this rank exchanges nothing while others may."""
        self._call += 1

    def give_back(self, arrivals: Iterable[Arrival]) -> None:
        """Use the memory of rows again that nothing reads any more."""
        for arrival in arrivals:
            if len(arrival.memory) == HEADER_BYTES + EAGER_BYTES and len(self._spare) < SPARE_MESSAGES:
                self._spare.append((arrival.memory, arrival.tensor))

    def report(self, failure: Failure) -> None:
        """Send a failure to all peers, as far as connections stand. Never raises, never waits."""
        culprit = UNKNOWN if failure.culprit is None else failure.culprit
        if self._recovery is not None and self._recovery.has_ended:
            self._unfinished.append(self._recovery)
            self._recovery = None
        self._notify(Header(Kind.FAILED, self._epoch, 0, failure.report, peer=culprit, process=self._process))

    def report_recovery(self, text: str) -> None:
        """End what peers wait for since the recovery of this rank was interrupted: theirs, or the call after it."""
        recovery = self._recovery = self._recovery or Recovery(self._epoch)
        header = Header(Kind.FAILED, max(self._epoch, recovery.epoch + recovery.is_sent), 0, text, peer=self.rank)
        self._notify(header, [] if recovery.is_sent else [RECOVERY_TAG])

    def leave_out(self, ranks: Collection[int]) -> None:
        """Speak to these ranks no more. The others do the same and recover together."""
        self.left_out |= set(ranks)
        self._peers = [peer for peer in self._peers if peer not in self.left_out]

    def recover(self, caller: Caller, number: int) -> Flight[int]:
        """Agree with all peers on an epoch in which nothing of earlier calls is received, and on who is left out.

        Returns the largest number of all ranks.
        """
        if self._recovery is not None:  # an interrupt has ended the last call: its round, then one as of all others
            if not self._recovery.has_ended:
                yield from self._recover_once(caller, number)
            self.report(Failure("its recovery was interrupted", self.rank, here=True))
        return (yield from self._recover_once(caller, number))

    def _recover_once(self, caller: Caller, number: int) -> Flight[int]:
        phase = "recovery"
        if self.closed:
            raise self._error(caller, phase, None, f"{self.closed}; build the layer over a new group")
        # Peers may come as late as their own timeout lets them notice the failure.
        caller = replace(caller, timeout_s=2 * caller.timeout_s + 1.0, limit="twice kernel.timeout_s and 1 s")
        recovery = self._recovery = self._recovery or Recovery(self._epoch)
        left_out = sum(1 << rank for rank in self.left_out)
        recovery.call(self._open_group(), self._peers, left_out, number, self._process)
        yield InFlight(phase)
        theirs = [self._message_of(caller, phase, recovery, peer) for peer in self._peers]
        assert recovery.sends is not None  # nothing is sent later than what peers have answered
        for peer, work in zip(self._peers, recovery.sends.works, strict=True):
            if isinstance(work, RuntimeError):
                raise self._lost(caller, phase, peer, work) from work
        epoch = 1 + max([recovery.epoch, *(header.epoch for header in theirs)])
        if epoch == EPOCHS:
            text = f"the group has recovered {EPOCHS - 1} times, its messages cannot distinguish more epochs; "
            raise self._error(caller, phase, None, f"{text}build the layer over a new group")
        self._unfinished += [self._headers, self._notices, self._sent, *self._posted]
        self._await_peers(epoch)
        self._posted.clear()
        self._sent = {peer: deque() for peer in self._peers}
        self._epoch, self._call, self._layers = epoch, 0, 0
        self._early.clear()
        self._open.clear()
        self._row_headers.clear()
        self._spare.clear()
        recovery.number = max([recovery.number, *(header.num_bytes for header in theirs)])
        recovery.has_ended = True
        return recovery.number

    def _message_of(self, caller: Caller, phase: str, recovery: Recovery, peer: int) -> Header:
        """The message of a peer that recovers and leaves out the same ranks."""
        while True:
            receive, post = recovery.receives[peer]
            receive.work, receive.has_come = post.works[0], receive.memory.startswith(MAGIC)
            header = self._read(caller, phase, peer, receive)
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
                raise self._error(caller, phase, peer, text)
            recovery.receives.pop(peer, None)  # of an earlier recovery, or from before it left out as many
            recovery.await_message(peer, self._open_group())

    # One call.

    def _exclusive(self, caller: Caller, phase: str) -> Exclusive:
        return Exclusive(self.lock, partial(self._error, caller, phase, None))

    def _post(
        self,
        caller: Caller,
        phase: str,
        outgoing: Mapping[int, Envelope],
        awaited: Mapping[int, int],
        long: Sequence[LongRows] = (),
    ) -> tuple[int, RowHeaders, Works]:
        """Send headers with their rows, by one thread at a time.

        Returns the number of the call, what headers of it are like, and the works of rows that are long.
        """
        if self.closed:
            raise self._error(caller, phase, None, self.closed)
        with self._exclusive(caller, phase):
            if self._watcher is None:
                self._stand_by()
            self._posted.clear()  # kept by what waits for them
            self._call += 1
            call, tag, works, peer = self._call, HEADER_TAGS + self._epoch, Works(), UNKNOWN
            headers = self._row_headers.get(key := (phase, caller.layer_number))
            if headers is None:
                own = self._process
                who = own.number, int(own.started), own.namespace, self._host
                headers = RowHeaders(self._epoch, phase.encode()[:TEXT_BYTES], caller.layer_number, who)
                self._row_headers[key] = headers
            try:
                for how, peer, rows in long:  # first: whoever has the header waits for the rows
                    works.append((peer, self._post_message(how, rows, peer, row_tag(self._epoch, call, rows))))
                for peer, envelope in outgoing.items():
                    headers.write(envelope, call, awaited[peer])
                    self._sent[peer].append(self._post_message("send", envelope.message(), peer, tag))
            except unless_signalled(RuntimeError) as problem:
                self._unfinished += [outgoing, long, works]
                raise self._lost(caller, phase, peer, problem) from problem
            self._open[call] = True
            for peer, read in self._read_headers.items():
                if len(read) >= self._depth // 2 and peer not in self.left_out:
                    self._await_headers(peer)
        return call, headers, works

    def _header_of_call(
        self, caller: Caller, phase: str, call: int, peer: int, awaited_bytes: int, expected_bytes: int
    ) -> Header:
        """Wait for a peer's header of a call. Raises CommError for one of another call, or of other sizes."""
        header = self._early.pop((peer, call), None) or self._next_header(caller, phase, peer)
        while header.call != call and header.call in self._open:  # of a flight that lands later, or was dropped
            if self._open[header.call]:
                self._early[peer, header.call] = header
            header = self._next_header(caller, phase, peer)
        fits = awaited_bytes == ANY and 0 <= header.num_bytes <= EAGER_BYTES
        theirs = (header.call, header.text, header.layer, ANY if fits else header.num_bytes, header.expected_bytes)
        ours = (call, phase, caller.layer_number, awaited_bytes, expected_bytes)
        if theirs != ours:
            text = f"is in {described(*theirs)}; this rank is in {described(*ours)}; all ranks must make the same calls"
            raise self._error(caller, phase, peer, text)
        return header

    def _finish_call(
        self,
        caller: Caller,
        phase: str,
        posted: tuple[int, RowHeaders, Works],
        outgoing: Mapping[int, Envelope],
        awaited: Mapping[int, int],
    ) -> dict[int, Arrival]:
        call, headers, works = posted
        with self._exclusive(caller, phase):
            arrived = {
                peer: self._take(caller, phase, call, peer, headers, envelope.num_bytes, awaited[peer])
                for peer, envelope in outgoing.items()
            }
            self._finish_all(caller, phase, works)
            for peer in outgoing:
                self._forget_sent(caller, phase, peer)
        return arrived

    def _take(
        self, caller: Caller, phase: str, call: int, peer: int, headers: RowHeaders, sent_bytes: int, awaited: int
    ) -> Arrival:
        """Wait for a peer's header of a call and its rows, which stay in the memory of their message."""
        expected = ANY if awaited == ANY else sent_bytes
        if (peer, call) not in self._early:
            receive = self._headers[peer][0]
            if not receive.has_come:
                self._finish(caller, phase, peer, receive.work)
                receive.has_come = True
            found = headers.read(receive.memory, call, expected, awaited)
            if found is not None:
                count, num_bytes, sender = found
                if self._senders.get(peer) != sender:
                    self._senders[peer] = sender
                    self._note_process(peer, Header.unpacked(receive.memory))
                arrived = Arrival(count, num_bytes, receive.tensor, receive.memory)
                receive.memory, receive.tensor = self._spare.pop() if self._spare else message_memory()
                self._await_next(peer)
                return arrived
        header = self._header_of_call(caller, phase, call, peer, awaited, expected)
        memory = bytearray(HEADER_BYTES) + header.rows
        return Arrival(header.count, len(header.rows), torch.frombuffer(memory, dtype=torch.uint8), memory)

    def _await_next(self, peer: int) -> None:
        """The first header of a peer was read: another one is awaited at the next call, behind those that are awaited.

        Several are posted at a time, after the messages of a call: peers compute with these, and not with receives. At
        least one is awaited at all times.
        """
        read, awaited = self._read_headers[peer], self._headers[peer]
        read.append(awaited.popleft())
        if len(awaited) < LEAST_RECEIVES:
            self._await_headers(peer)

    def _await_headers(self, peer: int) -> None:
        read, awaited = self._read_headers[peer], self._headers[peer]
        while read:
            receive = read.pop()
            receive.has_come = False
            receive.work = self._receive_into(receive.tensor, peer, HEADER_TAGS + self._epoch)
            awaited.append(receive)

    def _note_process(self, peer: int, header: Header) -> None:
        """Keep the process of a peer on this host, whose end is looked for in long waits."""
        if header.process is not None and header.host == self._host != 0:
            self._processes[peer] = WatchedProcess.of(header.process, self._process)

    def _forget_sent(self, caller: Caller, phase: str, peer: int) -> None:
        """Let go of headers that a peer has read long ago.

        Later ones are not waited for: a peer with several calls open that fails in one reads none of another.
        """
        sent = self._sent[peer]
        if len(sent) <= 2 * KEPT_HEADERS:
            return
        # They are read in order: where the last of them is, all are.
        self._finish(caller, phase, peer, sent[KEPT_HEADERS - 1])
        for _ in range(KEPT_HEADERS):
            sent.popleft()

    def _next_header(self, caller: Caller, phase: str, peer: int) -> Header:
        header = self._read(caller, phase, peer, self._headers[peer][0])
        self._await_next(peer)
        self._note_process(peer, header)
        if header.kind is Kind.FAILED:
            raise self._failed(caller, phase, header)
        return header

    def _read(self, caller: Caller, phase: str, peer: int, receive: Receive) -> Header:
        if not receive.has_come:
            self._finish(caller, phase, peer, receive.work)
            receive.has_come = True
        try:
            return Header.unpacked(receive.memory)
        except ValueError as problem:
            raise self._error(caller, phase, peer, str(problem)) from problem

    def _finish_all(self, caller: Caller, phase: str, works: Iterable[tuple[int, dist.Work]]) -> None:
        for peer, work in works:
            self._finish(caller, phase, peer, work)

    def _finish(self, caller: Caller, phase: str, peer: int, work: dist.Work | RuntimeError) -> None:
        if isinstance(work, RuntimeError):
            raise self._lost(caller, phase, peer, work) from work
        self._wait = wait = _Wait(peer, now() + caller.timeout_s)
        if not self._awake.is_set():
            self._awake.set()
        try:
            work.wait(timedelta(seconds=caller.timeout_s + GRACE_S))
        except unless_signalled(RuntimeError) as problem:
            raise self._lost(caller, phase, peer, problem, late=now() > wait.late_at) from problem
        finally:
            self._wait = None

    def _failed(self, caller: Caller, phase: str, header: Header) -> CommError:
        culprit = None if header.peer == UNKNOWN else header.peer
        return self._error(caller, phase, culprit, header.text)

    def _error(self, caller: Caller, phase: str, peer: int | None, text: str) -> CommError:
        number = None if peer is None else caller.rank_of.get(peer)
        if peer is not None and number is None:
            text = f"rank {peer} of the process group: {text}"
        return CommError(text, rank=caller.rank_of[self.rank], phase=phase, layer=caller.layer, peer=number)

    # Whoever is to blame when connections end.

    def _lost(self, caller: Caller, phase: str, peer: int, problem: RuntimeError, *, late: bool = False) -> CommError:
        """Name the rank that caused the end of a wait, which need not be the one that was awaited."""
        gone = self._ended_processes(0.0 if late else CLOSING_S)
        if gone and not late:  # the connections of the others stand
            return self._error(caller, phase, gone[0], self._ended(gone[0]))
        notices: dict[int, Header] = {}
        for each, receive in self._notices.items():  # not waited for: that would close the others
            with suppress(ValueError):
                notices[each] = Header.unpacked(receive.memory)
        # Else it died before its first header, and only its own connections have ended.
        if late or any(header.kind is Kind.WAITING for header in notices.values()):
            self.closed = self.closed or "connections of the group are closed, because a rank died or was late"
        if gone:
            return self._error(caller, phase, gone[0], self._ended(gone[0]))
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
        return self._error(caller, phase, peer, text)

    def _ended(self, peer: int) -> str:
        return f"its process {self._processes[peer].process.number} has ended"

    def _ended_processes(self, patience_s: float = 0.0) -> list[int]:
        """Peers whose process has ended. patience_s: a process loses its connections a moment before it ends."""
        until = now() + patience_s
        while True:
            known = [(peer, process) for peer, process in list(self._processes.items()) if peer not in self.left_out]
            gone = [peer for peer, process in known if process.is_gone()]
            if gone or now() >= until:
                return gone
            threading.Event().wait(PULSE_S / 5)

    # What stands at every peer.

    def _open_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def _post_message(self, how: Literal["send", "recv"], message: Tensor, peer: int, tag: int) -> dist.Work:
        """Post a message and keep it, in one step of the interpreter.

        gloo never gets past a message whose memory has gone: nothing else would ever arrive over its connection. An
        interrupt between two steps must not let go of one, so `map` calls gloo while `extend` keeps what it returns.
        """
        self._posted.extend(map(getattr(self._open_group(), how), ([message],), (peer,), (tag,)))
        return self._posted[-1]

    def _receive_into(self, tensor: Tensor, peer: int, tag: int) -> dist.Work | RuntimeError:
        """Await a message; an error is kept for whoever waits for it, because some messages are never needed."""
        try:
            return self._post_message("recv", tensor, peer, tag)
        except unless_signalled(RuntimeError) as problem:
            return problem

    def _stand_by(self) -> None:
        """Await messages of every peer, and start the thread; while the system has none, calls go on without it."""
        if not self._headers:
            self._await_peers(self._epoch)
        watcher = threading.Thread(target=watch, args=(ref(self),), name="moe-mk group watch", daemon=True)
        with Suppress(RuntimeError, MemoryError):
            watcher.start()
            self._watcher = watcher

    def _await_peers(self, epoch: int) -> None:
        """Await headers and a notice of every peer in an epoch."""
        largest = HEADER_BYTES + EAGER_BYTES
        if self._standing is None or self._standing[0] != epoch:
            receives = [
                Receive.of(peer, HEADER_TAGS + epoch, largest) for peer in self._peers for _ in range(self._depth)
            ]
            receives += [Receive.of(peer, NOTICE_TAGS + epoch) for peer in self._peers]
            self._standing = epoch, receives, Posts([(each.peer, each.tag, each.tensor) for each in receives])
        _, receives, posts = self._standing
        posts.post(self._open_group().recv)
        for receive, work in zip(receives, posts.works, strict=True):
            receive.work = work
        count = self._depth * len(self._peers)
        self._read_headers = {peer: [] for peer in self._peers}
        self._notices = {receive.peer: receive for receive in receives[count:]}
        self._headers = {
            peer: deque(receive for receive in receives[:count] if receive.peer == peer) for peer in self._peers
        }

    def _notify(self, header: Header, tags: Sequence[int] = ()) -> None:
        """Send a notice to all peers, to where headers are awaited too if it is to end their calls."""
        tags = tags or [NOTICE_TAGS + header.epoch] + [HEADER_TAGS + header.epoch] * (header.kind is Kind.FAILED)
        for peer in [] if self.closed else self._peers:
            for tag in tags:
                with Suppress(RuntimeError, MemoryError):
                    send = self._open_group().send
                    self._unfinished.extend(map(send, ([header.message()],), (peer,), (tag,)))

    # The thread that looks after long waits.

    def look(self) -> bool:
        """Look after the wait that goes on; returns whether there is one."""
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
                    self._open_group().recv([memory], self._peers[0], HANG_UP_TAG).wait(timedelta(milliseconds=1))
        elif now() > wait.late_at and not wait.noted:
            self._notify(Header(Kind.WAITING, self._epoch, 0, "", peer=wait.peer, process=self._process))
            wait.noted = True
        return True

    def park(self) -> threading.Event | None:
        """The event that is set when the next wait begins; None if one has begun."""
        self._awake.clear()
        return self._awake if self._wait is None else None


# Connections belong to the process group, whoever builds layers over it; so does what is under way over them.
_of_group: WeakKeyDictionary[dist.ProcessGroup, GroupMessages] = WeakKeyDictionary()
_making = threading.Lock()
