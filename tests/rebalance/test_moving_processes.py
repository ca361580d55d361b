"""Real processes of which one is killed while experts move: the others repair, a new one joins, and all is complete.
Each case draws from its seed: the transport, whether experts have copies, who is killed, and where in the migration."""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_mk.errors import CommError, FallbackWarning
from moe_mk.flight import Flight
from moe_mk.lab.testing import on_ranks as processes
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.placement.eplb import PlacementPlan, Topology, plan, resplit
from moe_mk.rebalance import RebalanceManager, RebalanceSettings, RebalanceWarning
from moe_mk.rebalance.migration import Migration
from moe_mk.rebalance.transfer import ExpertTransfer
from tests.rebalance.test_regroup_processes import (
    EXPERTS,
    LAYERS,
    LONG_S,
    TRANSPORTS,
    group_of,
    judged,
    layers_over,
    over,
    serve,
)
from tests.support import layers as build
from tests.support import rebalance_world as world

pytestmark = pytest.mark.slow
Outcome = dict[str, Any]
RANKS, MOST_STEPS = 4, 200
POINTS: dict[str, tuple[type, str, int]] = {
    "plan": (RebalanceManager, "_receive_plan", 1),
    "post": (ExpertTransfer, "post", 10),
    "land": (ExpertTransfer, "land", 10),
    "vote": (Migration, "_vote", 10),
    "stage": (Migration, "_stage", LAYERS),
    "flip": (Migration, "flip", LAYERS),
    "last vote": (Migration, "_vote", LAYERS),
}
"""What the victim is doing: whose method, and how many calls of it every migration of these tests makes at least."""
FLIGHTS = ("plan", "land", "vote", "last vote")
"""Points with messages of their own, that a process can be killed in the middle of."""


