"""Micro-batches one behind the other, in the six steps of a low-latency decode: one computes while the next arrives.

With two micro-batches 0 and 1, dispatch D, experts M and combine C, each journey issued (i) and received (r) apart:

    1  D0i          4  C0i D1r
    2  D0r D1i      5  M1
    3  M0           6  C1i C0r, and C1r at the very end: the next layer's attention of batch 0 may come before it

A third batch is issued when the first is home: D1r C0r D2i M1 C1i. At most two journeys are under way at once, which is
what two alternating buffers allow. Source of the order: DeepEP's low-latency kernels with receive hooks
(github.com/deepseek-ai/DeepEP), for which waiting occupies no compute unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from torch import Tensor

from moe_mk.flight import Flight, InFlight, give_up
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.tokens import ExpertOutput, Routing, Tokens

X = TypeVar("X")
Note = Callable[[str], None]


@dataclass(frozen=True)
class MicroBatch:
    """A part of a rank's tokens, routed to physical experts."""

    x_TH: Tensor
    routing: Routing


class Issued(Generic[X]):
    """A flight up to its first hop: what it sends is on its way."""

    def __init__(self, name: str, flight: Flight[X], note: Note) -> None:
        self._name, self._flight, self._note = name, flight, note
        self._hop: InFlight | None = None
        self._result: list[X] = []
        note(f"{name}i")
        try:
            self._hop = next(flight)
        except StopIteration as landed:
            self._result.append(cast(X, landed.value))

    @property
    def flight(self) -> Flight[X]:
        """The flight itself, for whoever gives it up."""
        return self._flight

    def receive(self) -> Flight[X]:
        """The rest of the flight."""
        self._note(f"{self._name}r")
        if self._hop is None:
            return self._result.pop()
        yield self._hop
        return (yield from self._flight)


def staggered(
    transport: PrepareFinalize,
    multiply: Callable[[Tokens], ExpertOutput],
    batches: Sequence[MicroBatch],
    note: Note = lambda event: None,
) -> Flight[list[Tensor]]:
    """Run micro-batches in the order above, any number of them; (T, H) of each, bit for bit as one after the other.

    multiply: what a kernel does between the journeys. All ranks must bring the same number of batches; one without
    tokens still makes every hop. note: told of each event by its name above as it begins.
    """
    last = len(batches) - 1
    home: list[Tensor] = []
    coming: list[Issued[Tokens]] = []
    going: list[Issued[Tensor]] = []

    def dispatch(number: int) -> Issued[Tokens]:
        batch = batches[number]
        return Issued(f"D{number}", transport.prepare(batch.x_TH, batch.routing), note)

    try:
        if batches:
            coming.append(dispatch(0))
        for number in range(len(batches)):
            tokens = yield from coming.pop().receive()
            if number < last:
                if going:  # a third journey would need a third buffer
                    home.append((yield from going.pop().receive()))
                coming.append(dispatch(number + 1))
            note(f"M{number}")
            combine = Issued(f"C{number}", transport.finalize(multiply(tokens), tokens), note)
            if going:
                home.append((yield from going.pop().receive()))
            going.append(combine)
        if going:
            home.append((yield from going.pop().receive()))
        return home
    finally:
        give_up(issued.flight for issued in coming)
        give_up(issued.flight for issued in going)


def finishes_async(*, asked_async: bool, overlaps_batches: bool) -> bool:
    """Whether a library's call should return before its communication has ended: only where nothing else overlaps.

    With several micro-batches in turn, the turn itself is the overlap, and a call that returns early would let both
    compute at once. Source of the rule: vLLM, `async_finish = async_prepare and not dbo_enabled()`.
    """
    return asked_async and not overlaps_batches
