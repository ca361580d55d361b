"""Overlap within one call: experts of one tile compute while the next is dispatched and the one before is combined.

A tile is a part of a rank's tokens. Its transfers have two halves each, issued (i) and received (r): D dispatch,
C combine, and S onward to the next pipeline stage; M are its experts. `TilePlan` is the order and the dependencies of
these steps, and two executors take the same plan:

    in_turns     one thread, a flight: steps in the plan's order, at most two transfers in flight. For ranks in
                 lockstep, for layers interleaved with other flights, and for transports that move data by themselves.
    on_workers   a worker for each kind of work: one thread communicates, the caller's multiplies, one sends onward; see
                 `tiled_kernel`. For transports whose calls occupy a processor or block inside a library.

    step   needs                                        phase    0        1        2                3
    D3i    C0r, whose buffer it reuses                  comm     D0i D0r  D1i D1r  C0i D2i C0r D2r  C1i D3i C1r D3r
    D3r    D3i                                          experts           M0       M1               M2
    M3     D3r                                          onward                                      S0i S0r
    C3i    M3
    C3r    C3i
    S3i    C3r

So tile 2 is dispatched and tile 0 combined while tile 1 is multiplied: three tiles are open, two transfers in flight. A
transport that allows less gets a plan of depth 2 (the next tile is dispatched while one is multiplied) or 1 (no
overlap). Workers run concurrently; within one, steps keep their order, which is the same on all ranks. The tiles may
be micro-batches of different sizes as well. Sources of the idea: FlashMoE (arXiv 2506.04667), COMET (arXiv 2502.19811)
and, for transfers in two halves, DeepEP's low-latency kernels with receive hooks (github.com/deepseek-ai/DeepEP).

Both executors give the bits of one tile after the other. Compared with one call over all tokens, a row shares its GEMM
with other rows: with kernel.batch_invariant bits are equal there too; else they differ as between two batch sizes,
within the rounding of the compute scheme.

`TileRecord` records the order of events, from which it follows exactly which intervals overlapped, whatever the load
of the machine; the share of hidden time is read from the clock. `StageLink` sends finished tiles to the next stage:

    stage 0, a rank           C0r  S0 ...  C1r  S1 ...        a finished tile leaves while others are still combined
    stage 1, the same rank         x0           x1            and the next stage begins with what has arrived

A link is a group of two: a rank, and the one in the same place of the next stage, so its messages may overlap with
anything inside a stage. Both ends know the number and sizes of tiles: the next stage has the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight, InFlight, cancel
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.tokens import ExpertOutput, Routing, Tokens
from moe_mk.trace.clock import now
from moe_mk.trace.recorder import Span, hidden_share

X = TypeVar("X")
STAGES = {"D": "dispatch", "M": "experts", "C": "combine", "S": "onward"}


@dataclass(frozen=True)
class Event:
    """A step begins or ends."""

    step: Step
    what: Literal["begins", "ends"]
    seconds: float

    def __str__(self) -> str:
        return f"{self.step} {self.what}"


@dataclass(frozen=True)
class Interval:
    """From the first event of a transfer, or of experts, to its last: positions in the order of events, and seconds."""

    name: str
    """D2, M0, ..."""
    first: int
    last: int
    start: float
    end: float

    def overlaps(self, other: Interval) -> bool:
        """Whether each begins before the other has ended."""
        return self.first < other.last and other.first < self.last


class TileRecord:
    """Events of one rank; several threads may note them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(self, step: Step, what: Literal["begins", "ends"]) -> None:
        """Something happens now. A list's append is one operation: places are an order that all threads agree on."""
        self.events.append(Event(step, what, now()))

    def intervals(self) -> list[Interval]:
        """Return the steps that have ended, sorted by begin. A transfer lasts from its issue until it is received."""
        found: dict[str, list[int]] = {}
        for place, event in enumerate(self.events):
            found.setdefault(event.step.transfer, []).append(place)
        bounds = [(name, places[0], places[-1]) for name, places in found.items() if len(places) > 1]
        return [Interval(n, a, b, self.events[a].seconds, self.events[b].seconds) for n, a, b in bounds]

    def overlaps(self) -> list[tuple[str, str]]:
        """Pairs of intervals of different tiles that overlapped, such as (D1, M0)."""
        all_of_them = self.intervals()
        return [
            (one.name, other.name)
            for number, one in enumerate(all_of_them)
            for other in all_of_them[number + 1 :]
            if one.name[1:] != other.name[1:] and one.overlaps(other)
        ]

    def spans(self) -> list[Span]:
        """The intervals as spans of a trace, see `lab.trace.chrome`."""
        return [Span(STAGES[i.name[0]], i.start, i.end, i.end - i.start) for i in self.intervals()]

    def hidden_share(self) -> float | None:
        """The share of communication time, from 0 to 1, in which experts computed; None without communication."""
        return hidden_share(self.spans())


