"""Slots, shares and times of a machine of which some ranks are dead, against plain lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk import ExpertMap
from moe_mk.placement.eplb import Topology
from moe_mk.rebalance import Ledger, measure_balance
from moe_mk.rebalance.ledger import rank_times

Rows = list[list[list[int]]]
"""[layer][living rank]: its experts."""


@st.composite
def machines(draw: st.DrawFn) -> tuple[Topology, int, Rows]:
    """Ranks of other slots and speeds, dead ones among them; experts are lost, alone, or have several copies."""
    gpus, experts = draw(st.integers(2, 5)), draw(st.integers(2, 6))
    alive = draw(st.lists(st.booleans(), min_size=gpus, max_size=gpus).filter(any))
    slots = draw(st.lists(st.integers(1, 3), min_size=gpus, max_size=gpus))
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=gpus, max_size=gpus))
    rows = [
        [
            draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=size))
            for size, on in zip(slots, alive, strict=True)
            if on
        ]
        for _ in range(draw(st.integers(1, 3)))
    ]
    return Topology(gpus, 1, tuple(slots), tuple(speeds), tuple(alive)), experts, rows


@settings(max_examples=80, deadline=None)
@given(machines(), st.data())
def test_a_ledger_is_what_its_living_ranks_hold(machine: tuple[Topology, int, Rows], data: st.DataObject) -> None:
    topology, experts, rows = machine
    ledger = Ledger.of_rows(topology, experts, rows)
    living = [rank for rank in range(topology.gpus) if topology.alive_W[rank]]
    load = [data.draw(st.lists(st.integers(0, 9), min_size=experts, max_size=experts)) for _ in rows]
    busiest = ideal = 0.0
    for x, held in enumerate(rows):
        placed, flat = ledger.map_of(ledger.phy2log[x], ledger.share[x]), [e for row in held for e in row]
        assert placed.experts_of_rank == tuple(map(tuple, held))
        assert placed.lost == {e for e in range(experts) if e not in flat}
        speed = [float(topology.speed_W[rank]) for rank in living]
        tokens = [sum(load[x][e] / flat.count(e) for e in row) for row in held]
        times = [t / s for t, s in zip(tokens, speed, strict=True)]
        assert rank_times(np.array(load, float), ledger)[x] == pytest.approx(times)
        busiest, ideal = busiest + max(times), ideal + sum(tokens) / sum(speed)
        even = measure_balance(np.array(load, float), ledger).rank_max_over_mean_X[x]
        assert even == pytest.approx(max(times) * sum(speed) / sum(tokens) if sum(tokens) else 1.0)
    step = measure_balance(np.array(load, float), ledger).step_over_ideal
    assert step == pytest.approx(busiest / ideal if ideal else 1.0)
    gone = data.draw(st.sets(st.sampled_from(living)))
    lost = 0
    for held in rows:
        left = {e for rank, row in zip(living, held, strict=True) if rank not in gone for e in row}
        lost += len({e for row in held for e in row} - left)
    assert ledger.only_on(gone) == lost


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_a_placement_of_a_caller_keeps_its_shares_and_its_experts(parts: list[int]) -> None:
    # Expert 0 is on all ranks, and both others on two: shares of any kind, and dead ranks in between.
    total, half = sum(parts[:3]), parts[2] + parts[3]
    shares = (parts[0] / total, parts[2] / half, parts[1] / total, 1.0, parts[2] / total, parts[3] / half)
    given_map = ExpertMap(((0, 1), (0, 2), (0, 1)), 3, shares)
    alive = (True, False, True, True)
    before = Ledger.of_rows(Topology(4, 1, (1, 2, 3, 1), alive=alive), 3, [])
    ledger = before.placed([given_map])
    now = ledger.map_of(ledger.phy2log[0], ledger.share[0])
    assert now.experts_of_rank == given_map.experts_of_rank
    assert now.shares == pytest.approx(shares)
    assert ledger.topology.slots_W.tolist() == [2, 2, 2, 2] and ledger.living == [0, 2, 3]
