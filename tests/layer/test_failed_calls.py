"""A call that fails on one rank ends on all, is never taken for another, and can be followed by right ones. Real gloo
processes. The timeout is 20 s, so that an error within a few was reported and not waited for."""

from typing import Any

import pytest

from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from tests.layer import failing_ranks as ranks
from tests.support.tiers import quick_where, slow
from tests.support.worlds import world_of

TRANSPORTS = ["all_to_all", "all_gather", "hierarchical", "one_sided", "all_to_all_p2p", "one_sided_network"]
AT_ONCE_S = 5.0


def is_quick(transport: str) -> bool:
    """One transport of collectives and one of shared memory; the others are slow."""
    return transport in ("all_to_all", "one_sided")


world = world_of(3)


@pytest.mark.parametrize(
    "transport,error",
    [
        ("all_to_all", "MemoryError"), ("one_sided", "MemoryError"),
        *slow(("all_to_all", "KeyboardInterrupt"), ("one_sided", "KeyboardInterrupt")),
        *slow(("all_gather", "MemoryError"), ("hierarchical", "KeyboardInterrupt")),
        *slow(("all_to_all_p2p", "MemoryError"), ("one_sided_network", "KeyboardInterrupt")),
    ],
)  # fmt: skip
def test_a_caught_exception_ends_the_call_on_all_ranks_and_a_recovery_serves_again(
    world: RankWorld, transport: str, error: str
) -> None:
    found: list[list[dict[str, Any]]] = world.call(ranks.caught, transport, error)
    for rank, (first, failed, after, *recovered) in enumerate(found):
        assert first["is"] == "right", first
        if rank == 0:
            assert failed["is"] == error
        else:
            assert failed["is"] == "CommError" and failed["peer"] == 0, failed
            assert error in failed["text"] and failed["seconds"] < AT_ONCE_S, failed
        assert after["is"] == "CommError" and after["peer"] == 0 and error in after["text"], after
        assert "recover()" in after["text"]
        assert [call["is"] for call in recovered] == ["right"] * 4, recovered


def test_the_rank_that_failed_receives_what_its_peers_got(world: RankWorld) -> None:
    found = world.call(ranks.caught, "all_to_all", "ValueError")
    assert "reported this to its 2 peers" in found[0][1]["text"]
    assert "ValueError: bad expert" in found[1][1]["text"]


@pytest.mark.parametrize("transport", quick_where(is_quick, TRANSPORTS))
def test_ranks_with_different_numbers_of_micro_batches_get_errors_and_no_rows(world: RankWorld, transport: str) -> None:
    for (found,) in world.call(ranks.one_more_micro_batch, transport):
        assert found["is"] == "CommError", found
        assert found["seconds"] < AT_ONCE_S or transport.startswith("one_sided"), found


@pytest.mark.parametrize("transport", quick_where(is_quick, TRANSPORTS))
def test_calls_of_different_layers_never_meet(world: RankWorld, transport: str) -> None:
    found = world.call(ranks.another_layer, transport)
    for (outcome,) in found:
        assert outcome["is"] == "CommError" and outcome["seconds"] < AT_ONCE_S, outcome
    assert any("layer number" in outcome["text"] for (outcome,) in found), found


@pytest.mark.parametrize("transport", quick_where(is_quick, TRANSPORTS))
def test_two_threads_over_one_group_end_in_errors_and_never_in_wrong_rows(world: RankWorld, transport: str) -> None:
    found = [outcome for each in world.call(ranks.two_threads, transport) for outcome in each]
    assert [outcome for outcome in found if outcome["is"] not in ("right", "CommError")] == []
    assert any(outcome["is"] == "CommError" for outcome in found)


@pytest.mark.parametrize("transport", quick_where(is_quick, TRANSPORTS))
def test_an_abandoned_call_ends_on_the_other_ranks_at_once(world: RankWorld, transport: str) -> None:
    for rank, (found,) in enumerate(world.call(ranks.abandoned, transport)):
        assert found["is"] == "CommError" and "abandoned" in found["text"] and found["peer"] == 1, (rank, found)
        assert found["seconds"] < AT_ONCE_S


