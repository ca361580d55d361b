"""Experts on EP ranks that are cut into TP slices: every slice moves, and all ranks of the grid flip together."""

from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.flight import interleave
from moe_mk.rebalance import RebalanceManager
from moe_mk.rebalance.peers import Peers
from tests.support.layers import live_method
from tests.support.rebalance_world import (
    LAYERS,
    SLICED,
    Rank,
    check_that_all_is_well,
    serve,
    settings,
)

HOT = (6, 7)
EP = TP = 2


def groups(ep: int = EP) -> list[tuple[Communicator, Communicator]]:
    """EP and TP group of each rank; rank = ep * TP + tp, as elsewhere."""
    columns = [LockstepWorld(ep).communicators() for _ in range(TP)]
    rows = [LockstepWorld(TP).communicators() for _ in range(ep)]
    return [(columns[tp][e], rows[e][tp]) for e in range(ep) for tp in range(TP)]


def grid(ep: int = EP, **changes: object) -> list[Rank]:
    return [Rank(column, HOT, row, **changes) for column, row in groups(ep)]


def stories_agree(ranks: Sequence[Rank]) -> None:
    check_that_all_is_well(ranks)
    maps = {tuple(layer.expert_map for layer in rank.layers) for rank in ranks}
    assert len(maps) == 1


@pytest.mark.row(109, 120, 123)
def test_every_slice_moves_and_no_output_differs_by_a_bit() -> None:
    ranks = grid()
    serve(ranks, 40)
    stories_agree(ranks)
    assert ranks[0].epochs[0] == (0, 0) and ranks[0].epochs[-1] == (1, 1)
    assert ranks[0].layers[0].expert_map.physical_to_global() != list(SLICED[EP])
    status = [rank.manager.status() for rank in ranks]
    assert status[0].balance["balance.step_over_ideal"] == pytest.approx(1.0, abs=0.03)
    # An expert of 3 x 8 x 8 f32 is 768 bytes: half of it to each TP rank, and all of it is what was predicted.
    assert sum(each.received_bytes for each in status) == status[0].predicted_bytes > 0
    assert status[0].predicted_bytes % 768 == 0
    assert [each.received_bytes for each in status[0::TP]] == [each.received_bytes for each in status[1::TP]]
    assert all(each.incidents == () and each.plan_id == 1 for each in status)


@pytest.mark.filterwarnings("ignore::moe_mk.rebalance.RebalanceWarning")
def test_a_slice_that_cannot_be_staged_keeps_all_ranks_on_the_old_map() -> None:
    ranks = grid(max_retries=1)

    with live_method(ranks[3].layers[0], "stage", Mock(side_effect=MemoryError("no room for a second half"))):
        serve(ranks, 40)
    # Layer 1, which needs new shares alone, flipped everywhere, and layer 0 nowhere.
    stories_agree(ranks)
    assert ranks[0].epochs[-1] == (0, 1)
    reported = [rank.manager.status().incidents for rank in ranks]
    assert "staging failed: MemoryError: no room" in reported[3][0].what
    assert all(any("dropped after 1 retries of 'layer 0'" in each.then for each in mine) for mine in reported)


@pytest.mark.filterwarnings("ignore::moe_mk.rebalance.RebalanceWarning")
def test_a_plan_damaged_between_slices_is_refused_by_all() -> None:
    ranks = grid()
    planner = ranks[0].manager._planner
    while planner.outbox is None:
        serve(ranks, 1)
    planner.outbox[50] ^= 1
    while not ranks[3].manager.status().incidents:
        serve(ranks, 1)
        assert len(ranks[0].epochs) < 20
    assert all("does not have the digest" in rank.manager.status().incidents[0].what for rank in ranks)
    assert all(rank.manager.status().epochs == (0, 0) for rank in ranks)
    serve(ranks, 40)
    stories_agree(ranks)
    assert ranks[3].manager.status().epochs == (1, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::moe_mk.rebalance.RebalanceWarning")
def test_slices_of_one_ep_rank_leave_together_and_their_experts_are_read_again() -> None:
    ranks = grid(3)
    assert ranks[0].layers[0].expert_map.num_ranks == 3
    serve(ranks, 4)
    left = [rank for rank in ranks if rank.original_rank != 2]
    interleave([rank.manager.rank_lost_steps(2, ep) for rank, (ep, _) in zip(left, groups(), strict=True)])
    lost = left[0].layers[0].expert_map.lost
    assert lost and all(layer.expert_map.lost == lost for rank in left for layer in rank.layers)
    for rank in left:
        rank.wrong.clear()
    serve(left, 60)
    assert all(rank.manager.status().lost_experts == {} for rank in left)
    read = [rank.manager.status().read_bytes for rank in left]  # each slice reads its own half of what its peer reads
    assert sum(read) > 0 and read[0::TP] == read[1::TP]
    for rank in left:
        rank.wrong.clear()
    serve(left, 3)
    stories_agree(left)


def _peers() -> list[Peers]:
    return [Peers(*each) for each in groups()]


def test_all_ranks_hear_the_same_votes() -> None:
    # Rank 1 is the second slice of EP rank 0: its 2 counts for EP rank 0, on every rank.
    peers, numbers = _peers(), [0, 2, 0, 1]
    heard = interleave([each.gather(number, "votes") for each, number in zip(peers, numbers, strict=True)])
    assert heard == [[2, 1]] * 4
    assert [each.leads for each in peers] == [True, False, False, False]


@pytest.mark.parametrize("texts", [[b"a"] * 4, [b"a", b"b", b"a", b"a"], [b"a", b"a", b"b", b"b"], [b"a", b"b"] * 2])
def test_a_difference_anywhere_is_known_everywhere(texts: list[bytes]) -> None:
    agreed = interleave([each.agree(text, "digests") for each, text in zip(_peers(), texts, strict=True)])
    assert agreed == [len(set(texts)) == 1] * 4


def test_one_more_number_a_sync_is_all_that_slices_cost_while_nothing_changes() -> None:
    ranks = grid(sync_every=10)
    for rank in ranks:
        quiet = settings(sync_every=10, resplit_gain=9.0)
        quiet = type(quiet)(**{**vars(quiet), "thresholds": type(quiet.thresholds)(9.0, 8.0, 1)})
        rank.manager = RebalanceManager(rank.layers, quiet)
    for rank in ranks:
        rank.manager.peers.tp.traffic.reset()
    serve(ranks, 40)
    calls = ranks[0].manager.peers.tp.traffic.calls_by_phase
    assert {phase: n for phase, n in calls.items() if phase.startswith("rebalance")} == {"rebalance load": 3}
    assert len(ranks[0].layers) == LAYERS
