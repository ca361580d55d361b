"""Tile by tile: experts of one tile compute while the next goes out and the one before comes home.

`TilePlan` says which step needs which; two executors take the same plan over the same steps:

    in_turns   one thread, a flight: steps in the plan's order, at most two journeys under way. For ranks in lockstep,
               for layers that other flights interleave with, and for transports that move data by themselves.
    on_lanes   a thread for each lane: one carries, the caller's multiplies, one sends onward. For transports whose
               calls take a processor's time or wait inside a library.

Both give the bits of one tile after the other. Against one call with all tokens, a token's row meets other rows in its
GEMM: with kernel.batch_invariant, and with experts that multiply row by row, bits are the same there too; else they
differ as between two batches of any sizes, within the rounding of the compute scheme.

Which step of which tile needs what, said apart from whoever executes it.

A tile is a part of a rank's tokens. Its journeys have two halves each, issued (i) and received (r), by the names of
`schedule`: D dispatch, M experts, C combine, and S onward to the next pipeline stage.

    step   needs                                        phase    0        1        2                3
    D3i    C0r, the room of a tile that is home         carry    D0i D0r  D1i D1r  C0i D2i C0r D2r  C1i D3i C1r D3r
    D3r    D3i                                          experts           M0       M1               M2
    M3     D3r                                          onward                                      S0i S0r
    C3i    M3
    C3r    C3i
    S3i    C3r

So tile 2 goes out and tile 0 comes home while tile 1 is multiplied: three tiles are open, two journeys under way. A
transport that keeps less open gets a plan of depth 2 (the next tile goes out while one is multiplied) or 1 (nothing
overlaps). Lanes run side by side; within one, steps keep their order, which is the same on all ranks whatever ends
first. Sources of the idea: FlashMoE (arXiv 2506.04667) and COMET (arXiv 2502.19811), where tiles of a fused kernel wait
for flags instead of for a whole dispatch.

What happened to tiles, in the order in which it happened: events, the intervals they make, and which overlapped.

That one interval overlaps another is read from the order of events, which is exact on any machine under any load; how
much of the time was hidden is read from the clock.

The way from one pipeline stage to the next, tile by tile.

    stage 0, a rank    C0 home  S0 ...  C1 home  S1 ...        a finished tile leaves while others still come home
    stage 1, its twin           x0 here          x1 here       and the next stage begins with what has arrived

A link is a group of two: a rank, and the one in the same place of the next stage. Its messages meet nobody else's, so
they may overlap with anything that goes on inside a stage. How many tiles, and of which sizes, both ends know: the next
stage has the tokens of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight, cancel
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.runner.overlap import Issued, MicroBatch
from moe_mk.tokens import ExpertOutput, Routing, Tokens
from moe_mk.trace.clock import now
from moe_mk.trace.overlap import hidden_share
from moe_mk.trace.recorder import Span

STAGES: dict[Kind, str] = {"D": "dispatch", "M": "experts", "C": "combine", "S": "onward"}


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
    """From the first event of a journey, or of experts, to its last: places in the order of events, and seconds."""

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
        """What has begun and ended, by its beginning. A journey lasts from its issue until it is received."""
        found: dict[str, list[int]] = {}
        for place, event in enumerate(self.events):
            found.setdefault(event.step.journey, []).append(place)
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
        """The intervals as spans of a trace, see `trace.chrome`."""
        return [Span(_stage(i.name), i.start, i.end, i.end - i.start) for i in self.intervals()]

    def hidden_share(self) -> float | None:
        """The part of the time on the way, from 0 to 1, in which experts computed; None if nothing travelled."""
        return hidden_share(self.spans())


def _stage(name: str) -> str:
    return next(stage for kind, stage in STAGES.items() if name.startswith(kind))


Kind = Literal["D", "M", "C", "S"]
Lane = Literal["carry", "experts", "onward"]
LANES: Mapping[Kind, Lane] = {"D": "carry", "M": "experts", "C": "carry", "S": "onward"}
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
    """i issued, r received; empty for experts, which do not travel."""
    tile: int

    @property
    def journey(self) -> str:
        """What both halves have in common, such as D2."""
        return f"{self.kind}{self.tile}"

    def __str__(self) -> str:
        return self.journey + self.half


@dataclass(frozen=True)
class TilePlan:
    """The steps of all tiles and what each needs. Pure data, equal on all ranks for equal arguments."""

    tiles: int
    depth: int = DEEPEST
    """The most tiles that are dispatched and not yet home."""
    onward: bool = False
    """Whether tiles that are home are sent on."""

    def __post_init__(self) -> None:
        if self.tiles < 1 or self.depth not in _PHASES:
            raise ConfigError(f"{self.tiles} tiles, {self.depth} deep: at least one tile, and depth 1, 2 or {DEEPEST}")

    @cached_property
    def order(self) -> tuple[Step, ...]:
        """All steps as one thread takes them: journeys are issued before experts begin, received after."""
        steps = []
        for phase in range(self.tiles + self.depth):
            for kind, half, behind in _PHASES[self.depth]:
                tile = phase - behind
                if 0 <= tile < self.tiles and (kind != "S" or self.onward):
                    steps.append(Step(kind, half, tile))
        return tuple(steps)

    @cached_property
    def lanes(self) -> Mapping[Lane, tuple[Step, ...]]:
        """The same steps by who takes them; lanes without steps are left out."""
        of_lane: dict[Lane, list[Step]] = {}
        for step in self.order:
            of_lane.setdefault(LANES[step.kind], []).append(step)
        return {lane: tuple(steps) for lane, steps in of_lane.items()}

    def needs(self, step: Step) -> tuple[Step, ...]:
        """The steps that must have ended before this one begins, beside those before it in its lane."""
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

    open_calls: calls that may be dispatched and not yet home. in_flight: operations issued and not yet received. None
    is as many as one likes.
    """
    for depth, operations in ((DEEPEST, 2), (2, 1)):
        if (open_calls is None or open_calls >= depth) and (in_flight is None or in_flight >= operations):
            return depth
    return 1


