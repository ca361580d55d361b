"""Overlap of one flight with other work in the calling thread; `tiles` and `tiled_kernel` overlap parts of a batch.

wait                             nothing
alongside, run_with              one other computation, such as the shared experts
run_dual                         other flights, such as the second micro-batch
prepare_async, finalize_async    whatever the caller runs between `hook` and `receive`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.flight import Flight, interleave, wait
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.tokens import ExpertOutput, Routing, Tokens

X = TypeVar("X")
Y = TypeVar("Y")

run_alone = wait
run_dual = interleave
"""Dual-batch overlap, for any number of micro-batches: while one waits for communication, the next computes.

All ranks must pass the same number of flights; one without tokens yields as often as the others.
"""


def run_with(flight: Flight[X], meanwhile: Callable[[], Y], during: str = "dispatch") -> tuple[X, Y]:
    """Call `meanwhile` once while the flight waits for `during`; return both results."""
    return wait(alongside(flight, meanwhile, during))


def alongside(flight: Flight[X], meanwhile: Callable[[], Y], during: str = "dispatch") -> Flight[tuple[X, Y]]:
    """A flight that calls `meanwhile` at its first yield point named `during`; at the end if there is none."""
    extra: list[Y] = []
    while True:
        try:
            point = next(flight)
        except StopIteration as end:
            return cast(X, end.value), extra[0] if extra else meanwhile()
        if not extra and point.what == during:
            extra.append(meanwhile())
        yield point


class ReceivedTwice(MoEMKError, RuntimeError):
    """`receive` was called a second time; the tensors may already have been reused."""


class AsyncResult(Generic[X]):
    """A dispatch or combine that has been started: `hook()`, then `receive()`.

    The constructor runs the flight to its first yield point, so that its data is sent. The hook waits for the data and
    may be called by any code, any number of times; `receive` may be called once and calls the hook if needed.
    """

    def __init__(self, flight: Flight[X]) -> None:
        self._flight = flight
        self._result: list[X] = []
        self._done = self._received = False
        self._advance()

    def hook(self) -> None:
        """Wait until the data has arrived; returns at once when called again."""
        while not self._done:
            self._advance()

    def receive(self) -> X:
        """The result. Raises ReceivedTwice on a second call."""
        if self._received:
            raise ReceivedTwice("this result was already received; keep the result of the first call")
        self.hook()
        self._received = True
        return self._result.pop()

    def _advance(self) -> None:
        try:
            next(self._flight)
        except StopIteration as end:
            self._result.append(cast(X, end.value))
            self._done = True


def prepare_async(transport: PrepareFinalize, x_TH: Tensor, routing: Routing) -> AsyncResult[Tokens]:
    """Start a dispatch; returns a handle to wait for."""
    return AsyncResult(_ended_on_all_ranks(transport, transport.prepare(x_TH, routing)))


def finalize_async(transport: PrepareFinalize, output: ExpertOutput, tokens: Tokens) -> AsyncResult[Tensor]:
    """Start a combine; returns a handle to wait for."""
    return AsyncResult(_ended_on_all_ranks(transport, transport.finalize(output, tokens)))


def _ended_on_all_ranks(transport: PrepareFinalize, flight: Flight[X]) -> Flight[X]:
    """A half that is dropped by its caller ends the call of the peers, which wait for it."""
    with transport.context.comm.abort_on_error():
        return (yield from flight)
