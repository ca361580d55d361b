"""Plans: policies, topologies, faults, costs, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.placement.balance.hybrid import NodeShelf, export_excess
from moe_mk.placement.balance.maps import csr_maps, nearest_slots
from moe_mk.placement.eplb import (
    Cost,
    InfeasiblePlacement,
    PlacementPlan,
    Policy,
    Topology,
    plan,
    rebalance_experts,
    slot_loads,
)

Doubles = NDArray[np.float64]


def skewed(layers: int = 6, experts: int = 256, groups: int = 8, seed: int = 0) -> Doubles:
    """Loads with hot experts and hot groups, like those of a served model."""
    rng = np.random.default_rng(seed)
    load = np.exp(
        0.75 * rng.normal(size=(layers, groups, experts // groups)) + 0.4 * rng.normal(size=(layers, groups, 1))
    )
    return rng.poisson(load.reshape(layers, experts) * 2000).astype(float)


def check(placed: PlacementPlan, load: Doubles) -> None:
    """What every plan promises, whatever the policy."""
    layers, experts = load.shape
    topology = placed.topology
    dead = ~topology.alive_W[topology.gpu_P]
    assert (placed.phy2log[:, dead] == -1).all() and (placed.phy2log[:, ~dead] >= 0).all()
    total = np.zeros_like(load)
    row = np.arange(layers)[:, None]
    np.add.at(total, (row, placed.phy2log[:, ~dead]), placed.share[:, ~dead])
    assert total == pytest.approx(np.ones_like(load), abs=1e-5)
    assert placed.share.min() >= 0 and (placed.share[:, dead] == 0).all()
    assert placed.offsets.shape == (layers, experts + 1) and placed.slots.shape == placed.phy2log.shape
    dense = placed.log2phy
    for layer in range(layers):
        for expert in range(experts):
            mine = np.flatnonzero(placed.phy2log[layer] == expert).tolist()
            low, high = placed.offsets[layer, expert], placed.offsets[layer, expert + 1]
            assert placed.slots[layer, low:high].tolist() == mine
            assert [slot for slot in dense[layer, expert].tolist() if slot >= 0] == mine
    assert (placed.logcnt == (dense >= 0).sum(2)).all()


@pytest.mark.row(130)
@pytest.mark.row(135)
@pytest.mark.parametrize("policy", ["compat", "flat", "hybrid", "auto"])
def test_every_policy_returns_the_same_kind_of_plan(policy: Policy):
    load = skewed(2)
    placed = plan(load, Topology(32, 4, 9), groups=8, policy=policy)
    check(placed, load)
    assert isinstance(placed, PlacementPlan) and placed.phy2log.dtype == np.int64 and placed.share.dtype == np.float32
    assert placed.offsets.dtype == placed.slots.dtype == np.int16
    assert (placed.balance_X <= placed.bound_X + 1e-9).all() and "balance mean" in placed.reason


def test_compat_policy_places_like_the_drop_in():
    load = skewed(3)
    placed = plan(load, Topology(32, 4, 9), groups=8, policy="compat", split="equal")
    phy2log, _, logcnt = rebalance_experts(load, 288, 8, 4, 32)
    assert placed.phy2log.tolist() == phy2log.tolist() and placed.logcnt.tolist() == logcnt.tolist()
    assert placed.share == pytest.approx(1 / np.take_along_axis(logcnt.numpy(), placed.phy2log, 1))


@pytest.mark.row(132)
def test_equal_speeds_change_nothing():
    load = skewed(3)
    given_speeds = Topology(32, 4, (9,) * 32, speeds=(0.7,) * 32)
    plain = plan(load, Topology(32, 4, 9), groups=8, policy="compat")
    assert plan(load, given_speeds, groups=8, policy="compat").phy2log.tolist() == plain.phy2log.tolist()
    flat = plan(load, Topology(32, 4, 9), policy="flat")
    assert plan(load, given_speeds, policy="flat").balance_X == pytest.approx(flat.balance_X, abs=1e-3)


@pytest.mark.row(132)
@pytest.mark.parametrize("policy", ["flat", "hybrid"])
def test_a_gpu_twice_as_fast_carries_twice_the_load(policy: Policy):
    load = skewed(3)
    topology = Topology(32, 4, 9, speeds=(1.0, 2.0) * 16)
    placed = plan(load, topology, groups=8, policy=policy)
    check(placed, load)
    gpu = slot_loads(placed, load).reshape(3, 32, 9).sum(2)
    largest = load.max(1, keepdims=True)
    assert (np.abs(gpu[:, 1::2] - 2 * gpu[:, ::2].mean(1, keepdims=True)) < largest).all()
    assert placed.balance_X.min() > 0.99


def test_unequal_slots_are_all_used():
    load = skewed(2)
    topology = Topology(32, 4, (8, 10) * 16)
    for policy in ("flat", "hybrid"):
        placed = plan(load, topology, groups=8, policy=policy)  # type: ignore[arg-type]
        check(placed, load)
        assert placed.balance_X.min() > 0.99
        assert placed.slots_per_gpu.tolist() == [8, 10] * 16


def test_a_dead_gpu_gets_nothing_and_the_rest_stay_even():
    load = skewed(2)
    alive = tuple(gpu != 5 for gpu in range(32))
    for policy in ("flat", "hybrid"):
        placed = plan(load, Topology(32, 4, 10, alive=alive), groups=8, policy=policy)  # type: ignore[arg-type]
        check(placed, load)
        assert placed.balance_X.min() > 0.99
        assert placed.slots_per_gpu[5] == 0
    tight = Topology(32, 4, 9, alive=alive)  # 279 slots: 31 x 8 + 4 = 252 pieces could be filled evenly
    with pytest.raises(UnsupportedError, match=r"256 experts on 279 slots .*: 4 more are needed"):
        plan(load, tight, groups=8, policy="hybrid")
    fallen_back = plan(load, tight, groups=8)
    assert fallen_back.policy == "flat" and "4 more are needed" in fallen_back.reason
    check(fallen_back, load)


def nodes_per_group(placed: PlacementPlan, groups: int) -> float:
    """How many nodes hold experts of a group, on average."""
    size = int(placed.phy2log.max() + 1) // groups
    node = placed.topology.node_W[placed.topology.gpu_P]
    seen = {
        (x, e // size, n)
        for x, row in enumerate(placed.phy2log.tolist())
        for e, n in zip(row, node, strict=True)
        if e >= 0
    }
    return len(seen) / len(placed.phy2log) / groups


@pytest.mark.row(121)
def test_hybrid_lends_little_and_compat_lends_nothing():
    load = skewed(4)
    topology = Topology(32, 4, 9)
    home = plan(load, topology, groups=8, policy="compat")
    lent = plan(load, topology, groups=8, policy="hybrid")
    flat = plan(load, topology, groups=8, policy="flat")
    assert nodes_per_group(home, 8) == 1.0
    assert nodes_per_group(home, 8) <= nodes_per_group(lent, 8) < nodes_per_group(flat, 8)
    assert lent.exported_X.max() < 0.25
    assert lent.balance_X.min() > 0.995 > home.balance_X.mean()


@pytest.mark.row(134)
@pytest.mark.parametrize("nodes,gpus,slots", [(3, 24, 12), (5, 40, 8)])
def test_groups_that_do_not_divide_nodes_still_span_few(nodes: int, gpus: int, slots: int):
    load = skewed(4)
    topology = Topology(gpus, nodes, slots)
    mixed = plan(load, topology, groups=8, policy="hybrid")
    anywhere = plan(load, topology, groups=8, policy="compat")  # the compatible policy ignores nodes here
    check(mixed, load)
    assert nodes_per_group(mixed, 8) < 0.8 * nodes_per_group(anywhere, 8)
    assert mixed.balance_X.min() >= 0.95 * anywhere.balance_X.max()


def test_one_piece_evens_two_nodes():
    # Nodes carry 70 and 30: the smallest expert that covers the gap of 20 is the 25; 20 of it travel.
    hot = NodeShelf(4, 50.0, {0: 45.0, 1: 25.0}, 70.0)
    cold = NodeShelf(4, 50.0, {2: 20.0, 3: 10.0}, 30.0)
    assert export_excess([hot, cold]) == 20.0
    assert hot.held == {0: 45.0, 1: 5.0} and cold.held == {2: 20.0, 3: 10.0, 1: 20.0}


def test_a_full_node_trades_its_coldest_expert():
    hot = NodeShelf(3, 50.0, {0: 45.0, 1: 25.0}, 70.0)
    cold = NodeShelf(2, 50.0, {2: 20.0, 3: 10.0}, 30.0)
    export_excess([hot, cold])
    assert cold.load == pytest.approx(50.0) and hot.load == pytest.approx(50.0)
    assert len(cold.held) == 2 and 3 in hot.held


@pytest.mark.row(124)
def test_prefill_preset_is_nine_experts_a_gpu():
    load = skewed(58)
    placed = plan(load, Topology(32, 4, 9), groups=8, expert_bytes=44_000_000)
    assert placed.policy == "hybrid" and placed.slots_per_gpu.tolist() == [9] * 32
    assert placed.bytes_per_gpu.tolist() == [9 * 58 * 44_000_000] * 32
    assert placed.balance_X.mean() > 0.999 and placed.balance_X.min() > 0.995
    assert placed.map_bytes <= 100_000


@pytest.mark.row(125)
def test_decode_preset_is_two_experts_a_gpu_and_says_what_would_help():
    load = skewed(6)
    placed = plan(load, Topology(144, 18, 2), groups=8, expert_bytes=44_000_000)
    check(placed, load)
    assert placed.slots_per_gpu.tolist() == [2] * 144 and placed.bytes_per_gpu[0] == 2 * 6 * 44_000_000
    anchor = plan(load, Topology(144, 18, 2), groups=8, policy="compat", split="equal")
    assert (placed.balance_X >= anchor.balance_X - 1e-12).all() and placed.balance_X.mean() > anchor.balance_X.mean()
    assert "no placement on 288 slots beats" in placed.reason and "3 slots a GPU (432 in all)" in placed.reason
    assert plan(load, Topology(144, 18, 3), groups=8).balance_X.min() > 0.999


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_flat_plans_are_never_behind_the_compatible_policy(seed: int):
    rng = np.random.default_rng(seed)
    gpus, slots = int(rng.integers(2, 9)), int(rng.integers(2, 6))
    experts = int(rng.integers(gpus * (slots - 1) // 2 + 2, gpus * slots + 1))
    load = rng.lognormal(0, 1.2, (3, experts)) * (rng.random((3, experts)) < 0.9)
    topology = Topology(gpus, 1, slots)
    mine = plan(load, topology, policy="flat")
    anchor = plan(load, topology, policy="compat", split="equal")
    assert (mine.balance_X >= anchor.balance_X - 1e-9).all()
    assert (mine.balance_X <= mine.bound_X + 1e-9).all()
    even = plan(load, topology, policy="flat", split="equal")
    assert (even.balance_X >= anchor.balance_X - 1e-9).all()


def test_two_copies_of_every_expert_survive_any_one_gpu():
    load = skewed(2, 64)
    safe = plan(load, Topology(16, 2, 9), groups=8, min_copies=2)
    check(safe, load)
    assert safe.lost_XW.max() == 0
    for layer in range(2):
        for expert in range(64):
            assert len(set(safe.topology.gpu_P[safe.phy2log[layer] == expert])) >= 2
    risky = plan(load, Topology(16, 2, 9), groups=8)
    assert (risky.lost_XW.max(1) > 0).all()


def test_lost_load_is_that_of_experts_with_one_home():
    # GPU 0: experts 0 1, GPU 1: 0 2. Expert 0 survives; GPU 0 takes 30 of 100 with it, GPU 1 takes 20.
    load = np.array([[50.0, 30.0, 20.0]])
    placed = plan(load, Topology(2, 1, 2), policy="flat")
    assert sorted(placed.lost_XW[0].tolist()) == pytest.approx([0.2, 0.3])


def test_memory_bound_layers_read_every_expert_once():
    # A read costs as much as 1000 tokens. Four experts on four GPUs of two slots: one read each is the least, so of
    # every expert one copy alone takes tokens; counted by tokens, copies share.
    load = np.array([[40.0, 30.0, 20.0, 10.0]])
    placed = plan(load, Topology(4, 1, 2), policy="flat", cost=Cost(per_token=1.0, per_expert=1000.0))
    assert sorted(placed.share[0].tolist()) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (slot_loads(placed, load) > 0).reshape(4, 2).sum(1).tolist() == [1, 1, 1, 1]
    assert placed.balance_X[0] == pytest.approx(1025 / 1040)
    by_tokens = plan(load, Topology(4, 1, 2), policy="flat")
    assert (by_tokens.share > 0).sum() > 4


@pytest.mark.row(136)
def test_ties_break_at_random_only_on_demand_and_repeatably():
    load = np.ones((2, 16))
    topology = Topology(4, 1, 5)
    first = plan(load, topology, policy="flat", seed=3).phy2log
    assert (plan(load, topology, policy="flat", seed=3).phy2log == first).all()
    assert (plan(load, topology, policy="flat", seed=4).phy2log != first).any()
    assert (plan(load, topology, policy="flat").phy2log == plan(load, topology, policy="flat").phy2log).all()


def test_windows_tensors_and_idle_layers_are_welcome():
    load = skewed(3, 64)
    load[1] = 0
    window = torch.from_numpy(np.stack([load * 0.25, load * 0.75]))
    kept = window.clone()
    placed = plan(window, Topology(8, 2, 10), groups=8)
    check(placed, load)
    assert torch.equal(window, kept)
    assert placed.phy2log.tolist() == plan(load, Topology(8, 2, 10), groups=8).phy2log.tolist()
    assert placed.balance_X[1] == 1.0 and placed.logcnt[1].max() <= 3


def test_nearest_copies_are_on_the_gpu_then_on_the_node():
    load = skewed(2, 64)
    placed = plan(load, Topology(8, 2, 10), groups=8, policy="flat")
    nearest = placed.nearest()
    assert nearest.shape == (2, 8, 64) and (placed.nearest([3, 5]) == nearest[:, [3, 5]]).all()
    gpu_P, node_W = placed.topology.gpu_P, placed.topology.node_W
    assert (
        np.take_along_axis(placed.phy2log, nearest.reshape(2, -1).astype(int), 1) == np.tile(np.arange(64), 8)
    ).all()
    for layer, rank, expert in np.ndindex(2, 8, 64):
        holders = gpu_P[placed.phy2log[layer] == expert]
        chosen = gpu_P[nearest[layer, rank, expert]]
        if rank in holders:
            assert chosen == rank
        elif node_W[rank] in node_W[holders]:
            assert node_W[chosen] == node_W[rank]


def test_ranks_far_from_every_copy_take_turns():
    # Expert 0 lies on GPUs 0 and 1, each a node of its own; GPUs 2 and 3 are equally far from both.
    offsets, slots = csr_maps(np.array([[0, 0, 1, 2]]), 3)
    nearest = nearest_slots(offsets, slots, np.arange(4), np.arange(4), np.arange(4))
    assert nearest[0, :2, 0].tolist() == [0, 1]
    assert sorted(nearest[0, 2:, 0].tolist()) == [0, 1]
    assert nearest[0, :, 2].tolist() == [3, 3, 3, 3]


def test_too_few_slots_name_the_number_that_would_do():
    with pytest.raises(
        InfeasiblePlacement, match=r"14 slots on 7 living GPUs cannot hold 16 .* 3 slots a GPU"
    ) as raised:
        plan(np.ones((1, 16)), Topology(8, 1, 2, alive=(False,) + (True,) * 7))
    assert raised.value.next_feasible == 21
    with pytest.raises(InfeasiblePlacement, match=r"min_copies=3 .* there are 2"):
        plan(np.ones((1, 2)), Topology(2, 1, 9), min_copies=3)
    with pytest.raises(InfeasiblePlacement, match=r"experts=16 does not divide by groups=3"):
        plan(np.ones((1, 16)), Topology(2, 1, 9), groups=3)
    with pytest.raises(InfeasiblePlacement, match=r"gpus=6 does not divide by nodes=4; the next .* 8"):
        Topology(6, 4)


def test_refusals_list_every_reason():
    uneven = Topology(4, 1, (9, 8, 8, 8), speeds=(1, 1, 1, 2))
    with pytest.raises(UnsupportedError, match=r"(?s)unequal speeds.*cannot promise 2 copies"):
        plan(np.ones((1, 16)), uneven, policy="compat", min_copies=2)
    with pytest.raises(UnsupportedError, match=r"(?s)only one node.*groups=1.*split='equal'"):
        plan(np.ones((1, 16)), uneven, policy="hybrid", split="equal")
    with pytest.raises(ConfigError, match=r"slots has 2 entries for 4 GPUs; speeds=.*; no GPU is alive"):
        Topology(4, 1, (1, 2), speeds=(1, 1, 1, 0), alive=(False,) * 4)


def test_compat_needs_equally_many_gpus_on_every_living_node():
    alive = (False,) * 2 + (True,) * 10  # nodes of 4: 2, 4 and 4 GPUs are left
    with pytest.raises(UnsupportedError, match=r"equally many living GPUs a node, there are \[2, 4, 4\]"):
        plan(np.ones((1, 12)), Topology(12, 3, 2, alive=alive), groups=3, policy="compat")
    whole = plan(np.ones((1, 12)), Topology(12, 3, 2, alive=[False] * 4 + [True] * 8), groups=2, policy="compat")
    assert nodes_per_group(whole, 2) == 1.0 and (whole.phy2log[0, :8] == -1).all()


def test_unknown_policies_are_answered():
    with pytest.raises(ConfigError, match=r"no EPLB policy is called 'hybird'; did you mean 'hybrid'\?"):
        plan(np.ones((1, 4)), Topology(2, 1, 4), policy="hybird")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"split='even' is not known.*equal"):
        plan(np.ones((1, 4)), Topology(2, 1, 4), split="even")  # type: ignore[arg-type]


def test_copies_that_cannot_be_parted_are_reported():
    # 2 experts x 2 copies fit 5 slots, but GPU 1 has one slot: one expert must have both copies on GPU 0.
    with pytest.raises(InfeasiblePlacement, match=r"slots \[1, 4\] a GPU some expert finds only 1 different GPUs"):
        plan(np.ones((1, 2)), Topology(2, 1, [4, 1]), policy="flat", min_copies=2)


def test_bad_loads_and_budgets_are_refused():
    with pytest.raises(ShapeError, match=r"expected \[layers, experts\]"):
        plan(np.ones(4), Topology(2, 1, 4))
    with pytest.raises(ShapeError, match="at least 0"):
        plan(np.array([[1.0, -2.0]]), Topology(2, 1, 4))
    with pytest.raises(ConfigError, match=r"max_moves=-1 must not be negative"):
        plan(np.ones((1, 4)), Topology(2, 1, 4), max_moves=-1)
