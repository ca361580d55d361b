"""Where experts lie: the three tables, shares of replicas, and what is left when a rank dies."""

import pytest
import torch

from moe_mk import CommError, ConfigError, ExpertMap, MoELayer, ParallelGroups
from moe_mk.comm import LockstepWorld
from moe_mk.flight import interleave
from moe_mk.placement.eplb import rebalance_experts
from tests.support.layers import config, layer


@pytest.mark.row(104, 105, 106)
def test_the_three_tables_by_hand() -> None:
    dealt = ExpertMap.round_robin(8, 4)
    assert dealt.physical_to_global() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert dealt.global_to_physical() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert dealt.local_to_global(3) == [3, 7]
    replicated = ExpertMap.from_physical([2, 1, 0, 2], 2, 3)
    assert replicated.global_to_physical() == [2, 1, 0], "the first replica of expert 2"
    assert replicated.local_to_global(1) == [0, 2]


@pytest.mark.row(107, 108)
@pytest.mark.parametrize("placement,first", [("linear", (0, 1, 2, 3)), ("round_robin", (0, 2, 4, 6))])
def test_a_layer_has_the_placement_of_its_setting(placement: str, first: tuple[int, ...]) -> None:
    for rank, comm in enumerate(LockstepWorld(2).communicators()):
        made = MoELayer(config(8, 2, placement=placement), dtype=torch.float32, groups=ParallelGroups(ep=comm))
        assert made.expert_map.experts_of_rank[0] == first
        assert made.expert_map.local_to_global(rank) == (list(first) if rank == 0 else sorted({*range(8)} - {*first}))


def test_near_copies_are_those_on_a_node_that_ranks_of_tp_share() -> None:
    # Nodes of four ranks hold two EP ranks each. Copies of expert 0 are on EP ranks 0 and 2, physical 0 and 4.
    settings = {"placement": (0, 1, 2, 3, 0, 1, 2, 3), "ranks_per_node": 4, "prepare_finalize": "all_to_all"}
    for rank, comm in enumerate(LockstepWorld(4).communicators()):
        groups = ParallelGroups(ep=comm, tp=LockstepWorld(2).communicators()[0])
        tables = MoELayer(config(4, 2, **settings), dtype=torch.float32, groups=groups).state.tables
        assert set(tables.to_physical(torch.zeros((99, 1), dtype=torch.int32), 0).flatten().tolist()) == {rank // 2 * 4}


@pytest.mark.row(123)
def test_ranks_of_equal_maps_and_other_epochs_are_stopped_before_they_exchange() -> None:
    world = LockstepWorld(2)
    layers = [layer(8, 2, ParallelGroups(ep=comm), prepare_finalize="all_to_all") for comm in world.communicators()]
    x_TH = torch.ones(3, layers[0].config.model.hidden_size)
    interleave([each.steps(x_TH) for each in layers])
    for each, epoch in zip(layers, (1, 2), strict=True):
        each.live.flip(each.live.stage(each.expert_map, epoch=epoch))
    with pytest.raises(CommError, match="epoch"):
        interleave([each.steps(x_TH) for each in layers])


def test_shares_are_equal_unless_given() -> None:
    #                       expert 0 in slots 0 and 2, expert 1 in slot 1, expert 2 in slot 3
    equal = ExpertMap.from_physical([0, 1, 0, 2], 2, 3)
    assert equal.shares_of(0) == [0.5, 0.5] and equal.shares_of(2) == [1.0]
    uneven = ExpertMap(equal.experts_of_rank, 3, (0.25, 1.0, 0.75, 1.0))
    assert uneven.shares_of(0) == [0.25, 0.75]
    assert ExpertMap(((0, 0), (1, 2)), 3, (1.0, 0.0, 1.0, 1.0)).shares_of(0) == [1.0, 0.0], "the second one may be idle"


def test_shares_that_cannot_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shares of experts \[0\] sum to \[0.75\], not 1"):
        ExpertMap(((0, 1), (0, 2)), 3, (0.5, 1.0, 0.25, 1.0))
    with pytest.raises(ConfigError, match=r"3 shares for 4 physical experts"):
        ExpertMap(((0, 1), (0, 2)), 3, (0.5, 1.0, 0.5))
    with pytest.raises(ConfigError, match=r"shares from -0.5 to 1.5 lie outside \[0, 1\]"):
        ExpertMap(((0, 1), (0, 2)), 3, (-0.5, 1.0, 1.5, 1.0))


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_deepseek_with_two_copies_on_a_rank_are_computed_once(seed: int) -> None:
    """A hot expert may have more replicas than there are ranks: each assignment goes to one slot of them."""
    load = torch.tensor([[90.0, 1, 2, 1, 3, 1, 1, 1]]).roll(seed, 1)
    physical = rebalance_experts(load, 16, 1, 1, 2)[0][0].tolist()
    assert any(len({*physical[at : at + 8]}) < 8 for at in (0, 8)), "no rank holds an expert twice"
    dealt = ExpertMap.from_physical(physical, 2, 8)
    tables = [dealt.tables(torch.device("cpu"), rank) for rank in range(2)]
    ids_TK = torch.arange(8).repeat(4096, 1)
    for rank, each in enumerate(tables):
        chosen = each.to_physical(ids_TK, rank)
        assert torch.equal(torch.tensor(physical)[chosen.long()], ids_TK), "another expert"
        counts = torch.bincount(chosen.flatten(), minlength=16)
        near = [p for p in dealt.physical_of_logical[seed] if dealt.rank_of_physical[p] == rank]
        assert len(near) > 1 and int(counts[near].min()) > 0.8 * int(counts[near].max()), "copies take equal parts"