Kind = Literal["D", "M", "C", "S"]
Worker = Literal["comm", "experts", "onward"]
WORKERS: Mapping[Kind, Worker] = {"D": "comm", "M": "experts", "C": "comm", "S": "onward"}
DEEPEST = 3

_PHASES: Mapping[int, tuple[tuple[Kind, str, int], ...]] = {
    1: (("D", "i", 0), ("D", "r", 0), ("M", "", 0), ("C", "i", 0), ("C", "r", 0), ("S", "r", 1), ("S", "i", 0)),
    2: (("D", "i", 0), ("M", "", 1), ("D", "r", 0), ("C", "i", 1), ("C", "r", 1), ("S", "r", 2), ("S", "i", 1)),
    3: (
        ("C", "i", 2), ("D", "i", 0), ("M", "", 1), ("C", "r", 2), ("D", "r", 0), ("S", "r", 3), ("S", "i", 2),
    ),
}  # fmt: skip
"""Steps of one phase by depth: kind, half, and how many tiles behind the phase's number."""


@dataclass(frozen=True)
class Step:
    """A step of one tile."""

    kind: Kind
    half: str
    """i issued, r received; empty for experts."""
    tile: int

    @property
    def transfer(self) -> str:
        """The name of both halves together, such as D2."""
        return f"{self.kind}{self.tile}"

    def __str__(self) -> str:
        return self.transfer + self.half


@dataclass(frozen=True)
class TilePlan:
    """The steps of all tiles and what each needs. Pure data, equal on all ranks for equal arguments."""

    tiles: int
    depth: int = DEEPEST
    """The most tiles that are dispatched and not yet combined."""
    onward: bool = False
    """Whether combined tiles are sent to the next pipeline stage."""

    def __post_init__(self) -> None:
        if self.tiles < 1 or self.depth not in _PHASES:
            raise ConfigError(f"{self.tiles} tiles, {self.depth} deep: at least one tile, and depth 1, 2 or {DEEPEST}")

    @cached_property
    def order(self) -> tuple[Step, ...]:
        """All steps as one thread takes them: transfers are issued before experts begin, received after."""
        steps = []
        for phase in range(self.tiles + self.depth):
            for kind, half, behind in _PHASES[self.depth]:
                tile = phase - behind
                if 0 <= tile < self.tiles and (kind != "S" or self.onward):
                    steps.append(Step(kind, half, tile))
        return tuple(steps)

    @cached_property
    def workers(self) -> Mapping[Worker, tuple[Step, ...]]:
        """Return the steps by worker; workers without steps are left out."""
        steps_of: dict[Worker, list[Step]] = {}
        for step in self.order:
            steps_of.setdefault(WORKERS[step.kind], []).append(step)
        return {worker: tuple(steps) for worker, steps in steps_of.items()}

    def needs(self, step: Step) -> tuple[Step, ...]:
        """The steps of other workers, and own ones, that must have ended before this one begins."""
        tile = step.tile
        match step.kind, step.half:
            case "D", "i":
                return (Step("C", "r", tile - self.depth),) if tile >= self.depth else ()
            case "M", _:
                return (Step("D", "r", tile),)
            case "C", "i":
                return (Step("M", "", tile),)
            case "S", "i":
                return (Step("C", "r", tile),)
            case kind, _:
                return (Step(kind, "i", tile),)


def deepest(open_calls: int | None, in_flight: int | None) -> int:
    """The depth that a transport allows.

    open_calls: calls that may be dispatched and not yet combined. in_flight: operations issued and not yet received.
    None: no limit.
    """
    for depth, operations in ((DEEPEST, 2), (2, 1)):
        if (open_calls is None or open_calls >= depth) and (in_flight is None or in_flight >= operations):
            return depth
    return 1


@dataclass(frozen=True)
class MicroBatch:
    """A part of a rank's tokens, with their routing to physical experts."""

    x_TH: Tensor
    routing: Routing


class Issued(Generic[X]):
    """A flight that has run to its first yield point: its data is being sent."""

    def __init__(self, flight: Flight[X]) -> None:
        self.flight = flight
        self._point: InFlight | None = None
        self._result: list[X] = []
        try:
            self._point = next(flight)
        except StopIteration as end:
            self._result.append(cast(X, end.value))

    def receive(self) -> Flight[X]:
        if self._point is None:
            return self._result.pop()
        yield self._point
        return (yield from self.flight)


Multiply = Callable[[Tokens], ExpertOutput]
Onward = Callable[[int, Tensor], Flight[None]]
"""Sends a tile, by number and rows (t, H), to the next stage; called once a tile, in order."""
Executor = Literal["turns", "thread"]


