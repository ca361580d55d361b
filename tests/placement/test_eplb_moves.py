"""From an old placement to a new one: few moves, near sources, few rounds, and nothing that does not pay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from moe_mk.errors import ShapeError
from moe_mk.lab.cli.place import moved_bytes
from moe_mk.placement.balance.change import Bench
from moe_mk.placement.balance.moves import aligned_slots, assign, colour_rounds, num_arrivals, plan_moves
from moe_mk.placement.balance.topology import Sites
from moe_mk.placement.eplb import InfeasiblePlacement, Moves, PlacementPlan, Policy, Topology, plan

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]


def served(layers: int, experts: int, seed: int = 0) -> Doubles:
    rng = np.random.default_rng(seed)
    return np.exp(0.75 * rng.normal(size=(layers, experts)))


def counted(load: Doubles, seed: int, tokens: int = 1_000_000) -> Doubles:
    part = load / load.sum(1, keepdims=True)
    return np.random.default_rng(seed).poisson(part * tokens).astype(float)


def carried_out(old: Ints, moves: Moves) -> Ints:
    """What the slots hold once every move is made."""
    slots = old.copy()
    slots[moves.layer, moves.slot] = moves.expert
    return slots


def check_rounds(src: Ints, dst: Ints, rounds: Ints) -> None:
    for each in set(rounds.tolist()):
        now = rounds == each
        assert len(set(src[now].tolist())) == now.sum() == len(set(dst[now].tolist()))
    degree = max(np.bincount(src).max(), np.bincount(dst).max())
    assert rounds.min() >= 0 and rounds.max() + 1 <= degree


def test_an_assignment_costs_least():
    cost = np.array([[[4.0, 1, 3], [2, 0, 5], [3, 2, 2]]])  # rows 0, 1, 2 take columns 1, 0, 2: 1 + 2 + 2
    assert assign(cost).tolist() == [[1, 0, 2]] and assign(cost[:, :1, :1]).tolist() == [[0]]
    rng = np.random.default_rng(5)
    for case in range(60):
        count, size = rng.integers(1, 5), rng.integers(1, 24)
        many = (
            rng.integers(-3, 4, (count, size, size)).astype(float) if case % 2 else rng.normal(size=(count, size, size))
        )
        for cost_NN, column_N in zip(many, assign(many), strict=True):
            assert sorted(column_N) == list(range(size))
            assert cost_NN[range(size), column_N].sum() == pytest.approx(cost_NN[linear_sum_assignment(cost_NN)].sum())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 80), st.integers(0, 10_000))
def test_rounds_are_as_many_as_the_busiest_gpu_needs(gpus: int, transfers: int, seed: int):
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, gpus, transfers), rng.integers(0, gpus, transfers)
    check_rounds(src, dst, colour_rounds(src, dst))


def test_sources_are_near_and_take_turns():
    # 4 GPUs on 2 nodes, 2 slots each. Expert 0 lies on GPUs 0 and 2. GPU 1 takes it from 0 (same node), 3 from 2.
    # GPU 0 gets expert 5, which lies only on GPU 3: across. GPU 2's second slot gets its own expert 0: no link at all.
    old = np.array([[0, 1, 2, 3, 0, 4, 5, 6]])
    new = np.array([[5, 1, 2, 0, 0, 0, 5, 0]])
    moves = plan_moves(old, new, Topology(4, 2, 2))
    found = {(int(e), int(d)): int(s) for e, d, s in zip(moves.expert, moves.dst, moves.src, strict=True)}
    assert found == {(5, 0): 3, (0, 1): 0, (0, 2): 2, (0, 3): 2}
    assert moves.crosses.tolist() == [True, False, False, False]
    assert moves.transfers == 3 and moves.round[moves.src == moves.dst].tolist() == [-1]
    assert moves.rounds == 1  # 3 -> 0, 0 -> 1 and 2 -> 3 at once


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_renaming_gpus_loses_nothing_and_moves_least(seed: int, whole_nodes: bool):
    rng = np.random.default_rng(seed)
    sites: Sites = Topology(8, 2, 3).live_sites()
    old = np.stack([rng.permutation(24) for _ in range(2)])
    # The new placement is the old one with GPUs renamed and their slots shuffled: no weight needs to move.
    gpus = np.concatenate([rng.permutation(4), 4 + rng.permutation(4)])
    gpus = np.roll(gpus, 4) if rng.random() < 0.5 else gpus
    new = rng.permuted(old.reshape(2, 8, 3)[:, gpus], axis=2).reshape(2, 24)
    source = aligned_slots(old, new, sites, whole_nodes=whole_nodes)
    assert (np.sort(source, 1) == np.arange(24)).all()
    assert (np.take_along_axis(new, source, 1) == old).all()


def test_gpus_of_different_speed_never_trade_names():
    sites = Topology(2, 1, 2, speeds=(1.0, 2.0)).live_sites()
    old, new = np.array([[0, 1, 2, 3]]), np.array([[2, 3, 0, 1]])
    assert np.take_along_axis(new, aligned_slots(old, new, sites, whole_nodes=False), 1).tolist() == [[2, 3, 0, 1]]
    alike = Topology(2, 1, 2).live_sites()
    assert np.take_along_axis(new, aligned_slots(old, new, alike, whole_nodes=False), 1).tolist() == [[0, 1, 2, 3]]


def test_empty_slots_are_no_experts_to_keep():
    # GPU 0 keeps expert 2 and GPU 1 expert 0 if they trade names; as they are, only GPU 1 keeps expert 1.
    old, new = np.array([[2, -1, 0, 1]]), np.array([[0, -1, 2, 1]])
    source = aligned_slots(old, new, Topology(2, 1, 2).live_sites(), whole_nodes=False)
    assert np.take_along_axis(new, source, 1).tolist() == [[2, 1, 0, -1]]


def test_repair_uses_one_spare_slot():
    # GPU 0 carries experts 0 (90) and 1 (10), GPU 1 experts 2 (10) and 2 again. Copying 0 over the twin is best:
    # 45 + 10 and 45 + 10.
    bench = Bench(np.array([0, 1, 2, 2]), np.array([90.0, 10.0, 10.0]), Topology(2, 1, 2).live_sites())
    assert bench.improve(goal=56.0, budget=4) == 1
    assert sorted(bench.placed[2:].tolist()) == [0, 2] and bench.time.tolist() == [55.0, 55.0]


def test_repair_inside_nodes_copies_to_a_gpu_of_the_same_node():
    # Expert 0 (90) is on GPU 0. Spare are a copy of 1 on GPU 1 (same node) and one of 4 on the other node, whose GPUs
    # carry little: anywhere, the copy goes there; inside nodes GPU 1 must do.
    placed = np.array([0, 1, 1, 2, 3, 4, 4, 5])
    load = np.array([90.0, 20.0, 30.0, 10.0, 10.0, 5.0])
    sites = Topology(4, 2, 2).live_sites()
    anywhere, near = (Bench(placed, load, sites, near_only=near_only) for near_only in (False, True))
    assert anywhere.improve(goal=70.0, budget=1) == near.improve(goal=85.0, budget=1) == 1
    assert 0 in anywhere.placed[4:] and 0 not in anywhere.placed[2:4]
    assert near.placed[2] == 0 and 0 not in near.placed[4:]
    assert (placed == [0, 1, 1, 2, 3, 4, 4, 5]).all()


def test_repair_swaps_when_no_copy_is_spare():
    # 60 + 50 against 10 + 20: swapping 60 and 20 leaves 70 and 70; it needs two arrivals.
    bench = Bench(np.array([0, 1, 2, 3]), np.array([60.0, 50.0, 10.0, 20.0]), Topology(2, 1, 2).live_sites())
    assert bench.improve(goal=80.0, budget=1) == 0
    assert bench.improve(goal=80.0, budget=2) == 2
    assert bench.time.tolist() == [70.0, 70.0]


def online(load: list[Doubles], topology: Topology, policy: Policy) -> list[PlacementPlan]:
    plans = [plan(load[0], topology, groups=8, policy=policy)]
    for window in load[1:]:
        plans.append(plan(window, topology, groups=8, policy=policy, old=plans[-1]))
    return plans


@pytest.mark.row(129)
@pytest.mark.parametrize("policy", ["flat", "hybrid"])
def test_steady_traffic_moves_nothing(policy: Policy):
    base = served(8, 256)
    plans = online([counted(base, seed) for seed in range(4)], Topology(32, 4, 9), policy)
    assert sum(p.moves.transfers for p in plans[1:]) <= 0.001 * 3 * plans[0].phy2log.size
    assert min(p.balance_X.min() for p in plans) > 0.97
    assert set(plans[1].method) == {"kept, shares re-solved"}


@pytest.mark.row(129, "N13")
@pytest.mark.parametrize("policy", ["flat", "hybrid"])
def test_changed_traffic_moves_far_less_than_starting_over(policy: Policy):
    base, other = served(8, 256), served(8, 256, 1) ** 0.3
    topology = Topology(32, 4, 9)
    old = plan(counted(base, 0), topology, groups=8, policy=policy)
    now = counted(base * other, 1)
    new = plan(now, topology, groups=8, policy=policy, old=old)
    anew = plan(now, topology, groups=8, policy=policy)
    sites = topology.live_sites()
    over = num_arrivals(old.phy2log, anew.phy2log, sites).sum()
    assert 0 < new.moves.transfers < 0.25 * over
    won, winnable = (each.balance_X.mean() - new.before_X.mean() for each in (new, anew))
    assert won > 0.7 * winnable > 0
    assert (carried_out(old.phy2log, new.moves) == new.phy2log).all()
    assert new.moves.transfers == num_arrivals(old.phy2log, new.phy2log, sites).sum()
    for layer in range(8):
        mine = (new.moves.layer == layer) & (new.moves.round >= 0)
        if mine.any():
            check_rounds(new.moves.src[mine], new.moves.dst[mine], new.moves.round[mine])


def test_a_plan_that_costs_more_than_it_gains_is_not_made():
    topology = Topology(32, 4, 9)
    old = plan(counted(served(4, 256), 0), topology, groups=8)
    now = counted(served(4, 256, 9), 0)
    assert plan(now, topology, groups=8, old=old).moves.transfers > 0
    for never in (
        plan(now, topology, groups=8, old=old, move_cost=10.0),
        plan(now, topology, groups=8, old=old, min_gain=9.0),
    ):
        assert never.moves.transfers == 0 and len(never.moves) == 0
        assert (never.phy2log == old.phy2log).all()
        assert (never.balance_X >= never.before_X - 1e-6).all()  # shares are free


@pytest.mark.parametrize("limit", [0, 5, 40])
def test_moves_stay_within_the_budget_and_go_where_they_pay_most(limit: int):
    topology = Topology(32, 4, 9)
    old = plan(counted(served(4, 256), 0), topology, groups=8)
    now = counted(served(4, 256, 9), 0)
    new = plan(now, topology, groups=8, old=old, max_moves=limit)
    assert new.moves.transfers <= limit
    assert (new.balance_X >= new.before_X - 1e-6).all()
    if limit == 40:
        assert new.moves.transfers > 5 and new.balance_X.mean() > new.before_X.mean()


@pytest.mark.parametrize("seed", range(2))
def test_a_budget_is_met_to_the_last_move_and_repairs_are_part_of_it(seed: int):
    whole, broken = Topology(8, 2, 5), Topology(8, 2, 5, alive=tuple(gpu != 3 for gpu in range(8)))
    old = plan(counted(served(4, 32, seed), 0), whole, groups=4)
    now = counted(served(4, 32, seed + 50), 0)
    for topology in (whole, broken):
        free, repaired = (plan(now, topology, groups=4, old=old, max_moves=most) for most in (None, 0))
        needed, wanted = repaired.moves.transfers, free.moves.transfers
        assert (needed > 0) == (topology is broken) and wanted > needed
        for most in (needed + 1, needed + 20, wanted - 1):
            assert plan(now, topology, groups=4, old=old, max_moves=most).moves.transfers <= most
        if topology is whole:  # a repaired expert that then moves again is counted twice
            again = plan(now, topology, groups=4, old=old, max_moves=wanted)
            assert (again.phy2log == free.phy2log).all(), "a budget that suffices changes nothing"


@pytest.mark.parametrize("unit", [2.0**-40, 2.0**20])
def test_a_plan_does_not_depend_on_the_unit_of_the_load(unit: float):
    topology = Topology(8, 2, 5)
    old = plan(counted(served(4, 32), 0), topology, groups=4)
    now = counted(served(4, 32, 50), 0)
    one, other = (plan(load, topology, groups=4, old=old, max_moves=30) for load in (now, now * unit))
    assert one.moves.transfers > 0 and (one.phy2log == other.phy2log).all()
    assert (other.share == one.share).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_repairs_leave_no_expert_twice_on_a_gpu_and_count_what_arrives(seed: int, near_only: bool):
    rng = np.random.default_rng(seed)
    sites = Topology(4, 2, 3, tuple(rng.choice([0.5, 1.0, 2.0], 4))).live_sites()
    grid = np.stack([rng.permutation(6)[:3] for _ in range(4)])  # no expert twice on a GPU
    experts = np.unique(grid, return_inverse=True)[1].reshape(-1)
    load = rng.lognormal(0, 1.5, experts.max() + 1)
    bench = Bench(experts, load, sites, near_only=near_only)
    before, budget = float(bench.time.max()), int(rng.integers(1, 9))
    used = bench.improve(0.0, budget)
    rows = bench.placed.reshape(4, 3).tolist()
    assert all(len(set(row)) == 3 for row in rows) and {e for row in rows for e in row} == set(experts.tolist())
    count = np.bincount(bench.placed)
    time = [sum(load[e] / count[e] for e in row) / speed for row, speed in zip(rows, sites.speed_W, strict=True)]
    assert bench.time == pytest.approx(np.array(time)) and max(time) <= before * (1 + 1e-9)
    arrived = sum(len(set(row) - set(old)) for row, old in zip(rows, experts.reshape(4, 3).tolist(), strict=True))
    assert arrived <= used <= budget
    if near_only:
        for node in (0, 1):
            part = slice(6 * node, 6 * node + 6)
            assert set(bench.placed[part].tolist()) <= set(experts[part].tolist())


def test_experts_of_a_dead_gpu_return_even_without_a_budget():
    load = counted(served(4, 256), 0)
    old = plan(load, Topology(32, 4, 9), groups=8)
    broken = Topology(32, 4, 9, alive=tuple(gpu != 7 for gpu in range(32)))
    new = plan(load, broken, groups=8, old=old, max_moves=0)
    assert new.logcnt.min() >= 1 and (new.phy2log[:, broken.gpu_P == 7] == -1).all()
    lost = [set(range(256)) - set(row[broken.gpu_P != 7].tolist()) for row in old.phy2log]
    assert sum(map(len, lost)) > 0
    from_outside = {(int(x), int(e)) for x, e in zip(new.moves.layer, new.moves.expert, strict=True)}
    assert from_outside == {(x, e) for x, gone in enumerate(lost) for e in gone}
    assert (new.moves.src == -1).all() and (new.moves.round == -1).all() and not new.moves.crosses.any()
    assert new.moves.transfers == len(from_outside)


def test_a_gpu_that_came_back_is_filled_where_that_pays():
    load = counted(served(4, 256), 0)
    alive = [gpu != 7 for gpu in range(32)]
    without = plan(load, Topology(32, 4, 10, alive=alive), groups=8)
    # One GPU of 32 is worth 3 % at best: only where moves are cheap is everything shifted for it.
    back = plan(load, Topology(32, 4, 10), groups=8, old=without, move_cost=0.0)
    assert (back.phy2log[:, back.topology.gpu_P == 7] >= 0).any(1).all()
    assert back.balance_X.min() > 0.99 and (back.before_X < 0.97).all()
    lazy = plan(load, Topology(32, 4, 10), groups=8, old=without)
    assert (lazy.phy2log == without.phy2log).all() and lazy.logcnt.min() >= 1


def test_repair_states_when_nothing_is_spare():
    bench = Bench(np.array([0, 1]), np.ones(3), Topology(2, 1, 1).live_sites())
    with pytest.raises(
        InfeasiblePlacement, match=r"expert 2 has 0 of 1 copies and no spare slot is left among 2 living"
    ):
        bench.restore()


def test_an_old_placement_of_another_shape_is_refused():
    old = plan(np.ones((2, 8)), Topology(4, 1, 3))
    with pytest.raises(ShapeError, match=r"shape \(2, 12\).* = \(2, 16\)"):
        plan(np.ones((2, 8)), Topology(4, 1, 4), old=old)
    with pytest.raises(ShapeError, match=r"names experts 0\.\.7, load has 0\.\.5"):
        plan(np.ones((2, 6)), Topology(4, 1, 3), old=old)
    with pytest.raises(ShapeError, match=r"names experts 0\.\.7, load has 0\.\.6"):
        plan(np.ones((2, 7)), Topology(4, 1, 3), old=old)


def test_moved_bytes_are_transfers_times_the_size_of_an_expert():
    topology = Topology(8, 2, 5)
    old = plan(counted(served(3, 32), 0), topology, groups=4, expert_bytes=10)
    new = plan(counted(served(3, 32, 5), 0), topology, groups=4, old=old.phy2log, expert_bytes=10)
    assert moved_bytes(new) == 10 * new.moves.transfers > 0
    assert np.isfinite(new.before_X).all() and np.isnan(old.before_X).all()
    assert f"{new.moves.transfers} experts arrive" in new.reason