def test_a_shared_expert_that_fails_ends_the_call_on_all_ranks(world: RankWorld) -> None:
    for rank, (found,) in enumerate(world.call(ranks.shared_expert_fails)):
        assert found["is"] == ("MemoryError" if rank == 1 else "CommError"), found
        assert rank == 1 or ("MemoryError()" in found["text"] and found["peer"] == 1), found


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather", "hierarchical"])
@pytest.mark.parametrize("count", [10**17, -1, 65])
def test_counts_that_cannot_be_are_refused_before_memory_is_asked_for(
    world: RankWorld, transport: str, count: int
) -> None:
    for rank, (found,) in enumerate(world.call(ranks.hostile_counts, transport, count)):
        assert found["is"] == "CommError", found
        if rank != 1:
            assert found["peer"] == 1 and f"announced {count} rows, at most 64" in found["text"], found


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather", "hierarchical"])
@pytest.mark.parametrize("number", [1 << 30, -2])
def test_rows_for_experts_that_do_not_exist_are_refused_by_the_name_of_their_sender(
    world: RankWorld, transport: str, number: int
) -> None:
    for rank, (found,) in enumerate(world.call(ranks.hostile_ids, transport, number, 1)):
        assert found["is"] == "CommError" and found["peer"] == 1, (rank, found)
        assert f"{number}, out of range (0 <= " in found["text"], found


@pytest.mark.slow
def test_a_relay_refuses_rows_for_experts_that_do_not_exist() -> None:
    with RankWorld(4) as four:
        for rank, (found,) in enumerate(four.call(ranks.hostile_ids, "hierarchical", 8, 2)):
            assert found["is"] == "CommError" and found["peer"] == 1, (rank, found)
            assert "is for expert 8, out of range (0 <= expert < 8, or -1" in found["text"], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "late", "size"),
    [("all_to_all", None, 3), ("one_sided", None, 3), ("one_sided_network", None, 3), ("all_to_all", 0, 3),
     ("all_gather", -1, 3), ("all_to_all", None, 2), ("one_sided", None, 2)],
)  # fmt: skip
def test_after_a_death_the_others_go_on_over_the_same_process_group(
    transport: str, late: int | None, size: int
) -> None:
    with RankWorld(size) as world, pytest.raises(RankError) as died:
        world.call(ranks.go_on, transport, late, size)
    assert list(died.value.problems) == [1], died.value
    for rank, found in died.value.results.items():
        first, failed, second, third, old, left = found  # type: ignore[misc]
        assert first["is"] == "right" and failed["is"] == "CommError" and failed["peer"] == 1, (rank, failed)
        assert f"rank {rank}, phase '" in failed["text"] and (late is not None or failed["seconds"] < AT_ONCE_S), failed
        assert second["is"] == third["is"] == "right", (rank, second, third)
        assert old["is"] == "CommError" and "were left out" in old["text"], old
        assert left["is"] == f"rank {[0, None, 1][rank]} of {size - 1}, {transport if size > 2 else 'no_ep'}"


@pytest.mark.slow
def test_ranks_may_go_on_without_others_again_and_get_errors_where_they_are_different_ones() -> None:
    with RankWorld(4) as four:
        found = four.call(ranks.lose_twice_and_disagree)
    assert [each[0]["is"] for each in (found[0], found[3])] == ["[0, 3]"] * 2, found
    assert [each[-1]["is"] for each in found[:3]] == ["CommError"] * 3, found
    assert any("goes on without ranks" in each[-1]["text"] for each in found[:3]), found


@pytest.mark.slow
def test_on_a_grid_every_rank_hears_of_a_failure_and_none_is_named_for_itself() -> None:
    with RankWorld(4) as four:
        (zero,), (one,), (two,), (three,) = four.call(ranks.fails_on_a_grid)
    assert two["is"] == "MemoryError" and two["text"].count("reported this to its") == 1, two
    assert zero["peer"] == 1 and three["peer"] == 0, "EP rank 1 of its column, TP rank 0 of its row"
    assert one["is"] == "CommError" and one["peer"] in (0, 1) and "MemoryError" in one["text"], one
    assert all(found["seconds"] < AT_ONCE_S for found in (zero, one, three))
