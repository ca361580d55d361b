"""Two pipeline stages of two expert-parallel ranks: finished tiles leave while later ones still return."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.comm.threads import ThreadWorld
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight, InFlight, wait
from moe_mk.lab.testing.cases import hostile_routings
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.runner import StageLink, TileRecord, tile_sizes
from tests.runner.tile_ranks import CPU, HIDDEN, Meeting, Ranks, Rendezvous, both_ways, in_tiles, no_thread_is_left

TILES = 4


def links() -> list[list[StageLink]]:
    """Of each EP rank: the ends at the earlier and the later stage."""
    return [[StageLink(comm) for comm in ThreadWorld(2).communicators()] for _ in range(2)]


def meeting_send(link: StageLink, meeting: Meeting, tile: int, y_XH: Tensor) -> Flight[None]:
    """Send; tile 0 is under way until somebody else comes to the meeting."""
    yield from link.send(tile, y_XH)
    if tile == 0:
        meeting.wait()


def later_stage(link: StageLink, kernel: Any, num_tokens: int, routing: Any) -> Tensor:
    """Receive tile by tile, then run the stage's own layer tile by tile."""
    sizes = tile_sizes(num_tokens, TILES)
    tiles = [wait(link.receive(size, HIDDEN, torch.bfloat16, CPU)) for size in sizes]
    assert [len(tile) for tile in tiles] == list(sizes)
    return wait(kernel.steps(torch.cat(tiles), routing, NO_WEIGHTS))


@pytest.mark.row(28, 42)
@pytest.mark.parametrize("case", [0, 2, 4], ids=["even", "an idle rank", "uneven"])
def test_a_tile_goes_to_the_next_stage_while_the_next_one_returns(case: int) -> None:
    """S0 and C1 end only together, and the later stage gets what one stage after the other would give it."""
    given = hostile_routings(2)[case]
    early, late = (Ranks("all_to_all", given, threads=True) for _ in range(2))
    first = early.forward(early.kernels)
    once_more = zip(late.kernels, first, given.routings, strict=True)
    serial = late.fly([kernel.steps(x_TH, routing, NO_WEIGHTS) for kernel, x_TH, routing in once_more])
    jobs, records = [], [TileRecord(), TileRecord()]
    for rank, (here, there) in enumerate(links()):
        meeting = Meeting(2)
        transport = Rendezvous(early.kernels[rank].prepare_finalize, {"C1": meeting})
        settings = {"executor": "thread", "record": records[rank], "prepare_finalize": transport}
        leave = partial(meeting_send, here, meeting)
        stage = in_tiles(early.kernels[rank], TILES, onward=leave, **settings)
        routing, own = given.routings[rank], in_tiles(late.kernels[rank], TILES, executor="thread")
        jobs.append(partial(wait, stage.steps(early.tokens()[rank], routing, NO_WEIGHTS)))
        jobs.append(partial(later_stage, there, own, given.num_tokens[rank], routing))
    with ThreadPoolExecutor(4) as ranks:
        done = [each.result() for each in [ranks.submit(job) for job in jobs]]
    for rank in range(2):
        assert torch.equal(done[2 * rank], first[rank]) and torch.equal(done[2 * rank + 1], serial[rank])
        assert ("S0", "C1") in both_ways(records[rank])
    assert no_thread_is_left()


@pytest.mark.row(42)
def test_in_one_thread_a_tile_is_under_way_to_the_next_stage_too() -> None:
    made = Ranks("all_to_all", hostile_routings(2)[4], threads=False)
    sent: list[list[Tensor]] = [[], []]

    def leave(rank: int, tile: int, y_XH: Tensor) -> Flight[None]:
        assert tile == len(sent[rank])
        sent[rank].append(y_XH)
        yield InFlight("next stage")

    kernels = [in_tiles(kernel, TILES, onward=partial(leave, rank)) for rank, kernel in enumerate(made.kernels)]
    for y_TH, tiles, kernel in zip(made.forward(kernels), sent, kernels, strict=True):
        assert torch.equal(torch.cat(tiles), y_TH)
        assert {("C1", "S0"), ("C2", "S1")} <= both_ways(kernel.record) and ("S0", "S1") not in both_ways(kernel.record)


def test_a_link_has_two_ends() -> None:
    with pytest.raises(ConfigError, match=r"is a group of 2 ranks, this one has 3; .*rank_groups"):
        StageLink(LockstepWorld(3).communicators()[0])
