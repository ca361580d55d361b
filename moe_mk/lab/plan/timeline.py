"""When the messages of an algorithm move: a discrete-event simulation of links over what ranks have recorded.

A recording is the program of every rank: messages that it posts, and messages that it waits for. `simulate` gives each
message its times under simulated links. Nothing is read from a clock: equal recordings give equal timelines.

    posted    the rank has reached the post, and the device or proxy has done so: `message_us`, one after the other
    begins    the earlier messages of this rank to that one have ended: a queue pair for each peer
    ends      bytes at the share of the messages that are under way: a port, each way, divides its rate evenly
    arrives   one latency later; messages between two ranks arrive in the order in which they were posted

The program of a rank does not depend on times: an algorithm that chooses by who comes first is not simulated. Times of
copies and kernels inside a rank are not part of it, except for work that the caller adds.

`moe_mk.lab.testing.virtual_time` records the transports of this library.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any

from moe_mk.comm.traffic import INTER_NODE, INTRA_NODE, Nodes
from moe_mk.config.device import BYTES_PER_US
from moe_mk.errors import ConfigError
from moe_mk.lab.plan.paths import FITTED, NEAR_US
from moe_mk.registry import did_you_mean


@dataclass(frozen=True)
class SimulatedLink:
    """One kind of link between two ranks."""

    name: str
    gbs: float
    """Of a port, each way."""
    latency_us: float
    message_us: float
    """Cost of posting one message, one after the other."""
    source: str

    def __post_init__(self) -> None:
        if self.gbs <= 0 or min(self.latency_us, self.message_us) < 0:
            raise ConfigError(f"link {self.name}: gbs must be above 0 and times at least 0: {self}")

    def us(self, num_bytes: int) -> float:
        """Time of bytes on the port."""
        return num_bytes / (self.gbs * BYTES_PER_US)


LINKS: Mapping[str, SimulatedLink] = MappingProxyType(
    {
        link.name: link
        for link in (
            SimulatedLink(
                "nvlink", 450.0, 1.0, NEAR_US,
                "NVLink 4: 450 GB/s one way (H100 data sheet); a message by the fit to pplx-kernels; latency assumed",
            ),
            SimulatedLink(
                "ibgda", 50.0, 2.0, FITTED["gpu"].message,
                "400 Gb/s; a message from the GPU by the fit to pplx-kernels (`plan.paths`), latency assumed",
            ),
            SimulatedLink(
                "ibrc", 50.0, 4.0, FITTED["cpu_proxy"].message,
                "400 Gb/s; a message through a CPU proxy by the same fit, latency assumed: twice that of ibgda for the "
                "way to the proxy and back",
            ),
            SimulatedLink(
                "efa", 50.0, 15.0, FITTED["cpu_proxy"].message,
                "one adapter of 400 Gb/s; posted by a CPU proxy as ibrc, latency assumed",
            ),
            SimulatedLink(
                "ascend_hccs", 200.7, 0.0, 0.0,
                "the rate inside a server that the worked example of CANN implies, no fixed costs",
            ),
            SimulatedLink(
                "ascend_rdma", 20.98, 0.0, 0.0,
                "the rate between servers that the worked example of CANN implies, no fixed costs",
            ),
        )
    }
)  # fmt: skip
"""Links by name. Rates are of one direction of one rank; every latency is an input to choose, not a measurement."""


def simulated_link(name: str) -> SimulatedLink:
    """A link by name; raises ConfigError for an unknown one."""
    if name not in LINKS:
        raise ConfigError(f"no simulated link is called {name!r}{did_you_mean(name, list(LINKS))}")
    return LINKS[name]


@dataclass(frozen=True)
class Message:
    """A message that one rank sends another in one piece."""

    number: int
    """From 0, in the order in which messages were recorded."""
    source: int
    peer: int
    num_bytes: int
    phase: str


@dataclass(frozen=True)
class Post:
    """A rank posts a message and goes on."""

    message: int


@dataclass(frozen=True)
class Wait:
    """A rank waits until messages have arrived."""

    messages: tuple[int, ...]
    phase: str


@dataclass(frozen=True)
class Work:
    """A rank is busy."""

    us: float
    what: str


Step = Post | Wait | Work


@dataclass
class Recording:
    """The programs of all ranks."""

    nodes: Nodes
    messages: list[Message] = field(default_factory=list)
    steps_of_W: list[list[Step]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps_of_W = self.steps_of_W or [[] for _ in self.nodes.node_of_W]

    def post(self, source: int, peer: int, num_bytes: int, phase: str) -> int:
        """Note a message; returns its number."""
        message = Message(len(self.messages), source, peer, num_bytes, phase)
        self.messages.append(message)
        self.steps_of_W[source].append(Post(message.number))
        return message.number

    def wait(self, rank: int, messages: Sequence[int], phase: str) -> None:
        """Note that a rank waits for messages."""
        if messages:
            self.steps_of_W[rank].append(Wait(tuple(messages), phase))


@dataclass(frozen=True)
class Transfer:
    """A message with its times in microseconds."""

    message: Message
    link: str
    """INTRA_NODE or INTER_NODE."""
    issued_us: float
    """The rank has reached the post."""
    posted_us: float
    begins_us: float
    ends_us: float
    arrives_us: float


@dataclass(frozen=True)
class Pause:
    """A span in which a rank waits, and the message that ended it."""

    rank: int
    phase: str
    begins_us: float
    ends_us: float
    for_message: int


@dataclass(frozen=True)
class Timeline:
    """All transfers and pauses under two kinds of links."""

    recording: Recording
    near: SimulatedLink
    far: SimulatedLink
    transfers: tuple[Transfer, ...]
    """By message number."""
    pauses: tuple[Pause, ...]
    works: tuple[tuple[int, Work, float], ...]
    """Rank, work, begin."""
    ends_us: tuple[float, ...]
    """Of each rank's program."""

    @property
    def us(self) -> float:
        """Until the last rank has ended."""
        return max(self.ends_us, default=0.0)

    def of(self, phase: str | None = None) -> list[Transfer]:
        """The transfers of a phase, or all."""
        return [t for t in self.transfers if phase in (None, t.message.phase)]

    def limit_us(self, phase: str | None = None) -> float:
        """Bytes of the busiest port over its rate: no schedule of these messages is faster."""
        busy: dict[tuple[int, str, str], float] = defaultdict(float)
        for t in self.of(phase):
            us = (self.near if t.link == INTRA_NODE else self.far).us(t.message.num_bytes)
            busy[t.message.source, t.link, "out"] += us
            busy[t.message.peer, t.link, "in"] += us
        return max(busy.values(), default=0.0)

    def waits(self) -> list[list[float]]:
        """(W, W) microseconds: how long each rank waited, by the rank whose message ended the wait."""
        waits_WW = [[0.0] * len(self.ends_us) for _ in self.ends_us]
        for pause in self.pauses:
            waits_WW[pause.rank][self.recording.messages[pause.for_message].source] += pause.ends_us - pause.begins_us
        return waits_WW

    def table(self) -> Iterator[dict[str, Any]]:
        """A row for each phase, in the order in which phases begin."""
        for phase in dict.fromkeys(t.message.phase for t in sorted(self.transfers, key=lambda t: t.issued_us)):
            own = self.of(phase)
            size = {link: sum(t.message.num_bytes for t in own if t.link == link) for link in (INTRA_NODE, INTER_NODE)}
            waited = [0.0] * len(self.ends_us)
            for pause in self.pauses:
                if pause.phase == phase:
                    waited[pause.rank] += pause.ends_us - pause.begins_us
            yield {
                "phase": phase, "messages": len(own), "near_bytes": size[INTRA_NODE], "far_bytes": size[INTER_NODE],
                "begins_us": min(t.issued_us for t in own), "ends_us": max(t.arrives_us for t in own),
                "limit_us": self.limit_us(phase), "longest_wait_us": max(waited),
            }  # fmt: skip

    def chrome(self) -> dict[str, Any]:
        """In the Trace Event Format: a process for each rank, with rows for the rank and its two ports."""
        rows = {"rank": 0, INTRA_NODE: 1, INTER_NODE: 2}
        events: list[dict[str, Any]] = []
        for rank in range(len(self.ends_us)):
            events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
            for name, row in rows.items():
                label = name if name == "rank" else f"sends {name}"
                events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": label}})

        def span(name: str, rank: int, row: int, begin: float, end: float, **arguments: Any) -> None:
            events.append(
                {
                    "ph": "X", "name": name, "pid": rank, "tid": row, "ts": begin, "dur": end - begin,
                    "args": arguments,
                }
            )  # fmt: skip

        for t in self.transfers:
            m = t.message
            span(
                m.phase, m.source, rows[t.link], t.begins_us, t.ends_us, to=m.peer, bytes=m.num_bytes,
                posted=t.posted_us, arrives=t.arrives_us,
            )  # fmt: skip
        for pause in self.pauses:
            awaited = self.recording.messages[pause.for_message].source
            span(f"wait {pause.phase}", pause.rank, 0, pause.begins_us, pause.ends_us, **{"for": awaited})
        for rank, work, begin in self.works:
            span(work.what, rank, 0, begin, begin + work.us)
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def simulate(recording: Recording, near: SimulatedLink, far: SimulatedLink) -> Timeline:
    """Give every message its times.

    near: between ranks of one node; far: between nodes. Raises ConfigError for a message to the rank itself, or a wait
    that no message ends.
    """
    return _Simulation(recording, near, far).run()


