"""An interrupt (Ctrl-C) anywhere within a call ends it on all ranks at once, and a recovery serves again."""

import random

import pytest

from moe_mk.lab.testing.on_ranks import RankWorld
from tests.layer import interrupted_ranks as ranks
from tests.support.tiers import quick_where
from tests.support.worlds import world_of

world = world_of(2)


def tried(world: RankWorld, transport: str, most: int, *, first: bool, dual: bool, handlers: int | None = None) -> None:
    """So many places of a call, drawn with a fixed seed. handlers: the seed of what is raised there."""
    count, draw = world.call(ranks.places_in, transport, first, dual)[0], random.Random(0)
    places = draw.sample(range(1, count + 1), min(count, most))
    if first:  # buffers are opened at the beginning
        places += draw.sample(range(1, count // 20), min(count // 20 - 1, most))
    found = world.call(ranks.interrupted, transport, places, first, dual, handlers, timeout_s=600.0)
    assert found == [[], []]


@pytest.mark.parametrize(
    ("transport", "most"),
    quick_where(
        lambda transport, most: most < 9,
        [("one_sided", 6), ("one_sided", 20), ("all_to_all", 9), ("one_sided_network", 9)],
    ),
)
def test_what_a_handler_raises_in_the_set_up_passes_through_and_blames_no_peer(
    world: RankWorld, transport: str, most: int
) -> None:
    tried(world, transport, most, first=True, dual=False, handlers=0)


@pytest.mark.parametrize(
    ("transport", "raised"),
    quick_where(
        lambda transport, raised: (transport, raised) == ("all_to_all", ranks.StepTimeout),
        [
            (each, kind)
            for each in ("all_to_all", "all_gather", "one_sided")
            for kind in (ranks.StepTimeout, TimeoutError)
        ],
    ),
)
def test_what_a_handler_raises_in_a_wait_passes_through_and_blames_no_peer(
    world: RankWorld, transport: str, raised: type[Exception]
) -> None:
    assert world.call(ranks.raised_by_a_handler, transport, raised) == [[], []]


def test_a_recovery_without_a_failed_call_ends_the_calls_of_peers(world: RankWorld) -> None:
    assert world.call(ranks.recovers_before_its_call) == [[], []]


@pytest.mark.slow
def test_messages_that_were_posted_outlive_an_interrupt(world: RankWorld) -> None:
    assert world.call(ranks.long_rows, 5) == [[], []]


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather", "hierarchical", "one_sided", "one_sided_network"])
def test_an_interrupt_at_any_instruction_can_be_recovered_from(
    world: RankWorld, transport: str, first: bool, dual: bool
) -> None:
    tried(world, transport, 120, first=first, dual=dual)
