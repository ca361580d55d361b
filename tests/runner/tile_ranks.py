"""Ranks that run tile by tile: transports around identity experts, in lockstep or in threads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.comm.threads import ThreadWorld
from moe_mk.experts.base import ExpertsContext
from moe_mk.flight import Flight, interleave, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.cases import RoutingCase
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.quant.plain import BF16
from moe_mk.runner import TileRecord
from moe_mk.runner.tiled_kernel import TiledKernel
from moe_mk.tokens import Routing
from tests.support.threads import job_threads_left

CPU, HIDDEN, MOST_TOKENS = torch.device("cpu"), 192, 8
Given = tuple[Tensor, Routing]


def kernel_of(name: str, comm: Any, place: ExpertMap, top_k: int) -> FusedMoEKernel:
    context = TransportContext(
        comm, place, place.tables(CPU), BF16, BF16, HIDDEN, top_k, CPU, max_num_tokens=MOST_TOKENS, allow_emulated=True
    )
    slots = place.num_slots(comm.rank)
    return FusedMoEKernel(
        PREPARE_FINALIZE[name](context), IdentityExperts(ExpertsContext(BF16, BF16, "silu", slots, HIDDEN, HIDDEN, CPU))
    )


def in_tiles(kernel: FusedMoEKernel, tiles: int, **settings: Any) -> TiledKernel:
    """The same kernel, tile by tile, with a record."""
    same = {field.name: getattr(kernel, field.name) for field in fields(FusedMoEKernel)}
    return TiledKernel(**{"record": TileRecord(), **same, **settings}, tiles=tiles)


class Ranks:
    def __init__(self, name: str, case: RoutingCase, *, threads: bool) -> None:
        self.case, self.traits = case, PREPARE_FINALIZE[name].traits
        count, top_k = len(case.routings), case.routings[0].ids_TK.shape[1]
        self.world = ThreadWorld(count, timeout_s=60.0) if threads else LockstepWorld(count)
        make = partial(kernel_of, name, place=case.expert_map, top_k=top_k)
        self.kernels = self.each([partial(make, comm) for comm in self.world.communicators()])

    def each(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        return self.world.together(jobs) if isinstance(self.world, ThreadWorld) else [job() for job in jobs]

    def fly(self, flights: Sequence[Flight[Any]]) -> list[Any]:
        if isinstance(self.world, ThreadWorld):
            return self.world.together([partial(wait, flight) for flight in flights])
        return interleave(flights)

    def tokens(self) -> list[Tensor]:
        """Normal rows, other ones on each rank unless the transport wants the same."""
        seeds = [0 if self.traits.partial else rank for rank in range(len(self.kernels))]
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        counts = zip(self.case.num_tokens, draws, strict=True)
        return [torch.randn((count, HIDDEN), generator=draw).to(torch.bfloat16) for count, draw in counts]

    def forward(self, kernels: Sequence[FusedMoEKernel]) -> list[Tensor]:
        given = zip(kernels, self.tokens(), self.case.routings, strict=True)
        return self.fly([kernel.steps(x_TH, routing, NO_WEIGHTS) for kernel, x_TH, routing in given])


def no_thread_is_left() -> bool:
    return job_threads_left() == 0


def both_ways(record: TileRecord) -> set[tuple[str, str]]:
    pairs = record.overlaps()
    return {*pairs, *((other, one) for one, other in pairs)}


class Meeting:
    """Steps that wait for each other: they pass only if a runner lets all of them be under way at once."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties, timeout=20.0)

    def wait(self) -> None:
        self._barrier.wait()


class Rendezvous:
    """A transport some of whose journeys, by name, wait in the middle for whoever else comes to a meeting."""

    def __init__(self, transport: Any, meetings: dict[str, Meeting]) -> None:
        self.transport, self.traits, self.context = transport, transport.traits, transport.context
        self.meetings, self._counts = meetings, {"D": 0, "C": 0}

    def _journey(self, kind: str, flight: Flight[Any]) -> Flight[Any]:
        name = f"{kind}{self._counts[kind]}"
        self._counts[kind] += 1
        arrived = yield from flight
        if name in self.meetings:
            self.meetings[name].wait()
        return arrived

    def prepare(self, *given: Any) -> Flight[Any]:
        return self._journey("D", self.transport.prepare(*given))

    def finalize(self, *given: Any) -> Flight[Any]:
        return self._journey("C", self.transport.finalize(*given))


class MeetingExperts:
    """Experts that come to a meeting with some of their tiles."""

    def __init__(self, experts: Any, meetings: dict[str, Meeting]) -> None:
        self.experts, self.traits, self.meetings, self._count = experts, experts.traits, meetings, 0

    def __call__(self, *given: Any) -> Any:
        name, self._count = f"M{self._count}", self._count + 1
        if name in self.meetings:
            self.meetings[name].wait()
        return self.experts(*given)
