"""The whole of it on four ranks in lockstep: outputs equal to the bit whatever moves, and nothing dies in silence."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moe_mk import ConfigError, ExpertMap
from moe_mk.comm import LockstepWorld
from moe_mk.flight import interleave
from moe_mk.placement.eplb import PlacementPlan, Topology, plan
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.rebalance import RebalanceManager, RebalanceWarning, Thresholds
from tests.support.rebalance_world import (
    PLACEMENT,
    RANKS,
    Rank,
    check_that_all_is_well,
    expected,
    holds_right_weights,
    layers_of,
    lose,
    routing,
    serve,
    settings,
)


def world(hot: tuple[int, ...] = (6,), **changes: object) -> list[Rank]:
    return [Rank(comm, hot, **changes) for comm in LockstepWorld(RANKS).communicators()]


@pytest.mark.row(109, 120)
def test_output_is_equal_to_the_bit_before_during_and_after() -> None:
    ranks = world()
    serve(ranks, 40)
    assert [rank.wrong for rank in ranks] == [[]] * RANKS
    assert ranks[0].epochs[0] == (0, 0) and ranks[0].epochs[-1] == (1, 1)
    assert all(holds_right_weights(layer, x) for rank in ranks for x, layer in enumerate(rank.layers))
    before, after = ExpertMap.from_physical(PLACEMENT, RANKS, 8), ranks[0].layers[0].expert_map
    assert after.physical_to_global() != before.physical_to_global()
    status = ranks[0].manager.status()
    assert status.balance["balance.rank_max_over_mean_worst"] == pytest.approx(1.0, abs=1e-6)
    assert status.incidents == () and status.state == "watching"


@pytest.mark.row(108)
def test_round_robin_placement_is_rebalanced_like_any_other_where_there_are_tables() -> None:
    """vLLM falls back to linear placement under EPLB; here tables follow every placement, so none is refused."""
    ranks = world((2, 6), placement="round_robin")
    assert ranks[0].layers[0].expert_map == ExpertMap.round_robin(8, RANKS)  # rank 2 holds both hot experts
    serve(ranks, 40)
    assert [rank.wrong for rank in ranks] == [[]] * RANKS and ranks[0].epochs[-1] == (1, 1)
    after = ranks[0].layers[0].expert_map
    assert after != ExpertMap.round_robin(8, RANKS) and not {2, 6} <= set(after.local_to_global(2))
    assert all(holds_right_weights(layer, x) for rank in ranks for x, layer in enumerate(rank.layers))


def test_a_plan_with_two_copies_on_a_rank_is_served_and_left() -> None:
    """As DeepSeek's EPLB makes it: expert 6 three times on ranks 0 and 1, expert 0 twice on rank 2."""
    twice = (6, 6, 1, 6, 2, 3, 0, 0, 4, 5, 6, 7)
    ranks = world((0, 6), placement=twice)
    serve(ranks, 40)
    check_that_all_is_well(ranks)
    assert ranks[0].epochs[0] == (0, 0) and ranks[0].epochs[-1] == (1, 1)


@pytest.mark.parametrize("split", ["equal", "weighted"])
def test_the_plan_of_deepseek_with_two_copies_on_a_rank_is_taken_up(split: str) -> None:
    def planner(load: NDArray[np.float64], topology: Topology, slots: NDArray[np.int64]) -> PlacementPlan:
        hot = np.full_like(load, 1.0)
        hot[:, 3] = 90.0  # five replicas on four ranks
        return plan(hot, topology, policy="compat", split=split)

    ranks = world((3,))
    for rank in ranks:
        rank.manager = RebalanceManager(rank.layers, settings(), planner=planner)
    serve(ranks, 40)
    check_that_all_is_well(ranks)
    dealt = ranks[0].layers[0].expert_map
    assert any(len(set(own)) < len(own) for own in dealt.experts_of_rank) and min(ranks[0].epochs[-1]) > 0


@pytest.mark.row(108)
def test_a_transport_without_tables_refuses_round_robin() -> None:
    def explained(placement: str) -> str:
        class Numbered(AllToAll):
            """Finds the rank of an expert by division."""

            traits = replace(AllToAll.traits, tables=False)

        asked = layers_of(LockstepWorld(RANKS).communicators()[0], placement=placement)[0].explain().problem
        return "; ".join(map(str, Numbered.reasons_against(asked)))

    assert explained("linear") == ""
    wanted = "has no placement tables and serves the linear placement only, parallel.placement is round_robin"
    assert explained("round_robin") == f"{wanted} [parallel.placement = linear]"


