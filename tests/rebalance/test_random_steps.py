"""Whatever callers replace between two steps of a rebalance, outputs stay right and rebalancing goes on from there."""

import random

import numpy as np
import pytest
import torch

from moe_mk import ExpertMap
from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.flight import interleave
from moe_mk.layer.hot_swap import swap_steps
from moe_mk.rebalance.ledger import Ledger
from tests.support.rebalance_world import (
    EXPERTS,
    LAYERS,
    PLACEMENT,
    RANKS,
    Rank,
    join,
    matrices_equal,
    serve,
    tensors,
    tokens,
)
from tests.support.tiers import quick_where

REPLACED = "weights, backends or the placement were replaced while experts were on their way"
STEPS = "reload", "loader", "place", "place", "shares", "swap", "turn", "recover", "plan"


def drawn_map(draw: random.Random, old: ExpertMap) -> ExpertMap:
    """Every expert at least once, the same number of slots on every rank; sometimes one slot more or less."""
    ranks = old.num_ranks
    slots = max(draw.choice([len(old.experts_of_rank[0])] * 3 + [2, 3, 4]), -(-EXPERTS // ranks))
    while True:
        copies = [*range(EXPERTS), *(draw.randrange(EXPERTS) for _ in range(ranks * slots - EXPERTS))]
        draw.shuffle(copies)
        rows = tuple(tuple(copies[rank * slots : (rank + 1) * slots]) for rank in range(ranks))
        if all(len(set(row)) == slots for row in rows):
            return ExpertMap(rows, EXPERTS)


class Callers:
    """What an engine may do between two steps, drawn once and done on every rank."""

    def __init__(self, seed: int, on_lost_expert: str = "drop") -> None:
        self.draw, self.joined = random.Random(seed), 0
        self.ranks = [Rank(comm, on_lost_expert=on_lost_expert) for comm in LockstepWorld(RANKS).communicators()]
        self.done: list[str] = []

    def act(self, what: str = "") -> None:
        what = what or self.draw.choice(STEPS)
        self.done.append(what)
        getattr(self, f"_{what}")()

    def _weights(self, x: int, version: int | None = None) -> dict[str, torch.Tensor]:
        return tensors(x + (self.ranks[0].version if version is None else version) * LAYERS)

    def _reload(self) -> None:
        version = self.draw.randrange(4)
        for rank in self.ranks:
            for x, layer in enumerate(rank.layers):
                layer.load_weights(self._weights(x, version))
            rank.turn_to(rank.hot, version)

    def _loader(self) -> None:
        version = self.draw.randrange(4)
        for rank in self.ranks:
            for x, layer in enumerate(rank.layers):
                loader = layer.loader()
                for name, tensor in self._weights(x, version).items():
                    loader.feed(name, tensor)
                loader.finish()
                layer.load_weights(self._weights(x, version))  # whence a lost or moved expert is read
            rank.turn_to(rank.hot, version)

    def _place(self) -> None:
        x = self.draw.randrange(LAYERS)
        placed = drawn_map(self.draw, self.ranks[0].layers[x].expert_map)
        for number, rank in enumerate(self.ranks):
            layer = rank.layers[x]
            wanted = placed.local_to_global(number)
            layer.live.set_placement(placed, {slot: layer.live.read_expert(e) for slot, e in enumerate(wanted)})

    def _shares(self) -> None:
        x = self.draw.randrange(LAYERS)
        old = self.ranks[0].layers[x].expert_map
        shares = np.ones(old.num_physical)
        for replicas in old.physical_of_logical:
            parts = [self.draw.uniform(0.1, 1.0) for _ in replicas]
            shares[list(replicas)] = [part / sum(parts) for part in parts]
        for rank in self.ranks:
            rank.layers[x].live.set_placement(ExpertMap(old.experts_of_rank, EXPERTS, tuple(shares.tolist())))

    def _swap(self) -> None:
        x, settings = self.draw.randrange(LAYERS), {}
        settings["prepare_finalize"] = self.draw.choice(["all_to_all", "all_gather"])
        settings["experts"] = self.draw.choice(["torch_cpu", "reference"])
        for report in interleave(
            [
                swap_steps(rank.layers[x], tokens(rank.original_rank), limit=0.0, settings=settings)
                for rank in self.ranks
            ]
        ):
            assert report.swapped, report

    def _turn(self) -> None:
        hot = tuple(self.draw.sample(range(EXPERTS), self.draw.randint(1, 3)))
        for rank in self.ranks:
            rank.turn_to(hot, rank.version)

    def _recover(self) -> None:
        interleave([rank.layers[0].ep.recover() for rank in self.ranks])

    def _plan(self) -> None:
        for rank in self.ranks:
            rank.manager.plan_soon()

    def _lose(self) -> None:
        if len(self.ranks) > 2:
            gone = self.draw.choice(self.ranks)
            at, self.ranks = self.ranks.index(gone), [rank for rank in self.ranks if rank is not gone]
            comms = LockstepWorld(len(self.ranks)).communicators()
            interleave([r.manager.rank_lost_steps(at, comm) for r, comm in zip(self.ranks, comms, strict=True)])

    def _join(self) -> None:
        if len(self.ranks) >= RANKS:
            return
        self.joined, old = self.joined + 1, self.ranks[0]

        def new(comm: Communicator) -> Rank:
            made = Rank(
                comm, placement="linear", on_lost_expert="raise", original_rank=RANKS + self.joined, hot=old.hot
            )
            for x, layer in enumerate(made.layers):
                layer.load_weights(self._weights(x))
            made.turn_to(old.hot, old.version)
            return made

        self.ranks = join(self.ranks, self.draw.randint(0, len(self.ranks)), new)


@pytest.mark.row(109, 120)
@pytest.mark.filterwarnings("ignore::moe_mk.rebalance.RebalanceWarning")
@pytest.mark.parametrize("seed", quick_where(lambda seed: seed == 0, range(5)))
def test_whatever_callers_replace_rebalancing_goes_on(seed: int) -> None:
    world = Callers(seed)
    for _ in range(8):
        world.act()
        serve(world.ranks, world.draw.randint(0, 4))
    serve(world.ranks, 30)
    check_serves_on(world)


@pytest.mark.filterwarnings("ignore::moe_mk.rebalance.RebalanceWarning", "ignore::moe_mk.errors.FallbackWarning")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_layers_of_other_placements_lose_and_gain_ranks_together(seed: int) -> None:
    world = Callers(seed, on_lost_expert="raise")  # what is lost is read at once
    for _ in range(2):
        between = world.draw.choices(("place", "shares", "reload", "lose"), (4, 1, 1, 1), k=4)
        for what in ("lose", *between, "join"):
            world.act(what)
            serve(world.ranks, world.draw.randint(0, 2))
    serve(world.ranks, 20)
    check_serves_on(world)


def check_serves_on(world: Callers) -> None:
    """Every output was right, ranks agree, and all layers hold what the ledger states."""
    for number, rank in enumerate(world.ranks):
        status = rank.manager.status()
        others = [each for each in status.incidents if each.what != REPLACED and " are lost and " not in each.what]
        assert rank.wrong == [] and others == [], (world.done, status)
        assert status.state in ("watching", "planning"), (world.done, status)
        assert rank.epochs[-30:] == world.ranks[0].epochs[-30:] or world.joined, (world.done, status)
        assert rank.epochs[-1] == world.ranks[0].epochs[-1], (world.done, status)
        slots, shares = rank.manager.ledger.phy2log, rank.manager.ledger.share
        for x, layer in enumerate(rank.layers):
            followed = rank.manager.ledger.map_of(slots[x], shares[x])
            assert followed.experts_of_rank == layer.expert_map.experts_of_rank, world.done
            for slot, e in enumerate(layer.expert_map.local_to_global(number)):
                assert matrices_equal(layer.live.export_slot(slot), world._weights(x), e), (world.done, x, slot)


def test_plans_follow_a_placement_that_a_caller_has_set() -> None:
    world = Callers(0)
    serve(world.ranks, 30)
    moved = world.ranks[0].manager.status().plan_id
    linear = ExpertMap.from_physical((*range(EXPERTS), 0, 1, 2, 3), RANKS, EXPERTS)
    for x in range(LAYERS):
        for number, rank in enumerate(world.ranks):
            arrived = {
                slot: rank.layers[x].live.read_expert(e) for slot, e in enumerate(linear.local_to_global(number))
            }
            rank.layers[x].live.set_placement(linear, arrived)
    for rank in world.ranks:
        rank.manager.plan_soon()
    serve(world.ranks, 40)
    for rank in world.ranks:
        status = rank.manager.status()
        assert status.plan_id > moved and status.incidents == () and rank.wrong == []
        assert all(layer.expert_map != linear for layer in rank.layers)
        assert status.balance["balance.rank_max_over_mean_worst"] == pytest.approx(1.0, abs=1e-6)


def test_a_ledger_takes_slots_that_a_caller_has_added_and_keeps_those_of_lost_ranks() -> None:
    old = Ledger.of([ExpertMap.from_physical(PLACEMENT, RANKS, EXPERTS)] * 2, 1, None)
    more = ExpertMap(((0, 1, 4, 6), (2, 3, 5), (4, 5, 0), (6, 7, 1)), EXPERTS)
    assert old.placed([old.map_of(old.phy2log[0], old.share[0]), more]).topology.slots_W.tolist() == [4, 3, 3, 3]
    machine = type(old.topology)(RANKS, slots=3, alive=[True, False, True, True])
    two = Ledger.of_rows(machine, EXPERTS, [((0,), (1,), (2,))])
    placed = two.placed([ExpertMap(((0, 1), (1,), (2,)), EXPERTS, (1.0, 0.25, 0.75, 1.0), frozenset(range(3, 8)))])
    assert placed.topology.slots_W.tolist() == [3, 3, 3, 3] and placed.living == [0, 2, 3]
    assert placed.phy2log.tolist() == [[0, 1, -1, -1, -1, -1, 1, -1, -1, 2, -1, -1]]
    assert placed.share[0, [1, 6]].tolist() == [0.25, 0.75]
