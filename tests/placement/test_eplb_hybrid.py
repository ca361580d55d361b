"""Groups at home, and the excess of a node lent to others."""

import pytest

from moe_mk.placement.balance.policies import NodeShelf, export_excess
from moe_mk.placement.eplb import Topology, plan
from tests.placement.plans import check, nodes_per_group, skewed


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