@pytest.mark.row(123)
def test_all_ranks_flip_at_the_same_step_and_one_that_did_not_is_stopped() -> None:
    ranks = world()
    serve(ranks, 40)
    assert all(rank.epochs == ranks[0].epochs for rank in ranks)
    # One rank alone on another map: the first forward after a flip compares notes and refuses on all ranks.
    alone = ranks[2].layers[0]
    alone.live.set_placement(alone.expert_map)
    with pytest.raises(Exception, match="in phase|ranks decided differently|epoch"):
        serve(ranks, 1)


def test_nothing_but_one_small_sum_travels_while_nothing_changes() -> None:
    ranks = world(sync_every=10, thresholds=Thresholds(9.0, 8.0, 1), resplit_gain=9.0)
    serve(ranks, 40)
    calls = ranks[0].manager.comm.traffic.calls_by_phase
    assert {phase: n for phase, n in calls.items() if phase.startswith("rebalance")} == {"rebalance load": 4}


def test_even_ranks_are_left_alone() -> None:
    ranks = world(thresholds=Thresholds(3.0, 2.0, 1), resplit_gain=3.0)
    serve(ranks, 20)
    status = ranks[0].manager.status()
    assert status.plan_id == 0 and status.epochs == (0, 0) and status.balance["balance.expert_cv"] > 0
    assert json.loads(json.dumps(status.as_dict()))["state"] == "watching", "it is plain data"


def test_new_shares_alone_move_no_weights() -> None:
    ranks = world(hot=(0,), thresholds=Thresholds(9.0, 8.0, 1))
    serve(ranks, 12)
    status = ranks[0].manager.status()
    assert status.plan_id == 1 and status.epochs == (1, 1) and status.predicted_bytes == 0
    assert ranks[0].layers[0].expert_map.physical_to_global() == list(PLACEMENT)
    assert [rank.wrong for rank in ranks] == [[]] * RANKS
    # What is in force is not announced again.
    serve(ranks, 12)
    assert ranks[0].manager.status().plan_id == 1


def test_a_plan_that_is_asked_for_follows_new_shares_that_were_on_their_way() -> None:
    asked: list[int] = []

    def planner(load: NDArray[np.float64], topology: Topology, slots: NDArray[np.int64]) -> PlacementPlan:
        asked.append(ranks[0].manager.status().plan_id)
        return plan(load, topology, old=slots)

    ranks = world(hot=(0,))
    for rank in ranks:
        rank.manager = RebalanceManager(rank.layers, settings(thresholds=Thresholds(9.0, 8.0, 1)), planner=planner)
    while ranks[0].manager.state != "planning":  # new shares wait to be announced
        serve(ranks, 1)
    ranks[0].manager.plan_soon()
    serve(ranks, 12)
    check_that_all_is_well(ranks)
    assert asked[:1] == [1], "the shares were the first plan"


@pytest.mark.slow
@pytest.mark.row(133)
def test_a_swinging_load_costs_one_plan_per_dwell_time() -> None:
    plans: list[int] = []

    def planner(load: NDArray[np.float64], topology: Topology, slots: NDArray[np.int64]) -> PlacementPlan:
        plans.append(len(ranks[0].epochs))
        return plan(load, topology, old=slots)

    ranks = world()
    for rank in ranks:
        swinging = settings(thresholds=Thresholds(1.1, 1.05, dwell=35))
        rank.manager = RebalanceManager(rank.layers, swinging, planner=planner)
    for turn in range(24):
        for rank in ranks:
            rank.turn_to((6,) if turn % 2 else (0,))
        serve(ranks, 5)
    assert 2 <= len(plans) <= 1 + 120 // 35
    assert all(later - earlier >= 35 for earlier, later in pairwise(plans))
    received = sum(rank.manager.status().received_bytes for rank in ranks)
    assert ranks[0].manager.status().predicted_bytes >= received > 0, "of all plans together"
    assert [rank.wrong for rank in ranks] == [[]] * RANKS


def test_a_planner_that_returns_nonsense_changes_nothing() -> None:
    def planner(load: NDArray[np.float64], topology: Topology, slots: NDArray[np.int64]) -> PlacementPlan:
        return plan(load[:1], topology)  # one layer of two

    ranks = world()
    for rank in ranks:
        rank.manager = RebalanceManager(rank.layers, settings(), planner=planner)
    with pytest.warns(RebalanceWarning, match="planning failed"):
        serve(ranks, 10)
    assert ranks[0].manager.status().epochs == (0, 0)
    assert [rank.wrong for rank in ranks] == [[]] * RANKS


