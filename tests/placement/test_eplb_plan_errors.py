"""Plans that cannot be: every reason, and the next that could."""

import numpy as np
import pytest

from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.placement.eplb import InfeasiblePlacement, Topology, plan


def test_too_few_slots_name_the_number_that_would_do():
    with pytest.raises(
        InfeasiblePlacement, match=r"14 slots on 7 living GPUs cannot hold 16 .* 3 slots a GPU"
    ) as raised:
        plan(np.ones((1, 16)), Topology(8, 1, 2, alive=(False,) + (True,) * 7))
    assert raised.value.next_feasible == 21
    with pytest.raises(InfeasiblePlacement, match=r"min_copies=3 .* there are 2"):
        plan(np.ones((1, 2)), Topology(2, 1, 9), min_copies=3)
    with pytest.raises(InfeasiblePlacement, match=r"min_copies=4 .* there are 3"):  # a GPU without slots holds none
        plan(np.ones((1, 4)), Topology(4, 1, (9, 9, 9, 0)), min_copies=4)
    assert plan(np.ones((1, 4)), Topology(4, 1, (9, 9, 9, 0)), min_copies=3).logcnt.min() >= 3
    with pytest.raises(InfeasiblePlacement, match=r"experts=16 does not divide by groups=3"):
        plan(np.ones((1, 16)), Topology(2, 1, 9), groups=3)
    with pytest.raises(InfeasiblePlacement, match=r"gpus=6 does not divide by nodes=4; the next .* 8"):
        Topology(6, 4)
    for huge in (10**9, 10**23):  # not found by counting
        with pytest.raises(InfeasiblePlacement, match=rf"gpus=2 does not divide by nodes={huge}; the next .* {huge}$"):
            Topology(2, huge)


def test_refusals_list_every_reason():
    uneven = Topology(4, 1, (9, 8, 8, 8), speeds=(1, 1, 1, 2))
    with pytest.raises(UnsupportedError, match=r"(?s)unequal speeds.*cannot promise 2 copies"):
        plan(np.ones((1, 16)), uneven, policy="compat", min_copies=2)
    with pytest.raises(UnsupportedError, match=r"(?s)only one node.*groups=1.*split='equal'"):
        plan(np.ones((1, 16)), uneven, policy="hybrid", split="equal")
    with pytest.raises(ConfigError, match=r"slots has 2 entries for 4 GPUs; speeds=.*; no GPU is alive"):
        Topology(4, 1, (1, 2), speeds=(1, 1, 1, 0), alive=(False,) * 4)


def test_unknown_splits_are_answered():
    with pytest.raises(ConfigError, match=r"split='even' is not known.*equal"):
        plan(np.ones((1, 4)), Topology(2, 1, 4), split="even")  # type: ignore[arg-type]


def test_copies_that_cannot_be_parted_are_reported():
    # 2 experts x 2 copies fit 5 slots, but GPU 1 has one slot: one expert must have both copies on GPU 0.
    with pytest.raises(InfeasiblePlacement, match=r"slots \[1, 4\] a GPU some expert fits on only 1 different GPUs"):
        plan(np.ones((1, 2)), Topology(2, 1, [4, 1]), policy="flat", min_copies=2)


def test_bad_loads_and_budgets_are_refused():
    with pytest.raises(ShapeError, match=r"expected \[layers, experts\]"):
        plan(np.ones(4), Topology(2, 1, 4))
    with pytest.raises(ShapeError, match="at least 0"):
        plan(np.array([[1.0, -2.0]]), Topology(2, 1, 4))
    with pytest.raises(ConfigError, match=r"max_moves=-1 must not be negative"):
        plan(np.ones((1, 4)), Topology(2, 1, 4), max_moves=-1)
