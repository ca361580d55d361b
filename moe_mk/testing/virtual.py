"""Virtual ranks: all ranks of an EP x TP grid in one process and one thread, advanced in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from torch import Tensor

from moe_mk.comm.groups import ParallelGroups
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.comm.threads import ThreadWorld
from moe_mk.flight import Flight, interleave, land
from moe_mk.layer import MoELayer
from moe_mk.prepare_finalize.base import TransportTraits

X = TypeVar("X")

PATIENCE_S = 100.0
"""How long a rank that is a thread waits for its peers: a machine with other work may set each aside for long."""


def virtual_groups(ep: int = 1, tp: int = 1) -> list[ParallelGroups]:
    """The groups of every rank of a grid, TP neighbours side by side: rank = ep_rank * tp + tp_rank."""
    ep_worlds = [LockstepWorld(ep).communicators() for _ in range(tp)]
    tp_worlds = [LockstepWorld(tp).communicators() for _ in range(ep)]
    return [
        ParallelGroups(
            ep=ep_worlds[tp_rank][ep_rank] if ep > 1 else None, tp=tp_worlds[ep_rank][tp_rank] if tp > 1 else None
        )
        for ep_rank in range(ep)
        for tp_rank in range(tp)
    ]


def run_together(
    layers: Sequence[MoELayer], tokens: Sequence[Tensor], token_ids: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """One forward of every rank's layer on that rank's tokens. token_ids: theirs, where they choose the experts."""
    known = token_ids or [None] * len(layers)
    each = zip(layers, tokens, known, strict=True)
    return interleave([layer.steps(x_TH, token_ids_T=ids_T) for layer, x_TH, ids_T in each])


def world_of(traits: TransportTraits, size: int) -> LockstepWorld:
    """Where virtual ranks of a transport meet: in lockstep, or in threads where its calls wait for peers."""
    return ThreadWorld(size, timeout_s=PATIENCE_S) if traits.blocking else LockstepWorld(size)


def each_rank(world: LockstepWorld, jobs: Sequence[Callable[[], X]]) -> list[X]:
    """Do one job a rank: at once where ranks are threads, else one after the other."""
    return world.together(jobs) if isinstance(world, ThreadWorld) else [job() for job in jobs]


def fly_together(world: LockstepWorld, flights: Sequence[Flight[X]]) -> list[X]:
    """Land one flight of every rank."""
    if isinstance(world, ThreadWorld):
        return world.together([partial(land, flight) for flight in flights])
    return interleave(flights)


def fly_dual(world: LockstepWorld, flights: Sequence[tuple[Flight[X], ...]]) -> list[list[X]]:
    """Land several flights of every rank, all in the air at once, in each rank's order."""
    if isinstance(world, ThreadWorld):
        return world.together([partial(interleave, own) for own in flights])
    landed = iter(interleave([flight for own in flights for flight in own]))
    return [[next(landed) for _ in own] for own in flights]


def hops_of(flight: Flight[X], hops: list[str]) -> Flight[X]:
    """The same flight, with the name of every hop noted."""
    while True:
        try:
            hop = next(flight)
        except StopIteration as landed:
            return cast(X, landed.value)
        hops.append(hop.what)
        yield hop