@dataclass
class _Flow:
    """A message that is under way."""

    message: Message
    ports: tuple[tuple[int, str, str], tuple[int, str, str]]
    begins: float
    left: float
    """Microseconds at the full rate of the port."""
    at: float
    """When `left` was current."""
    share: float = 1.0
    version: int = 0


class _Simulation:
    def __init__(self, recording: Recording, near: SimulatedLink, far: SimulatedLink) -> None:
        self.recording, self.near, self.far = recording, near, far
        ranks = len(recording.steps_of_W)
        self.at_W, self.now_W = [0] * ranks, [0.0] * ranks
        self.events: list[tuple[float, int, str, int, int]] = []
        """Time, order, what, message, version of its flow."""
        self.order = count()
        self.poster: dict[tuple[int, str], float] = defaultdict(float)
        self.queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.flows: dict[int, _Flow] = {}
        self.on_port: dict[tuple[int, str, str], dict[int, None]] = defaultdict(dict)
        self.transfers: dict[int, Transfer] = {}
        self.issued: dict[int, tuple[float, float]] = {}
        self.arrived: dict[int, float] = {}
        self.waiting: dict[int, set[int]] = {}
        self.pauses: list[Pause] = []
        self.works: list[tuple[int, Work, float]] = []

    def run(self) -> Timeline:
        for rank in range(len(self.at_W)):
            self._go_on(rank)
        while self.events:
            time, _, what, number, version = heapq.heappop(self.events)
            if what == "posted":
                queue = self.queues[self._pair(number)]
                queue.append(number)
                if len(queue) == 1:
                    self._begin(number, time)
            elif what == "arrived":
                self._arrive(number, time)
            elif number in self.flows and self.flows[number].version == version:
                self._end(number, time)
        if self.waiting:
            rank, missing = min(self.waiting.items())
            raise ConfigError(f"rank {rank} waits for message {min(missing)}, which no rank posts")
        transfers = tuple(self.transfers[number] for number in sorted(self.transfers))
        return Timeline(
            self.recording, self.near, self.far, transfers, tuple(self.pauses), tuple(self.works), tuple(self.now_W)
        )

    def _go_on(self, rank: int) -> None:
        """Run a rank's program up to a wait for a message that has not arrived."""
        steps = self.recording.steps_of_W[rank]
        while self.at_W[rank] < len(steps):
            step = steps[self.at_W[rank]]
            if isinstance(step, Wait):
                missing = {number for number in step.messages if number not in self.arrived}
                if missing:
                    self.waiting[rank] = missing
                    return
                last = max(step.messages, key=lambda number: (self.arrived[number], number))
                if self.arrived[last] > self.now_W[rank]:
                    self.pauses.append(Pause(rank, step.phase, self.now_W[rank], self.arrived[last], last))
                    self.now_W[rank] = self.arrived[last]
            elif isinstance(step, Work):
                self.works.append((rank, step, self.now_W[rank]))
                self.now_W[rank] += step.us
            else:
                self._post(self.recording.messages[step.message], self.now_W[rank])
            self.at_W[rank] += 1

    def _post(self, message: Message, now: float) -> None:
        if message.source == message.peer:
            raise ConfigError(f"message {message.number} of rank {message.source} is for itself")
        kind = self._kind(message)
        self.poster[message.source, kind] = max(self.poster[message.source, kind], now) + self._link(kind).message_us
        self.issued[message.number] = now, self.poster[message.source, kind]
        self._push(self.poster[message.source, kind], "posted", message.number)

    def _begin(self, number: int, time: float) -> None:
        message = self.recording.messages[number]
        kind = self._kind(message)
        ports = (message.source, kind, "out"), (message.peer, kind, "in")
        self.flows[number] = _Flow(message, ports, time, self._link(kind).us(message.num_bytes), time)
        for port in ports:
            self.on_port[port][number] = None
        self._share(ports, time)

    def _end(self, number: int, time: float) -> None:
        flow = self.flows.pop(number)
        for port in flow.ports:
            del self.on_port[port][number]
        kind = flow.ports[0][1]
        arrives = time + self._link(kind).latency_us
        self.transfers[number] = Transfer(flow.message, kind, *self.issued[number], flow.begins, time, arrives)
        self._push(arrives, "arrived", number)
        self._share(flow.ports, time)
        queue = self.queues[self._pair(number)]
        queue.popleft()
        if queue:
            self._begin(queue[0], time)

    def _share(self, ports: tuple[tuple[int, str, str], ...], time: float) -> None:
        """Divide the ports among the messages on them, from now on."""
        for number in dict.fromkeys(number for port in ports for number in self.on_port[port]):
            flow = self.flows[number]
            share = 1.0 / max(len(self.on_port[port]) for port in flow.ports)
            if share == flow.share and flow.version:
                continue
            flow.left, flow.at = max(flow.left - (time - flow.at) * flow.share, 0.0), time
            flow.share, flow.version = share, flow.version + 1
            self._push(time + flow.left / share, "ended", number, flow.version)

    def _arrive(self, number: int, time: float) -> None:
        self.arrived[number] = time
        rank = self.recording.messages[number].peer
        missing = self.waiting.get(rank)
        if missing is not None:
            missing.discard(number)
            if not missing:
                del self.waiting[rank]
                self._go_on(rank)

    def _push(self, time: float, what: str, number: int, version: int = 0) -> None:
        heapq.heappush(self.events, (time, next(self.order), what, number, version))

    def _pair(self, number: int) -> tuple[int, int]:
        message = self.recording.messages[number]
        return message.source, message.peer

    def _kind(self, message: Message) -> str:
        return self.recording.nodes.link(message.source, message.peer)

    def _link(self, kind: str) -> SimulatedLink:
        return self.near if kind == INTRA_NODE else self.far