def cut(batch: MicroBatch, tiles: int) -> list[MicroBatch]:
    """A batch in `tiles` parts in token order, sizes as even as can be: 6 tokens in 4 tiles are 2, 2, 1, 1."""
    parts = (torch.tensor_split(each, tiles) for each in (batch.x_TH, batch.routing.ids_TK, batch.routing.weights_TK))
    return [MicroBatch(x_TH, Routing(ids_TK, weights_TK)) for x_TH, ids_TK, weights_TK in zip(*parts, strict=True)]


def plan_for(transport: PrepareFinalize, tiles: int, *, onward: bool = False) -> TilePlan:
    """The deepest plan that a transport's traits permit; equal on all ranks."""
    return TilePlan(tiles, deepest(transport.traits.open_calls, transport.traits.in_flight), onward)


class TileWork:
    """The tiles of a call with the transport and the experts, and what each step of a plan does to them."""

    def __init__(
        self, transport: PrepareFinalize, multiply: Multiply, tiles: Sequence[MicroBatch], onward: Onward | None = None
    ) -> None:
        self.transport, self.multiply, self.tiles, self.onward = transport, multiply, tiles, onward
        self.kept: list[ExpertOutput] = []
        """Outputs that a device may still read when a step has returned; empty on a CPU."""
        self.keeps = False
        self._flying: dict[str, Issued[Any]] = {}
        self._tokens: dict[int, Tokens] = {}
        self._multiplied: dict[int, ExpertOutput] = {}
        self._combined: dict[int, Tensor] = {}

    def perform(self, step: Step) -> Flight[None]:
        """Take one step, whose dependencies have ended. An exception ends the call on every rank."""
        with self.transport.context.comm.abort_on_error():
            if step.kind == "M":
                self._multiplied[step.tile] = self.multiply(self._tokens[step.tile])
            elif step.half == "i":
                self._flying[step.transfer] = Issued(self._transfer(step))
            else:
                arrived = yield from self._flying.pop(step.transfer).receive()
                if step.kind == "D":
                    self._tokens[step.tile] = arrived
                elif step.kind == "C":
                    self._combined[step.tile] = arrived

    def cancel(self) -> None:
        """Cancel transfers that were issued and not received; a complete call has none."""
        cancel(issued.flight for issued in self._flying.values())

    def outputs(self) -> list[Tensor]:
        """(t, H) of each tile, once every step was taken."""
        return [self._combined[tile] for tile in range(len(self.tiles))]

    def _transfer(self, step: Step) -> Flight[Any]:
        tile = step.tile
        if step.kind == "D":
            return self.transport.prepare(self.tiles[tile].x_TH, self.tiles[tile].routing)
        if step.kind == "C":
            output = self._multiplied.pop(tile)
            self.kept += [output] * self.keeps
            return self.transport.finalize(output, self._tokens.pop(tile))
        assert self.onward is not None
        return self.onward(tile, self._combined[tile])


def in_turns(work: TileWork, plan: TilePlan, record: TileRecord) -> Flight[list[Tensor]]:
    """Take the plan's steps in its order, in this thread; a flight like any other."""
    try:
        for step in plan.order:
            record.note(step, "begins")
            yield from work.perform(step)
            record.note(step, "ends")
    finally:
        work.cancel()
    return work.outputs()


PHASE = "next stage"


@dataclass(frozen=True)
class StageLink:
    """Two ranks: 0 is of the earlier stage and sends, 1 is of the later one and receives.

    Raises ConfigError for a group of any other size.
    """

    comm: Communicator

    def __post_init__(self) -> None:
        if self.comm.size != 2:
            raise ConfigError(
                f"a link between two stages is a group of 2 ranks, this one has {self.comm.size}; make one for each "
                "pair of neighbours in rank_groups(...)['pp']"
            )

    def send(self, tile: int, y_XH: Tensor) -> Flight[None]:
        """Send a tile; the flight ends when its memory may be reused. An `Onward` of `runner.tiles`."""
        del tile  # tiles arrive in the order in which they are sent
        yield from self.comm.all_to_all(y_XH, [0, len(y_XH)], [0, 0], PHASE)

    def receive(self, num_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Flight[Tensor]:
        """The next tile, (num_tokens, hidden)."""
        nothing_XH = torch.empty((0, hidden), dtype=dtype, device=device)
        return (yield from self.comm.all_to_all(nothing_XH, [0, 0], [num_tokens, 0], PHASE))


def tile_sizes(num_tokens: int, tiles: int) -> Sequence[int]:
    """Tokens of each tile, as `runner.tiles.cut` makes them."""
    least, more = divmod(num_tokens, tiles)
    return [least + (tile < more) for tile in range(tiles)]