Multiply = Callable[[Tokens], ExpertOutput]
Onward = Callable[[int, Tensor], Flight[None]]
"""Sends a tile, by number and rows (t, H), to whoever comes next; called once a tile, in order."""
Carrier = Literal["turns", "thread"]


def cut(batch: MicroBatch, tiles: int) -> list[MicroBatch]:
    """A batch in `tiles` parts in token order, sizes as even as can be: 6 tokens in 4 tiles are 2, 2, 1, 1."""
    parts = (torch.tensor_split(each, tiles) for each in (batch.x_TH, batch.routing.ids_TK, batch.routing.weights_TK))
    return [MicroBatch(x_TH, Routing(ids_TK, weights_TK)) for x_TH, ids_TK, weights_TK in zip(*parts, strict=True)]


def plan_for(transport: PrepareFinalize, tiles: int, *, onward: bool = False) -> TilePlan:
    """The deepest plan that a transport's traits permit; equal on all ranks."""
    return TilePlan(tiles, deepest(transport.traits.open_calls, transport.traits.in_flight), onward)


class TileWork:
    """What each step of a plan means: the tiles, where they are now, and who carries and multiplies them."""

    def __init__(
        self,
        transport: PrepareFinalize,
        multiply: Multiply,
        tiles: Sequence[MicroBatch],
        onward: Onward | None = None,
    ) -> None:
        self.transport, self.multiply, self.tiles, self.onward = transport, multiply, tiles, onward
        self.kept: list[ExpertOutput] = []
        """Outputs that a device may still read when a step has ended; empty where steps end with their work."""
        self.keeps = False
        self._flying: dict[str, Issued[Any]] = {}
        self._tokens: dict[int, Tokens] = {}
        self._multiplied: dict[int, ExpertOutput] = {}
        self._home: dict[int, Tensor] = {}

    def perform(self, step: Step) -> Flight[None]:
        """Take one step. What it needs must have been done. What it raises ends the call on every rank."""
        with self.transport.context.comm.abort_on_error():
            if step.kind == "M":
                self._multiplied[step.tile] = self.multiply(self._tokens[step.tile])
            elif step.half == "i":
                self._flying[step.journey] = Issued(step.journey, self._journey(step), lambda event: None)
            else:
                arrived = yield from self._flying.pop(step.journey).receive()
                if step.kind == "D":
                    self._tokens[step.tile] = arrived
                elif step.kind == "C":
                    self._home[step.tile] = arrived

    def give_up(self) -> None:
        """End the journeys that were issued and not received, of which a whole call leaves none."""
        cancel(issued.flight for issued in self._flying.values())

    def outputs(self) -> list[Tensor]:
        """(t, H) of each tile, once every step was taken."""
        return [self._home[tile] for tile in range(len(self.tiles))]

    def _journey(self, step: Step) -> Flight[Any]:
        tile = step.tile
        if step.kind == "D":
            return self.transport.prepare(self.tiles[tile].x_TH, self.tiles[tile].routing)
        if step.kind == "C":
            output = self._multiplied.pop(tile)
            self.kept += [output] * self.keeps
            return self.transport.finalize(output, self._tokens.pop(tile))
        assert self.onward is not None
        return self.onward(tile, self._home[tile])


def in_turns(work: TileWork, plan: TilePlan, record: TileRecord) -> Flight[list[Tensor]]:
    """Take the plan's steps in its order, in this thread; a flight like any other."""
    try:
        for step in plan.order:
            record.note(step, "begins")
            yield from work.perform(step)
            record.note(step, "ends")
    finally:
        work.give_up()
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
        """Send a tile; the flight lands when it may be forgotten. An `Onward` of `runner.tiles`."""
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
