"""Tile by tile: experts of one tile compute while the next goes out and the one before comes home.

`TilePlan` says which step needs which; two executors take the same plan over the same steps:

    in_turns   one thread, a flight: steps in the plan's order, at most two journeys under way. For ranks in lockstep,
               for layers that other flights interleave with, and for transports that move data by themselves.
    on_lanes   a thread for each lane: one carries, the caller's multiplies, one sends onward. For transports whose
               calls take a processor's time or wait inside a library.

Both give the bits of one tile after the other. Against one call with all tokens, a token's row meets other rows in its
GEMM: with kernel.batch_invariant, and with experts that multiply row by row, bits are the same there too; else they
differ as between two batches of any sizes, within the rounding of the compute scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from moe_mk.flight import Flight, give_up
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.runner.schedule import Issued, MicroBatch
from moe_mk.runner.tile_plan import Step, TilePlan, deepest
from moe_mk.runner.tile_record import TileRecord
from moe_mk.tokens import ExpertOutput, Routing, Tokens

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
        give_up(issued.flight for issued in self._flying.values())

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
