"""Four real gloo processes that serve while experts move: with delays, with damage, and with a rank that is killed."""

import gc
import random
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_mk.comm import DistributedCommunicator
from moe_mk.flight import wait
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.placement.eplb import PlacementPlan, Topology, plan
from moe_mk.rebalance import RebalanceManager, RebalanceWarning
from tests.support.rebalance_world import RANKS, Rank, damage_first, holds_right_weights, settings, touch_chunks
from tests.support.tiers import slow
from tests.support.worlds import world_of

pytestmark = pytest.mark.slow
Report = dict[str, object]
MOST_STEPS = 400


world = world_of(RANKS)


def served(**changes: object) -> Rank:
    group = dist.group.WORLD
    assert group is not None
    torch.set_grad_enabled(False)
    return Rank(DistributedCommunicator(group, timeout_s=20.0), **changes)


def serve_until(rank: Rank, done: Callable[[], bool], pause: Callable[[], None] = lambda: None) -> None:
    """Whether it is done must be the same on all ranks at the same step."""
    while not done():
        pause()
        wait(rank.serve())
        assert len(rank.epochs) < MOST_STEPS, rank.manager.status()
    rank.serve_alone(5)


def story(rank: Rank) -> Report:
    status = rank.manager.status()
    return {
        "wrong": rank.wrong,
        "epochs": [list(each) for each in rank.epochs],
        "state": status.state,
        "incidents": [str(each) for each in status.incidents],
        "received": status.received_bytes,
        "predicted": status.predicted_bytes,
        "read": status.read_bytes,
        "lost": [list(each) for each in status.lost_experts.values()],
        "right": all(holds_right_weights(layer, x) for x, layer in enumerate(rank.layers)),
    }


def slow_planner(load: NDArray[np.float64], topology: Topology, slots: NDArray[np.int64]) -> PlacementPlan:
    time.sleep(0.1)
    return plan(load, topology, old=slots)


def sliced_with_delays(number: int) -> Report:
    """Ranks 0 1 and 2 3 hold slices of the same experts; 0 2 and 1 3 share them out."""
    torch.set_grad_enabled(False)
    groups = [dist.new_group(ranks, timeout=timedelta(seconds=20)) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    ep, tp = groups[number % 2], groups[2 + number // 2]
    assert isinstance(ep, dist.ProcessGroup) and isinstance(tp, dist.ProcessGroup)
    draw, (comm, slices) = random.Random(number), [DistributedCommunicator(each, timeout_s=20.0) for each in (ep, tp)]
    rank = Rank(comm, (6, 7), slices)
    rank.manager = RebalanceManager(rank.layers, settings(inline=False), planner=slow_planner)
    if number == 1:
        touch_chunks(rank, damage_first())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RebalanceWarning)
        serve_until(
            rank, lambda: rank.manager.status().epochs == (1, 1), lambda: time.sleep(draw.choice([0.0, 0.0, 0.004]))
        )
    return story(rank)


@pytest.mark.row(109, 120, 123)
def test_slices_of_experts_move_between_processes_and_all_of_them_flip_at_one_step(world: RankWorld) -> None:
    reported = world.call(sliced_with_delays)
    assert [each["wrong"] for each in reported] == [[]] * RANKS
    assert all(each["epochs"] == reported[0]["epochs"] and each["right"] for each in reported)
    assert "were damaged on their way" in str(reported[1]["incidents"])
    assert all("refuse what they got" in str(reported[rank]["incidents"]) for rank in (0, 2, 3))
    assert sum(int(str(each["received"])) for each in reported) == reported[0]["predicted"] != 0


def with_managers_that_end(number: int, seed: int) -> Report:
    """Managers are dropped, closed, kept alive by a cycle and left behind by recoveries, at random steps."""
    rank, draw, own, ended = served(), random.Random(seed), random.Random(number), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RebalanceWarning)
        for _ in range(60):
            wait(rank.serve())
            what = "serve"
            if draw.random() < 0.1:
                what = draw.choice(["drop", "close", "leave", "cycle", "recover", "call"])
                ended.append(what)
            if what == "recover":
                rank.layers[0].recover()
            elif what == "call":
                next(dropped := rank.manager.comm.all_reduce(torch.ones(70_000), "dropped"))
                del dropped
            elif what != "serve":
                if what == "close":
                    rank.manager.close()
                if what == "leave":
                    with rank.manager:
                        pass
                if what == "cycle":
                    rank.manager.itself = rank.manager  # type: ignore[attr-defined]
                rank.manager = RebalanceManager(rank.layers, settings(sync_every=draw.choice([1, 2])))
            if own.random() < 0.1:
                gc.collect()
    return story(rank) | {"ended": ended}


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_a_manager_may_end_at_any_step_whatever_is_in_flight(world: RankWorld, seed: int) -> None:
    reported = world.call(with_managers_that_end, seed)
    for each in reported:
        assert each["wrong"] == each["incidents"] == [] and each["right"] and each["state"] != "halted", each
        assert each["epochs"] == reported[0]["epochs"], reported
    assert max(map(max, reported[0]["epochs"])) > 0  # type: ignore[call-overload]
