"""Plans: policies, presets, faults, costs, ties and windows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.lab.cli.place import bytes_per_gpu
from moe_mk.placement.eplb import Cost, PlacementPlan, Policy, Topology, plan, rebalance_experts, slot_loads
from tests.placement.plans import check, skewed


@pytest.mark.row(130)
@pytest.mark.row(135)
@pytest.mark.parametrize("policy", ["compat", "flat", "hybrid", "auto"])
def test_every_policy_returns_the_same_kind_of_plan(policy: Policy):
    load = skewed(2)
    placed = plan(load, Topology(32, 4, 9), groups=8, policy=policy)
    check(placed, load)
    assert isinstance(placed, PlacementPlan) and placed.phy2log.dtype == np.int64 and placed.share.dtype == np.float32
    assert placed.offsets.dtype == placed.slots.dtype == np.int16
    layers, experts = load.shape
    assert placed.map_bytes == 2 * layers * (experts + 1 + 288 + 288)
    assert (placed.balance_X <= placed.bound_X + 1e-9).all() and "balance mean" in placed.reason


def test_compat_policy_places_like_the_drop_in():
    load = skewed(3)
    placed = plan(load, Topology(32, 4, 9), groups=8, policy="compat", split="equal")
    phy2log, _, logcnt = rebalance_experts(load, 288, 8, 4, 32)
    assert placed.phy2log.tolist() == phy2log.tolist() and placed.logcnt.tolist() == logcnt.tolist()
    assert placed.share == pytest.approx(1 / np.take_along_axis(logcnt.numpy(), placed.phy2log, 1))


@pytest.mark.row(124)
def test_prefill_preset_is_nine_experts_a_gpu():
    load = skewed(58)
    placed = plan(load, Topology(32, 4, 9), groups=8, expert_bytes=44_000_000)
    assert placed.policy == "hybrid" and placed.slots_per_gpu.tolist() == [9] * 32
    assert bytes_per_gpu(placed).tolist() == [9 * 58 * 44_000_000] * 32
    assert placed.balance_X.mean() > 0.999 and placed.balance_X.min() > 0.995
    assert placed.map_bytes <= 100_000


@pytest.mark.row(125)
def test_decode_preset_is_two_experts_a_gpu_and_states_what_would_help():
    load = skewed(6)
    placed = plan(load, Topology(144, 18, 2), groups=8, expert_bytes=44_000_000)
    check(placed, load)
    assert placed.slots_per_gpu.tolist() == [2] * 144 and bytes_per_gpu(placed)[0] == 2 * 6 * 44_000_000
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


@pytest.mark.row("N19")
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
    assert slot_loads(placed, window) == pytest.approx(slot_loads(placed, load)), "windows are added up"