@dataclass(frozen=True)
class Case:
    """One world: four processes that serve, one that is killed, and one that takes its place."""

    seed: int
    transport: str
    has_copies: bool
    victim: int
    point: str
    when: str
    """before, within (after its message was posted) or after the call."""
    occurrence: int
    """The call of this point at which the victim is killed, from 0."""

    @classmethod
    def drawn(cls, seed: int) -> Case:
        """Transports, and points with their times, take turns; the rest is drawn."""
        draw = random.Random(seed)
        moments = [(point, when) for point in POINTS for when in ("before", "within", "after")]
        moments = [(point, when) for point, when in moments if when != "within" or point in FLIGHTS]
        point, when = moments[seed // len(TRANSPORTS) % len(moments)]
        occurrence = draw.randrange(POINTS[point][2])
        transport = list(TRANSPORTS)[seed % len(TRANSPORTS)]
        return cls(seed, transport, draw.random() < 0.5, draw.randrange(RANKS), point, when, occurrence)

    def layers(self, comm: Any) -> Any:
        return layers_over(comm, self.transport, **({"placement": world.PLACEMENT} if self.has_copies else {}))

    def manager(self, comm: Any) -> RebalanceManager:
        settings = RebalanceSettings(sync_every=2, inline=True, bytes_per_step=512)  # an expert has 1536 bytes
        return RebalanceManager(self.layers(comm), settings, planner=self.planner)

    def planner(self, load: NDArray[np.float64], topology: Topology, slots: NDArray[np.int64]) -> PlacementPlan:
        """Move most experts of all layers to other ranks while all ranks live; after that plan as usual."""
        made = plan(load, topology, old=slots)
        if not topology.alive_W.all() or topology.gpus < RANKS:
            return made
        draw, moved = np.random.default_rng(self.seed), slots.copy()
        for x, row in enumerate(slots):
            while not self._is_far(moved[x], row):
                moved[x] = draw.permutation(row)
        return replace(made, phy2log=moved, share=resplit(moved, load, topology))

    @staticmethod
    def _is_far(new: NDArray[np.int64], old: NDArray[np.int64]) -> bool:
        """Whether at least two rounds of pairs are needed, and no rank gets the same expert twice."""
        ranks = [
            (set(a.tolist()), set(b.tolist())) for a, b in zip(np.split(new, RANKS), np.split(old, RANKS), strict=True)
        ]
        return max(len(a - b) for a, b in ranks) >= 2 and all(len(a) == len(new) // RANKS for a, _ in ranks)


class Victim:
    def __init__(self, case: Case) -> None:
        self.case, self.passed = case, Counter[str]()

    def patched(self) -> Any:
        owner, name, _ = POINTS[self.case.point]
        original = getattr(owner, name)
        return mock.patch.object(
            owner, name, self._flight(original) if self.case.point in FLIGHTS else self._call(original)
        )

    def reach(self, when: str, owner: Any) -> None:
        if self.case.point == "last vote" and owner.staged is None:
            return
        if when == self.case.when and self.passed[when] == self.case.occurrence:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed[when] += 1

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.reach("before", arguments[0])
            returned = original(*arguments)
            self.reach("after", arguments[0])
            return returned

        return call

    def _flight(self, original: Callable[..., Flight[Any]]) -> Callable[..., Flight[Any]]:
        def flight(*arguments: Any) -> Flight[Any]:
            self.reach("before", arguments[0])
            inner = original(*arguments)
            try:
                point = next(inner)
            except StopIteration as landed:  # the message was posted before, and is here
                self.reach("within", arguments[0])
                returned = landed.value
            else:
                self.reach("within", arguments[0])
                yield point
                returned = yield from inner
            self.reach("after", arguments[0])
            return returned

        return flight


def serve_until_the_loss(manager: RebalanceManager, rank: int) -> Outcome:
    """Serve through the migration until a call fails; returns what was raised."""
    serve(manager, rank, 2)
    manager.plan_soon()
    try:
        serve(manager, rank, MOST_STEPS)
    except CommError as error:
        return {"error": str(error), "peer": error.peer}
    raise AssertionError(f"no rank was lost within {MOST_STEPS} steps: {manager.status()}")


def checked(manager: RebalanceManager, group: Any, case: Case, rank: int) -> Outcome:
    """`judged`, with every slot compared to the checkpoint, and what must be equal on all ranks."""
    layers, tensors, status = list(manager.layers), build.tensors(EXPERTS), manager.status()
    found = judged(layers, group, case.transport, rank)  # type: ignore[arg-type]
    found["slots"] = all(
        world.matrices_equal(layer.live.export_slot(slot), tensors, expert)
        for layer in layers
        for slot, expert in enumerate(layer.expert_map.local_to_global(layer.ep.rank))
    )
    found["alike"] = [found["maps"], status.step, status.plan_id, list(status.epochs)]
    return found


def with_a_death_on_the_way(number: int, seed: int, meeting: str) -> Outcome:
    """Four ranks serve while experts move, one is killed, three repair, and process 4 takes its place."""
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore", RebalanceWarning)
    warnings.simplefilter("ignore", FallbackWarning)
    case, outcome = Case.drawn(seed), Outcome()
    left = [rank for rank in range(RANKS) if rank != case.victim]
    if number < RANKS:
        manager = case.manager(over(group_of(list(range(RANKS)))))
        if number == case.victim:
            with Victim(case).patched():
                return serve_until_the_loss(manager, number)
        outcome |= serve_until_the_loss(manager, number)
        group = group_of(left)
        manager.rank_lost(case.victim, over(group))
        outcome["repaired"] = checked(manager, group, case, number)
        serve(manager, number, 6)
    # A process that has not made the same groups as the others can meet them only in a new default group.
    rank = case.victim if number == RANKS else number
    dist.destroy_process_group()
    limit = timedelta(seconds=LONG_S)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=limit)
    comm = over(dist.group.WORLD)
    if number == RANKS:
        manager = case.manager(comm)
    manager.rank_joined(case.victim, comm)
    outcome["joined"] = checked(manager, dist.group.WORLD, case, rank)
    epochs = manager.status().epochs
    manager.plan_soon()
    while any(after <= before for after, before in zip(manager.status().epochs, epochs, strict=True)):
        serve(manager, rank, 1)
        assert manager.status().step < MOST_STEPS, manager.status()
    outcome["at the end"] = checked(manager, dist.group.WORLD, case, rank)
    outcome["state"] = manager.state
    return outcome


def run_case(seed: int, folder: Path) -> list[Outcome]:
    """One world of five processes; returns the outcomes of those that live on, after checking every one of them."""
    case = Case.drawn(seed)
    with RankWorld(RANKS + 1) as ranks, pytest.raises(RankError) as failed:
        ranks.call(with_a_death_on_the_way, seed, (folder / "meeting").as_uri(), timeout_s=LONG_S)
    problems = failed.value.problems
    assert list(problems) == [case.victim] and "exit code -9" in problems[case.victim], f"{case}\n{failed.value}"
    outcomes = [each for _, each in sorted(failed.value.results.items()) if isinstance(each, dict)]
    for each in outcomes[:-1]:
        assert each["peer"] == case.victim and f"peer {case.victim}" in each["error"], each
    for when in ("repaired", "joined", "at the end"):
        reported = [each[when] for each in outcomes if when in each]
        assert len(reported) == (RANKS - 1 if when == "repaired" else RANKS)
        for each in reported:
            assert each["lost"] == 0 and each["equal"] and each["slots"] and each["worst"] < 1e-5, (when, each)
            assert each["alike"] == reported[0]["alike"] and set(each["transports"]) == {case.transport}, (
                when,
                reported,
            )
            assert all(set().union(*maps) == set(range(EXPERTS)) for maps in each["maps"])
    assert "halted" not in {each["state"] for each in outcomes}
    return outcomes


@pytest.fixture(autouse=True)
def survivors_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is killed at the beginning here: what is tried comes after that, on machines of any speed."""
    monkeypatch.setattr(processes, "GRACE_S", LONG_S)


def test_cases_kill_at_every_point_over_every_transport() -> None:
    drawn = [Case.drawn(seed) for seed in range(40)]
    assert {(case.transport, case.point) for case in drawn} == {(t, p) for t in TRANSPORTS for p in POINTS}
    assert {case.victim for case in drawn} == set(range(RANKS))
    assert {case.has_copies for case in drawn} == {False, True}


@pytest.mark.parametrize("seed", [68, 49])
def test_a_rank_killed_while_experts_move_is_replaced(seed: int, tmp_path: Path) -> None:
    run_case(seed, tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(40))
def test_a_rank_killed_anywhere_in_a_migration_is_replaced(seed: int, tmp_path: Path) -> None:
    run_case(seed, tmp_path)
