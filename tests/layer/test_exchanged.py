"""A layer between ranks as one native call: its bits and counters are those of the steps, and so are its errors."""

from collections.abc import Iterator
from typing import Any

import pytest

from moe_mk.kernels.native.selfcheck import loaded
from moe_mk.lab.testing.on_ranks import RankWorld
from tests.layer import exchanged_ranks as ranks
from tests.layer.native import NEEDS_COMPILER
from tests.support.tiers import quick_where

pytestmark = NEEDS_COMPILER
EVERY = [0, 1, 2]
TRANSPORTS = pytest.mark.parametrize("transport", ["one_sided", "all_to_all"])


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    loaded()  # from here on every process finds them
    with RankWorld(3) as three:
        yield three


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"activations": "plain"},
    "fp8 rows": {"fp8": True, "activations": "checkpoint"},
    "two ranks": {"pair": True},
    "shared experts": {"shared": 1, "activations": "plain", "shared_scale": 0.5},
    "a router of its own": {"fused_router": False},
    "replicas": {"replicas": True},
    "batch-invariant": {"batch_invariant": True},
    "tuned by rows": {"tuned": True},
    "norm and scale": {"input_norm": 1e-6, "has_expert_scale": True},
}


@pytest.mark.parametrize("name", SETTINGS)
@TRANSPORTS
def test_it_leaves_the_bits_and_counters_of_the_steps(world: RankWorld, transport: str, name: str) -> None:
    assert world.call(ranks.compared, EVERY, False, SETTINGS[name] | {"prepare_finalize": transport}) == [[], [], []]


@pytest.mark.parametrize("who", [[0], [1, 2]])
@TRANSPORTS
def test_ranks_that_run_the_steps_take_part(world: RankWorld, transport: str, who: list[int]) -> None:
    assert world.call(ranks.compared, who, False, SETTINGS["plain"] | {"prepare_finalize": transport}) == [[], [], []]


@pytest.mark.parametrize("name", ["shared experts", "a router of its own"])
@TRANSPORTS
def test_a_listener_is_called_with_every_routing(world: RankWorld, transport: str, name: str) -> None:
    assert world.call(ranks.compared, EVERY, True, SETTINGS[name] | {"prepare_finalize": transport}) == [[], [], []]


@TRANSPORTS
def test_tokens_that_the_caller_has_routed_are_exchanged_alike(world: RankWorld, transport: str) -> None:
    assert world.call(ranks.routed, transport) == [[], [], []]


@pytest.mark.parametrize(
    "transport",
    quick_where(
        {"all_to_all"}.__contains__, ["all_to_all", "one_sided", "all_gather", "all_to_all_p2p", "one_sided_network"]
    ),
)
def test_random_sequences_of_calls_are_right_on_every_rank(world: RankWorld, transport: str) -> None:
    seeds = range(2) if transport == "all_to_all" else range(10, 12)
    assert world.call(ranks.sequences, transport, seeds, 12) == [[], [], []]


def test_both_pairs_of_a_layer_for_decode_and_prefill_make_it(world: RankWorld) -> None:
    assert world.call(ranks.two_pairs) == [[[3], [10], [3]]] * 3


@pytest.mark.parametrize("when", ["rows", "sums"])
@TRANSPORTS
def test_peers_may_be_later_than_it_polls(world: RankWorld, transport: str, when: str) -> None:
    assert world.call(ranks.late, transport, when) == [[], [], []]


@pytest.mark.parametrize(
    ("where", "phase", "reason"),
    [
        ("experts", "combine", "ValueError: injected"),
        ("listener", "dispatch", "ValueError: injected"),
        ("shared", "dispatch", "ValueError: injected"),
        ("slots", "dispatch", "is for slot 10"),
    ],
)
@TRANSPORTS
def test_a_failure_ends_the_call_on_all_ranks_and_a_recovery_serves_again(
    world: RankWorld, transport: str, where: str, phase: str, reason: str
) -> None:
    for rank, (failed, again) in enumerate(world.call(ranks.failing, transport, where)):
        assert again["is"] == "right" and again["native calls"] == 1
        assert failed["is"] == ("ValueError" if rank == 1 and where != "slots" else "CommError")
        assert failed["seconds"] < 10
        if failed["is"] == "ValueError":
            assert "rank 1 reported this to its 2 peers" in failed["text"]
        else:
            assert reason in failed["text"] and failed["peer"] == 1
            assert phase in failed["text"] or (where, rank) in (("slots", 1), ("slots", 2))


@pytest.mark.slow
@TRANSPORTS
def test_an_interrupt_ends_the_call_on_all_ranks_and_a_recovery_serves_again(world: RankWorld, transport: str) -> None:
    assert world.call(ranks.interrupted, transport, 17, timeout_s=300.0) == [[], [], []]
