"""Messages between the ranks of a gloo group, each behind a header that states which call it belongs to.

gloo takes a shorter message for a longer one and ends the process for the opposite, so nothing of another call may ever
meet a receive of this one. Every message is announced by a header of fixed size, and carries its call number and size
in its tag:

    header    256 bytes, in order: epoch, call, layer, phase, a count, the bytes that follow, the sender's process;
              up to 64 KiB of rows come with it in one message, which gloo takes into a larger receive
              (`exchange_eager`: in memory of their own, of a number that the receiver learns from the header)
    rows      more than that: tag = epoch, call, size: rows of another call or size never match, whatever they are
    notice    256 bytes, out of order: a rank has failed, or has waited for a peer longer than its timeout

A header of another call, layer or phase ends the call on both sides.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.connections import Connections
from moe_mk.comm.failure import ANOTHER_THREAD, RECOVERED, Exclusive, GroupStatus
from moe_mk.comm.header import (
    ANY,
    EAGER_BYTES,
    HEADER_BYTES,
    HEADER_TAGS,
    TEXT_BYTES,
    UNKNOWN,
    Arrival,
    Caller,
    Envelope,
    Header,
    RowHeaders,
    as_bytes,
    bytes_of,
    message_memory,
    row_tag,
)  # fmt: skip
from moe_mk.errors import CommError, unless_signalled
from moe_mk.flight import Flight, InFlight
from moe_mk.process import FORKED, in_child
from moe_mk.trace.clock import now

LongRows = tuple[Literal["send", "recv"], int, Tensor]
"""Rows that follow their header, or where they go: the peer, and more than EAGER_BYTES."""
Works = list[tuple[int, dist.Work]]
"""What is under way, with the peer of each."""
SPARE_MESSAGES = 64
"""How many pieces of memory for messages are kept between calls: 4 MiB."""
KEPT_HEADERS = 64
"""More than a peer can have unread, which are those of its open calls."""


@dataclass(eq=False)
class GroupMessages:
    """All messages of this process over one process group, whichever layer they are of."""

    connections: Connections
    status: GroupStatus = field(default_factory=GroupStatus)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        """Held by the thread that is in a call over the group."""
        self._call = self._layers = 0
        self._open: dict[int, bool] = {}
        """Calls under way, and those whose flights were dropped (False): what peers send for these is discarded."""
        self._sent: dict[int, deque[dist.Work]] = {peer: deque() for peer in self.connections.peers}
        """Headers on their way to each peer, which end when nothing keeps them."""
        self._early: dict[tuple[int, int], Header] = {}
        """By peer and call: headers that came before they were awaited."""
        self._row_headers: dict[tuple[str, int], RowHeaders] = {}
        """By phase and layer number, in this epoch."""
        self._senders: dict[int, tuple[int, ...]] = {}
        """What headers of each peer stated last of its process."""
        self._spare: list[tuple[bytearray, Tensor]] = []
        """Memory for messages to come."""
        in_child(self, GroupMessages._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: connections are the parent's, and so is the lock that one of its threads may hold."""
        self.connections.closed = FORKED
        self.lock = threading.RLock()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> GroupMessages:
        """The messages of a group, made when first requested: layers, whoever built them, share its connections."""
        with _making:
            if group not in _of_group:
                _of_group[group] = cls(Connections(ref(group), dist.get_rank(group), dist.get_world_size(group)))
            return _of_group[group]

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
        call, epoch = posted[0], self.connections.epoch
        try:
            yield InFlight(phase)
            if epoch != self.connections.epoch:
                rank = caller.rank_of[self.connections.rank]
                raise CommError(RECOVERED, rank=rank, phase=phase, layer=caller.layer, on_all_ranks=True)
            arrived = self._finish_call(caller, phase, posted, outgoing, awaited)
        except BaseException as error:
            self.connections.unfinished += [outgoing, long, posted]
            if epoch == self.connections.epoch and not isinstance(error, GeneratorExit):
                del self._open[call]
            elif epoch == self.connections.epoch:  # dropped: peers may still send for it
                self._open[call] = False
                for peer in self.connections.peers:
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
            self.connections.unfinished.append(outgoing)
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

    def recover(self, caller: Caller, number: int) -> Flight[int]:
        """Agree with all peers to receive nothing of earlier calls; returns the largest number of all ranks."""
        return self.connections.recover(caller, number, self._start_over)

    def _start_over(self) -> None:
        """Forget the calls of earlier epochs."""
        self.connections.unfinished.append(self._sent)
        self._sent = {peer: deque() for peer in self.connections.peers}
        self._call = self._layers = 0
        self._early.clear()
        self._open.clear()
        self._row_headers.clear()
        self._spare.clear()

    # One call.

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
        connections = self.connections
        if connections.closed:
            raise connections.error(caller, phase, None, connections.closed)
        with Exclusive(self.lock, partial(self.connections.error, caller, phase, None, ANOTHER_THREAD)):
            if connections.watcher is None:
                connections.stand_by()
            connections.posted.clear()  # kept by what waits for them
            self._call += 1
            call, tag, works, peer = self._call, HEADER_TAGS + connections.epoch, Works(), UNKNOWN
            headers = self._row_headers.get(key := (phase, caller.layer_number))
            if headers is None:
                own = connections.process
                who = own.number, int(own.started), own.namespace, connections.host
                headers = RowHeaders(connections.epoch, phase.encode()[:TEXT_BYTES], caller.layer_number, who)
                self._row_headers[key] = headers
            try:
                for how, peer, rows in long:  # first: whoever has the header waits for the rows
                    works.append((peer, connections.post(how, rows, peer, row_tag(connections.epoch, call, rows))))
                for peer, envelope in outgoing.items():
                    headers.write(envelope, call, awaited[peer])
                    self._sent[peer].append(connections.post("send", envelope.message(), peer, tag))
            except unless_signalled(RuntimeError) as problem:
                connections.unfinished += [outgoing, long, works]
                raise connections.lost(caller, phase, peer, problem) from problem
            self._open[call] = True
            connections.await_more()
        return call, headers, works

    def _header_of_call(
        self, caller: Caller, phase: str, call: int, peer: int, awaited_bytes: int, expected_bytes: int, late_at: float
    ) -> Header:
        """Wait for a peer's header of a call. Raises CommError for one of another call, or of other sizes."""
        header = self._early.pop((peer, call), None) or self.connections.next_header(caller, phase, peer, late_at)
        while header.call != call and header.call in self._open:  # of a flight that lands later, or was dropped
            if self._open[header.call]:
                self._early[peer, header.call] = header
            header = self.connections.next_header(caller, phase, peer, late_at)
        fits = awaited_bytes == ANY and 0 <= header.num_bytes <= EAGER_BYTES
        theirs = (header.call, header.text, header.layer, ANY if fits else header.num_bytes, header.expected_bytes)
        ours = (call, phase, caller.layer_number, awaited_bytes, expected_bytes)
        if theirs != ours:
            text = f"is in {_call_of(*theirs)}; this rank is in {_call_of(*ours)}; all ranks must make the same calls"
            raise self.connections.error(caller, phase, peer, text)
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
        with Exclusive(self.lock, partial(self.connections.error, caller, phase, None, ANOTHER_THREAD)):
            late_at = now() + caller.timeout_s
            arrived = {
                peer: self._take(caller, phase, call, peer, headers, envelope.num_bytes, awaited[peer], late_at)
                for peer, envelope in outgoing.items()
            }
            late_at = now() + caller.timeout_s
            for peer, work in works:
                self.connections.finish(caller, phase, peer, work, late_at)
            for peer in outgoing:
                self._forget_sent(caller, phase, peer, late_at)
        return arrived

    def _take(
        self, caller: Caller, phase: str, call: int, peer: int, headers: RowHeaders, sent_bytes: int, awaited: int,
        late_at: float,
    ) -> Arrival:  # fmt: skip
        """Wait for a peer's header of a call and its rows, which stay in the memory of their message."""
        expected = ANY if awaited == ANY else sent_bytes
        if (peer, call) not in self._early:
            receive = self.connections.headers[peer][0]
            if not receive.has_come:
                self.connections.finish(caller, phase, peer, receive.work, late_at)
                receive.has_come = True
            found = headers.read(receive.memory, call, expected, awaited)
            if found is not None:
                count, num_bytes, sender = found
                if self._senders.get(peer) != sender:
                    self._senders[peer] = sender
                    self.connections.note_process(peer, Header.unpacked(receive.memory))
                arrived = Arrival(count, num_bytes, receive.tensor, receive.memory)
                receive.memory, receive.tensor = self._spare.pop() if self._spare else message_memory()
                self.connections.await_next(peer)
                return arrived
        header = self._header_of_call(caller, phase, call, peer, awaited, expected, late_at)
        memory = bytearray(HEADER_BYTES) + header.rows
        return Arrival(header.count, len(header.rows), torch.frombuffer(memory, dtype=torch.uint8), memory)

    def _forget_sent(self, caller: Caller, phase: str, peer: int, late_at: float) -> None:
        """Let go of headers that a peer has read long ago.

        Later ones are not waited for: a peer with several calls open that fails in one reads none of another.
        """
        sent = self._sent[peer]
        if len(sent) <= 2 * KEPT_HEADERS:
            return
        # They are read in order: where the last of them is, all are.
        self.connections.finish(caller, phase, peer, sent[KEPT_HEADERS - 1], late_at)
        for _ in range(KEPT_HEADERS):
            sent.popleft()


def _call_of(call: int, phase: str, layer: int, num_bytes: int, expected_bytes: int) -> str:
    """The call that a header belongs to, for an error."""
    of = f" of layer number {layer}" if layer else ""
    ways = ["any number of" if each == ANY else str(each) for each in (num_bytes, expected_bytes)]
    return f"call {call}, phase {phase!r}{of}, with {ways[0]} bytes one way and {ways[1]} the other"


# Connections belong to the process group, whoever builds layers over it; so does what is under way over them.
_of_group: WeakKeyDictionary[dist.ProcessGroup, GroupMessages] = WeakKeyDictionary()
_making = threading.Lock()
