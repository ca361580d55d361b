"""The planner of one rank by itself: when it starts which job, what it keeps of an outcome, when it tries again."""

from __future__ import annotations

from threading import Event

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moe_mk.placement.eplb import PlacementPlan, Topology, plan
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.rebalance import RebalanceWarning
from moe_mk.rebalance.ledger import Balance, Ledger, measure_balance
from moe_mk.rebalance.load import LoadHistory
from moe_mk.rebalance.planner import PlacementPlanner, PlanMessage, Planner
from moe_mk.rebalance.settings import RebalanceSettings
from moe_mk.rebalance.status import IncidentLog
from moe_mk.trace.clock import now

ROWS, EXPERTS = ((0, 1), (2, 0)), 3  # a copy of expert 0 on each of two ranks


class OnePlanner:
    """A planner, the history that it reads, and the placement that serves."""

    def __init__(self, planner: Planner | None = None, shares: tuple[float, ...] | None = None, **changes: object):
        settings = RebalanceSettings(inline=True, decay=0.0, backoff=3, **changes)  # type: ignore[arg-type]
        self.journal, self.history = IncidentLog(), LoadHistory(1, EXPERTS, decay=0.0)
        self.planner = PlacementPlanner(settings, self.journal, planner)
        self.ledger = Ledger.of([ExpertMap(ROWS, EXPERTS, shares)], 1, None)
        self.asked: list[str] = []

    def saw(self, *tokens: int) -> OnePlanner:
        window = torch.zeros((2, 1, EXPERTS), dtype=torch.int64)
        window[0, 0] = torch.tensor(tokens)
        self.history.add(window)
        return self

    def think(self, step: int = 0, *, uneven: float | None = None) -> bool:
        """Whether a job was started, and ended. uneven: the step time over the ideal one, if it was measured."""
        balance = None if uneven is None else Balance(np.zeros(1), np.ones(1), uneven)
        self.planner.think(step, self.history, self.ledger, balance, 7, 4)
        self.journal.warn()  # as a manager does at the end of a step
        return self.planner.busy

    def finish(self, step: int = 1) -> PlanMessage | None:
        self.planner.think(step, self.history, self.ledger, None, 7, 4)
        self.journal.warn()
        return None if self.planner.outbox is None else PlanMessage.decode(self.planner.outbox)


def test_a_full_plan_is_made_once_a_load_is_known() -> None:
    one = OnePlanner()
    one.planner.wanted = True
    assert not one.think(), "no load yet"
    assert one.saw(0, 0, 9).think()
    made = one.finish()
    assert made is not None and made.full and (made.plan_id, made.base) == (7, 4)
    assert one.planner.busy and one.planner.wanted, "until it is announced"
    one.planner.outbox = None
    one.planner.announced(full=False)
    assert one.planner.wanted
    one.planner.announced(full=True)
    assert not one.planner.wanted and not one.planner.busy


def test_lost_experts_are_planned_for_without_any_load() -> None:
    one = OnePlanner()
    one.ledger.phy2log[0, 3] = -1  # not allocated; its expert stays on the other rank
    one.planner.wanted = True
    assert one.think()
    made = one.finish()
    assert made is not None and sorted(set(made.phy2log[0].tolist())) == [0, 1, 2]


def test_a_plan_that_moves_nothing_and_gains_nothing_is_not_announced() -> None:
    # Expert 0 in two halves: 4 tokens, 2 tokens of expert 1 and 2 of expert 2 are 4 a rank.
    one = OnePlanner().saw(4, 2, 2)
    one.planner.wanted = True
    one.think()
    assert one.finish() is None and not one.planner.wanted
    assert one.planner.reason == "nothing gained: step time 1.0000 of ideal, 1.0000 with new shares"
    one.planner.announced(full=False)
    assert one.planner.reason == ""


def test_shares_are_solved_anew_once_a_window_where_it_may_pay() -> None:
    one = OnePlanner(resplit_gain=0.25)
    assert not one.think(uneven=2.0), "no window yet"
    one.saw(0, 0, 0)
    assert not one.think(uneven=2.0), "a window without tokens"
    one.saw(4, 4, 0)
    assert not one.think(uneven=1.25), "no more than the gain"
    assert not one.think(uneven=2.0), "this window was judged already"
    one.saw(4, 4, 0)
    assert not one.think(), "nothing was measured"
    assert one.think(uneven=1.26)
    made = one.finish()
    # All of expert 0 goes to the rank that does not have expert 1.
    assert made is not None and not made.full and made.share[0].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert made.reason == "shares re-solved" and (made.plan_id, made.base) == (7, 4)
    assert np.array_equal(made.phy2log, one.ledger.phy2log)