@pytest.mark.parametrize("under_way", ["plan", "migration"])
def test_a_halted_manager_rests_until_its_ranks_recover_and_then_plans_anew(under_way: str) -> None:
    ranks = world()
    first = ranks[0].manager
    while (first._planner.outbox if under_way == "plan" else first._migration) is None:
        serve(ranks, 1)
    ranks[1].layers[0].ep.fail(ArithmeticError("a bad forward"))  # as a failed call of a layer reports it
    with pytest.warns(RebalanceWarning, match="rank 1"):
        interleave([rank.manager.steps() for rank in ranks])
    stopped = [rank.manager.status() for rank in ranks]
    sent = [dict(rank.layers[0].ep.traffic.bytes_by_phase) for rank in ranks]
    for number in range(5):  # the first rank has one call more
        interleave([rank.manager.steps() for rank in (ranks if number else ranks[:1])])
    for rank, before, phases in zip(ranks, stopped, sent, strict=True):
        after = rank.manager.status()
        assert after.state == "halted" and len(before.incidents) == 1 and after.incidents == before.incidents
        assert dict(rank.layers[0].ep.traffic.bytes_by_phase) == phases, "nothing travels"
    interleave([rank.layers[0].ep.recover() for rank in ranks])
    serve(ranks, 40)
    assert [rank.wrong for rank in ranks] == [[]] * RANKS and ranks[0].epochs[-1] == (1, 1)
    assert all(holds_right_weights(layer, x) for rank in ranks for x, layer in enumerate(rank.layers))
    assert {len(rank.manager.status().incidents) for rank in ranks} == {1} and first.status().state == "watching"


def test_until_they_are_repaired_lost_experts_add_nothing_and_others_are_untouched() -> None:
    ranks = world(thresholds=Thresholds(9.0, 8.0, 1), resplit_gain=9.0)
    serve(ranks, 2)
    with pytest.warns(RebalanceWarning):
        left = lose(ranks, 3)
    gone = left[0].layers[0].expert_map.lost
    assert gone == {6, 7}  # expert 1, in the same rank's third slot, has its other copy on rank 0
    outputs = interleave([rank.forward() for rank in left])
    for rank, made in zip(left, outputs, strict=True):
        ids_TK = routing(rank.original_rank, 0, rank.hot).ids_TK
        whole_T = ~torch.isin(ids_TK, torch.tensor(sorted(gone), dtype=torch.int32)).any(1)
        assert torch.equal(made[0][whole_T], expected(rank.original_rank, 0, rank.hot)[whole_T])
        assert not torch.equal(made[0], expected(rank.original_rank, 0, rank.hot))


def test_a_rank_that_died_between_two_flips_takes_the_others_along() -> None:
    ranks = world()
    while ranks[0].manager.status().epochs == (0, 0):
        serve(ranks, 1)
    # Rank 1 heard the last vote a moment too late: it is still where it was, with its half ready.
    late = ranks[1].manager
    while late._migration is None or late._migration.staged is None:
        before = [rank.manager._flips for rank in ranks]
        flights = [rank.serve() for rank in ranks]
        hold = late._migration
        if hold is not None:
            flip, hold.flip = hold.flip, lambda: None  # type: ignore[method-assign]
            interleave(flights)
            hold.flip = flip  # type: ignore[method-assign]
            if hold.staged is not None:
                late._flips = before[1]
                late._migration = hold
                break
        else:
            interleave(flights)
        assert len(ranks[0].epochs) < 60
    assert ranks[1].layers[1].epoch != ranks[0].layers[1].epoch
    with pytest.warns(RebalanceWarning):
        left = lose(ranks, 3)
    assert len({tuple(layer.epoch for layer in rank.layers) for rank in left}) == 1
    assert len({rank.layers[1].expert_map for rank in left}) == 1


def test_what_cannot_be_rebalanced_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="no layers were passed"):
        RebalanceManager([])
    comm = LockstepWorld(RANKS).communicators()[0]
    layers = layers_of(comm)
    layers[1].live.set_placement(ExpertMap(((0, 1, 4), (2, 3), (4, 5, 0), (6, 7, 1)), 8))
    with pytest.raises(ConfigError, match="2 layers have 2 different sizes"):
        RebalanceManager(layers)
    with pytest.raises(ConfigError, match=r"sync_every=0 must be at least 1; bytes_per_step=0 must be at least 1"):
        settings(sync_every=0, bytes_per_step=0)
    with pytest.raises(ConfigError, match="rebalance settings: no EPLB policy is called 'flatt'; did you mean 'flat'"):
        settings(policy="flatt")


def test_layers_of_different_groups_are_refused() -> None:
    one, two, three = (layers_of(LockstepWorld(n).communicators()[0], placement="linear")[0] for n in (RANKS, 2, 3))
    with pytest.raises(ConfigError, match=r"layers and their groups have \[2, 3\] ranks; they must all have the same"):
        RebalanceManager([two, three])
    one.state.experts.grid.tp = LockstepWorld(2).communicators()[0]
    with pytest.raises(ConfigError, match=r"experts of the layers are cut into \[1, 2\] slices"):
        RebalanceManager([one, two])
