"""A group of one: nothing moves, nothing is in flight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.flight import Flight, InFlight


class SingleRank(Communicator):
    """The communicator of a layer that got no group."""

    rank = 0
    size = 1

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        yield InFlight(phase)
        return rows

    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        yield InFlight(phase)
        return rows

    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        yield InFlight(phase)
        return x
