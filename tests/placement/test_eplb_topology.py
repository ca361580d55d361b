"""Plans for GPUs that differ: in speed, in slots, or in being there."""

import numpy as np
import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.placement.eplb import Policy, Topology, plan, slot_loads
from tests.placement.plans import check, nodes_per_group, skewed


@pytest.mark.row(132)
def test_equal_speeds_change_nothing():
    load = skewed(3)
    given_speeds = Topology(32, 4, (9,) * 32, speeds=(0.7,) * 32)
    plain = plan(load, Topology(32, 4, 9), groups=8, policy="compat")
    assert plan(load, given_speeds, groups=8, policy="compat").phy2log.tolist() == plain.phy2log.tolist()
    flat = plan(load, Topology(32, 4, 9), policy="flat")
    assert plan(load, given_speeds, policy="flat").balance_X == pytest.approx(flat.balance_X, abs=1e-3)


@pytest.mark.row(132, "N12")
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
    with pytest.raises(UnsupportedError, match=r"256 experts on 279 slots .*; 4 more are needed"):
        plan(load, tight, groups=8, policy="hybrid")
    fallen_back = plan(load, tight, groups=8)
    assert fallen_back.policy == "flat" and "4 more are needed" in fallen_back.reason
    check(fallen_back, load)


def test_compat_needs_equally_many_gpus_on_every_living_node():
    alive = (False,) * 2 + (True,) * 10  # nodes of 4: 2, 4 and 4 GPUs are left
    with pytest.raises(UnsupportedError, match=r"equally many living GPUs a node, there are \[2, 4, 4\]"):
        plan(np.ones((1, 12)), Topology(12, 3, 2, alive=alive), groups=3, policy="compat")
    whole = plan(np.ones((1, 12)), Topology(12, 3, 2, alive=[False] * 4 + [True] * 8), groups=2, policy="compat")
    assert nodes_per_group(whole, 2) == 1.0 and (whole.phy2log[0, :8] == -1).all()
