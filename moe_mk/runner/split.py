"""`prepare_async` and `finalize_async` as engines know them: thin views of the same flight.

Posting happens at the call. The hook waits for the data and may be called by anybody, once or more; the receiver
returns the result, calling the hook first if nobody has, and once only.
"""

from __future__ import annotations

from typing import Generic, TypeVar, cast

from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.flight import Flight
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.tokens import ExpertOutput, Routing, Tokens

X = TypeVar("X")


class ReceivedTwice(MoEMKError, RuntimeError):
    """A receiver was called a second time; its tensors may already be in other hands."""


class Half(Generic[X]):
    """One half of a forward, under way: `hook()` then `receive()`."""

    def __init__(self, flight: Flight[X]) -> None:
        self._flight = flight
        self._result: list[X] = []
        self._landed = self._received = False
        self._advance()  # post now: up to the first hop

    def hook(self) -> None:
        """Wait until the data is here; harmless when called again."""
        while not self._landed:
            self._advance()

    def receive(self) -> X:
        """The result. Raises ReceivedTwice on a second call."""
        if self._received:
            raise ReceivedTwice("this half was already received; keep the result of the first call")
        self.hook()
        self._received = True
        return self._result.pop()

    def _advance(self) -> None:
        try:
            next(self._flight)
        except StopIteration as landed:
            self._result.append(cast(X, landed.value))
            self._landed = True


def prepare_async(transport: PrepareFinalize, x_TH: Tensor, routing: Routing) -> Half[Tokens]:
    """Start a dispatch."""
    return Half(transport.prepare(x_TH, routing))


def finalize_async(transport: PrepareFinalize, output: ExpertOutput, tokens: Tokens) -> Half[Tensor]:
    """Start a combine."""
    return Half(transport.finalize(output, tokens))