@pytest.mark.parametrize("gain,announced", [(0.5, True), (0.51, False)])
@pytest.mark.parametrize("tokens,before,after", [((4, 4, 0), 1.5, 1.0), ((4, 12, 0), 1.75, 1.5)])
def test_new_shares_are_announced_if_they_gain_as_much_as_asked(
    gain: float, announced: bool, tokens: tuple[int, ...], before: float, after: float
) -> None:
    # 2 + 4 tokens on rank 0, 4 a rank are ideal; or 2 + 12, of which 12 stay there, and 8.
    one = OnePlanner(resplit_gain=gain * (before - after) / 0.5).saw(*tokens)
    assert measure_balance(one.history.load("all"), one.ledger).step_over_ideal == before
    one.think(uneven=9.0)
    assert (one.finish() is not None) == announced
    if not announced:
        assert one.planner.reason == f"nothing gained: step time {before:.4f} of ideal, {after:.4f} with new shares"


def test_a_job_plans_from_what_served_when_it_began() -> None:
    """A layer that flips meanwhile writes new slots and shares to the ledger."""
    begun, flipped = Event(), Event()

    def planner(load: NDArray[np.float64], topology: Topology, slots: NDArray[np.int64]) -> PlacementPlan:
        begun.set()
        assert flipped.wait(20)
        return plan(load, topology, old=slots)

    one = OnePlanner(planner).saw(4, 2, 2)
    one.planner._thread.inline = False
    one.planner.wanted = True
    one.think()
    assert begun.wait(20)
    one.ledger.phy2log[0], one.ledger.share[0] = [0, 1, 0, 2], [0.0, 1.0, 1.0, 1.0]
    flipped.set()
    until = now() + 20
    while one.planner.reason == "" and now() < until:
        assert one.finish() is None
    assert one.planner.reason == "nothing gained: step time 1.0000 of ideal, 1.0000 with new shares"


def test_shares_that_do_not_pay_leave_the_wish_for_a_plan() -> None:
    one = OnePlanner(resplit_gain=0.9).saw(4, 4, 0)
    one.think(uneven=9.0)
    one.planner.wanted = True  # while the job ran
    one.ledger.phy2log[:] = -1
    one.history = LoadHistory(1, EXPERTS, decay=0.0)
    one.planner._not_before = 99
    assert one.finish() is None and one.planner.wanted


def test_failures_pause_for_twice_as_long_each_time() -> None:
    tried: list[int] = []
    step = 0

    def planner(*_: object) -> object:
        tried.append(step)
        raise RuntimeError("no solution")

    def think(steps: range) -> None:
        nonlocal step
        for step in steps:
            one.think(step)

    one = OnePlanner(planner).saw(1, 1, 9)  # type: ignore[arg-type]
    one.planner.wanted = True
    with pytest.warns(RebalanceWarning, match="planning failed: RuntimeError: no solution"):
        think(range(24))
    # Each is reported a step later, and the pauses are 3, 6 and 12 steps from there.
    assert tried == [0, 4, 11]
    assert [incident.then.split()[-1] for incident in one.journal.incidents] == ["4", "11", "24"]
    one.planner.restart(wanted=True)
    with pytest.warns(RebalanceWarning, match="the next plan is tried at step 4"):
        think(range(2))
    one.planner.announced(full=False)
    with pytest.warns(RebalanceWarning, match="the next plan is tried at step 8"):
        think(range(4, 6))
    one.planner.wanted = False
    one.saw(4, 2, 2).think(8, uneven=9.0)  # a job that ends, without a gain
    one.think(9)
    one.planner.wanted = True
    with pytest.warns(RebalanceWarning, match="the next plan is tried at step 14"):
        think(range(10, 12))
    one.planner.restart(wanted=False)
    assert not one.planner.wanted and not one.planner.busy


def test_a_restart_forgets_a_plan_that_waits() -> None:
    one = OnePlanner().saw(0, 0, 9)
    one.planner.wanted = True
    one.think()
    assert one.finish() is not None
    one.planner.restart()
    assert one.planner.outbox is None and one.planner.wanted and not one.planner.busy
    assert one.think()
    one.planner.restart()
    assert one.planner._thread.poll() is None


@pytest.mark.parametrize("alive,copies", [(2, 2), (1, 1)])
def test_copies_are_no_more_than_living_ranks(alive: int, copies: int) -> None:
    one = OnePlanner(min_copies=2).saw(1, 1, 1)
    ledger = Ledger.of([ExpertMap(((0, 1, 2), (2, 0, 1)), EXPERTS)], 1, None)
    topology = ledger.topology if alive == 2 else type(ledger.topology)(2, 1, 3, alive=(True, False))
    made = one.planner._plan(np.ones((1, EXPERTS)), topology, ledger.phy2log)
    living = made.phy2log[0][topology.alive_W[topology.gpu_P]]
    assert np.bincount(living[living >= 0], minlength=EXPERTS).tolist() == [copies] * EXPERTS
