"""Micro-batches in the six steps of a low-latency decode: the order of events, and the bits of one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.flight import Flight, interleave, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle import Parts, assemble, select
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.runner import MicroBatch, finishes_async, run_dual, staggered
from moe_mk.testing.experts import random_experts
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import ExpertWeights
from tests.support.formats import EXPERTS, FORMATS, HIDDEN, INNER, TOP_K

CPU, RANKS = torch.device("cpu"), 2
FORM = FORMATS[1]


def kernels(transport: str) -> list[tuple[FusedMoEKernel, ExpertWeights]]:
    ranks = 1 if transport == "no_ep" else RANKS
    decision = select(FORM.problem(ep=ranks, prepare_finalize=transport, experts="reference"))
    stack, made = random_experts(FORM.problem().weights, EXPERTS, HIDDEN, INNER, CPU), []
    expert_map = ExpertMap.linear(EXPERTS, ranks)
    for comm in LockstepWorld(ranks).communicators():
        kernel = assemble(decision, Parts(expert_map, CPU, comm))
        assert isinstance(kernel, FusedMoEKernel)
        own = torch.tensor(expert_map.local_to_global(comm.rank))
        made.append((kernel, ExpertWeights(stack.w13[own], stack.w2[own])))
    return made


def batches(rank: int, counts: tuple[int, ...]) -> list[MicroBatch]:
    made = []
    for number, count in enumerate(counts):
        draw = torch.Generator().manual_seed(10 * number + rank)
        x_TH = torch.randn((count, HIDDEN), generator=draw).to(FORM.dtype.dtype)
        ids_TK = torch.rand((count, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
        made.append(MicroBatch(x_TH, Routing(ids_TK, torch.rand(ids_TK.shape, generator=draw))))
    return made


def in_turn(
    kernel: FusedMoEKernel, weights: ExpertWeights, given: list[MicroBatch], note: Callable[[str], None] = str
) -> Flight[list[Tensor]]:
    return staggered(kernel.prepare_finalize, lambda tokens: kernel.multiply(tokens, weights), given, note)


@pytest.mark.row(48)
@pytest.mark.parametrize("transport", ["no_ep", "all_to_all", "one_sided"])
@pytest.mark.parametrize(
    "counts,order",
    [
        ((), ""),
        ((3,), "D0i D0r M0 C0i C0r"),
        ((5, 2), "D0i / D0r D1i / M0 / C0i D1r / M1 / C1i C0r / C1r"),
        ((5, 0, 2), "D0i / D0r D1i / M0 / C0i D1r C0r D2i / M1 / C1i D2r / M2 / C2i C1r / C2r"),
    ],
)
def test_journeys_are_issued_and_received_in_the_six_steps(transport: str, counts: tuple[int, ...], order: str) -> None:
    ranks = kernels(transport)
    events: list[list[str]] = [[] for _ in ranks]
    flights = [
        in_turn(kernel, weights, batches(rank, counts), events[rank].append)
        for rank, (kernel, weights) in enumerate(ranks)
    ]
    home = interleave(flights)
    assert all(log == order.replace("/ ", "").split() for log in events)
    # The same kernels, one batch after the other.
    for number in range(len(counts)):
        alone = interleave([
            kernel.steps(*vars(batches(rank, counts)[number]).values(), weights)
            for rank, (kernel, weights) in enumerate(ranks)
        ])  # fmt: skip
        assert all(torch.equal(home[rank][number], alone[rank]) for rank in range(len(ranks)))


@pytest.mark.row(48)
@pytest.mark.parametrize("counts", [(4, 4), (1, 2, 3, 4, 0, 6)])
def test_no_more_than_two_journeys_are_under_way(counts: tuple[int, ...]) -> None:
    ((kernel, weights),) = kernels("no_ep")
    under_way, most = 0, 0

    def watch(event: str) -> None:
        nonlocal under_way, most
        under_way += {"i": 1, "r": -1}.get(event[-1], 0)
        most = max(most, under_way)

    wait(in_turn(kernel, weights, batches(0, counts), watch))
    assert (most, under_way) == (2, 0)


def test_two_layers_of_micro_batches_are_a_flight_as_well() -> None:
    ranks = kernels("all_to_all")

    def both(rank: int, kernel: FusedMoEKernel, weights: ExpertWeights) -> Flight[list[Tensor]]:
        first = yield from in_turn(kernel, weights, batches(rank, (3, 2)))
        routed = [batch.routing for batch in batches(rank, (3, 2))]
        again = [MicroBatch(x_TH, routing) for x_TH, routing in zip(first, routed, strict=True)]
        return (yield from in_turn(kernel, weights, again))

    home = run_dual([both(rank, *made) for rank, made in enumerate(ranks)])
    assert [[len(y_TH) for y_TH in outputs] for outputs in home] == [[3, 2]] * RANKS


@pytest.mark.row(95)
@pytest.mark.parametrize(
    "asked_async,overlaps_batches,finishes",
    [(False, False, False), (False, True, False), (True, False, True), (True, True, False)],
)
def test_a_call_finishes_later_only_if_asked_and_nothing_else_overlaps(
    asked_async: bool, overlaps_batches: bool, finishes: bool
) -> None:
    assert finishes_async(asked_async=asked_async, overlaps_batches=overlaps_batches) is finishes
