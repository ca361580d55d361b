"""Whatever one rank meets at any step of any call that all ranks make, all of them end it at once, and go on.

Draws with fixed seeds: an exception of every kind, of an instruction or of a signal handler, at a line of the library
that the call passes; no descriptor left for a while; too little stack. After each, calls are right on all ranks."""

import pytest

from moe_mk.lab.testing.on_ranks import RankWorld
from tests.layer import any_verb_ranks as ranks
from tests.support.tiers import quick_where
from tests.support.worlds import world_of

TRANSPORTS = ("all_to_all", "one_sided", "one_sided_network")
world = world_of(2)


@pytest.mark.parametrize(
    ("transport", "verb"),
    quick_where(
        lambda transport, verb: (transport, verb) == ("all_to_all", "recover"),
        [("all_to_all", verb) for verb in ranks.VERBS]
        + [(other, verb) for other in TRANSPORTS[1:] for verb in ("forward", "swap_transport", "recover")],
    ),
)
def test_an_exception_at_any_step_of_any_call_ends_it_on_all_ranks_and_they_go_on(
    world: RankWorld, transport: str, verb: str
) -> None:
    draws = 4 if verb.startswith("swap") else 8
    assert world.call(ranks.thrown, transport, verb, draws, 1, timeout_s=300.0) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("transport", [*TRANSPORTS, "all_gather", "hierarchical", "all_to_all_p2p"])
def test_a_late_peer_ends_every_call_on_the_others_within_the_timeout(world: RankWorld, transport: str) -> None:
    verbs = ["first", *(verb for verb in ranks.VERBS if verb not in ranks.UNHEARD)]
    verbs = verbs if transport in TRANSPORTS else verbs[:2]
    assert world.call(ranks.late, transport, verbs, 1.0, timeout_s=200.0) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "step"), [("step", 1), ("forward", 1), ("swap", 1), ("load", 4), ("warm_up", 4)])
def test_where_the_stack_ends_within_a_call_peers_hear_of_it_at_once(world: RankWorld, verb: str, step: int) -> None:
    assert world.call(ranks.too_deep, "all_to_all", verb, step, timeout_s=300.0) == [[], []]


@pytest.mark.slow
def test_a_call_without_descriptors_ends_as_an_error_or_needs_none(world: RankWorld) -> None:
    verbs = ["swap", "swap_transport", "rebalance", "recover"]
    assert world.call(ranks.lacking_descriptors, "one_sided", verbs, timeout_s=300.0) == [[], []]


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", ranks.VERBS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_hundreds_of_exceptions(world: RankWorld, transport: str, verb: str, seed: int) -> None:
    assert world.call(ranks.thrown, transport, verb, 60, seed, timeout_s=3000.0) == [[], []]
