"""Micro-batches as the tiles of a plan: the order of events, and the bits of one after the other."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from moe_mk.flight import Flight, interleave
from moe_mk.kernel import FusedMoEKernel
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.runner import MicroBatch, TileRecord, TileWork, in_turns, plan_for, run_dual
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import Weights
from tests.support.formats import EXPERTS, FORMATS, HIDDEN, TOP_K, kernels_of

RANKS = 2
FORM = FORMATS[1]


def kernels(transport: str) -> list[tuple[FusedMoEKernel, Weights]]:
    return kernels_of(FORM, transport, ExpertMap.linear(EXPERTS, 1 if transport == "no_ep" else RANKS))


def batches(rank: int, counts: tuple[int, ...]) -> list[MicroBatch]:
    made = []
    for number, count in enumerate(counts):
        draw = torch.Generator().manual_seed(10 * number + rank)
        x_TH = torch.randn((count, HIDDEN), generator=draw).to(FORM.dtype.dtype)
        ids_TK = torch.rand((count, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
        made.append(MicroBatch(x_TH, Routing(ids_TK, torch.rand(ids_TK.shape, generator=draw))))
    return made


def in_turn(
    kernel: FusedMoEKernel, weights: Weights, given: list[MicroBatch], record: TileRecord | None = None
) -> Flight[list[Tensor]]:
    transport = kernel.prepare_finalize
    work = TileWork(transport, lambda tokens: kernel.multiply(tokens, weights), given)
    return in_turns(work, plan_for(transport, len(given)), record or TileRecord())


@pytest.mark.row(48)
@pytest.mark.parametrize("transport", ["no_ep", "all_to_all", "one_sided"])
@pytest.mark.parametrize("counts", [(3,), (5, 2), (5, 0, 2), (1, 2, 3, 4, 0, 6)])
def test_micro_batches_of_any_sizes_take_turns_with_the_bits_of_one_after_the_other(
    transport: str, counts: tuple[int, ...]
) -> None:
    ranks = kernels(transport)
    records = [TileRecord() for _ in ranks]
    outputs = interleave([
        in_turn(kernel, weights, batches(rank, counts), records[rank])
        for rank, (kernel, weights) in enumerate(ranks)
    ])  # fmt: skip
    for record, (kernel, _) in zip(records, ranks, strict=True):
        began = [str(event.step) for event in record.events if event.what == "begins"]
        assert began == [str(step) for step in plan_for(kernel.prepare_finalize, len(counts)).order]
        in_flight = list(accumulate({"i": 1, "r": -1}.get(name[-1], 0) for name in began))
        assert max(in_flight) <= 2 and in_flight[-1] == 0, "two alternating buffers are enough"
    # The same kernels, one batch after the other.
    for number in range(len(counts)):
        alone = interleave([
            kernel.steps(*vars(batches(rank, counts)[number]).values(), weights)
            for rank, (kernel, weights) in enumerate(ranks)
        ])  # fmt: skip
        assert all(torch.equal(outputs[rank][number], alone[rank]) for rank in range(len(ranks)))


def test_two_layers_of_micro_batches_are_a_flight_as_well() -> None:
    ranks = kernels("all_to_all")

    def both(rank: int, kernel: FusedMoEKernel, weights: Weights) -> Flight[list[Tensor]]:
        first = yield from in_turn(kernel, weights, batches(rank, (3, 2)))
        routed = [batch.routing for batch in batches(rank, (3, 2))]
        again = [MicroBatch(x_TH, routing) for x_TH, routing in zip(first, routed, strict=True)]
        return (yield from in_turn(kernel, weights, again))

    outputs = run_dual([both(rank, *made) for rank, made in enumerate(ranks)])
    assert [[len(y_TH) for y_TH in each] for each in outputs] == [[3, 2]] * RANKS
