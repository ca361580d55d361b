"""Where experts go when ranks are lost or join, and groups that change with every rank in one process."""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk import ConfigError, ExpertMap, MoELayer, ParallelGroups
from moe_mk.comm import LockstepWorld
from moe_mk.comm.communicator import Communicator
from moe_mk.errors import FallbackWarning, RegroupError
from moe_mk.flight import Flight, interleave
from moe_mk.layer.serving_state import ServingState
from moe_mk.placement.eplb import Topology
from moe_mk.rebalance import RebalanceManager, RebalanceSettings, RebalanceWarning
from moe_mk.rebalance.regroup import RankState, after_join, after_loss, disagreements, fit, slots_for
from tests.support import layers as build
from tests.support.layers import live_method

EXPERTS, TOP_K, TOKENS = 8, 2, 9


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RebalanceWarning)
        yield


def state(member: int | None, members: tuple[int | None, ...], problem: str = "", **facts: str) -> RankState:
    return RankState(member, members, problem, facts, 1, 1, 1, [0], {})


def test_disagreements_are_listed_by_rank() -> None:
    # Ranks 0 and 2 of the machine go on, a new process takes rank 1.
    agreed = (0, None, 2)
    assert disagreements([state(member, agreed, layers="a") for member in agreed]) == []
    found = disagreements([state(0, agreed, layers="a"), state(None, agreed, layers="b"), state(2, agreed)])
    assert found == ["layers of rank 0: a", "layers of rank 1: b", "layers of rank 2: (nothing)"]
    found = disagreements([state(member, agreed, layers=of) for member, of in zip(agreed, "aab", strict=True)])
    assert found == ["layers of rank 0: a", "layers of rank 1: a", "layers of rank 2: b"]
    found = disagreements([state(2, agreed), state(None, agreed), state(0, agreed, "a problem")])
    assert found == ["rank 2: a problem"]
    found = disagreements([state(2, agreed), state(None, agreed), state(0, agreed)])
    assert found == [
        f"rank {new} of the new group is [{old}] of the machine, not [{2 - old}]" for new, old in ((0, 2), (2, 0))
    ]
    found = disagreements([state(0, (0, 2)), state(2, (0, None))])
    assert found[1] == "rank 1 (rank 2 of the machine) goes on with ranks [0, a new one]" and len(found) == 2
    assert disagreements([state(None, (None,))]) == ["every rank joins; one that has served must be among them"]


@given(st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=1, max_size=3))
def test_slices_of_a_rank_have_come_as_far_as_the_furthest(counts: list[list[int]]) -> None:
    each = [RankState(1, (0, None, 1), "", {"a": "b"}, s, f, p, epochs, {"x": 1}) for s, f, p, *epochs in counts]
    most = [max(column) for column in zip(*counts, strict=True)]
    step, flips, plan_id, *epochs = most
    one = RankState.decode("\n".join(slice_state.encode() for slice_state in each))
    assert one == RankState(1, (0, None, 1), "", {"a": "b"}, step, flips, plan_id, epochs, {"x": 1})


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    "change", [{"member": 0}, {"members": (1, None)}, {"must_equal": {"layers": "b"}}, {"problem": "a reason"}], ids=str
)
def test_slices_of_a_rank_that_differ_are_a_problem(change: dict[str, Any], at: int) -> None:
    each = [state(1, (0, 1), layers="a"), state(1, (0, 1), layers="a")]
    each[at] = replace(each[at], **change)
    found = RankState.decode("\n".join(one.encode() for one in each)).problem
    assert found == change.get("problem", "its slices of the same experts state different ranks")


# What goes where.


def test_experts_stay_where_they_can_by_hand() -> None:
    assert fit([[0, 1], [2, 3], [4, 5]], [3, 3, 2], 8, reads=True) == [[0, 1, 6], [2, 3, 7], [4, 5]]
    assert fit([[0, 1], [2, 3], [4, 5]], [3, 3, 2], 8, reads=False) == [[0, 1], [2, 3], [4, 5]]
    # 3 is lost; the first spare copy is that of expert 0.
    assert fit([[0, 1], [0, 2]], [2, 2], 4, reads=True) == [[3, 1], [0, 2]]
    # Grown slots are given back, and a sole copy moves.
    grown = [[0, 1, 6], [2, 3, 7], [4, 5]]
    assert fit([*grown, [6, 7]], [2] * 4, 8, reads=True) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # The new rank is the first and holds 0 and 1: expert 7 of the third has to go to where a spare copy was.
    assert fit([[0, 1], *grown], [2] * 4, 8, reads=True) == [[7, 1], [0, 6], [2, 3], [4, 5]]


@pytest.mark.parametrize("seed", range(30))
def test_every_expert_is_placed_once_at_least_and_no_rank_holds_too_many(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    experts, ranks = number(1, 20), number(1, 6)
    rows = [torch.randint(0, experts, (number(1, 6),), generator=draw).tolist() for _ in range(ranks)]
    slots = slots_for([number(1, 5) for _ in range(ranks)], experts)
    placed = fit(rows, slots, experts, reads=True)
    assert {e for row in placed for e in row} == set(range(experts))
    assert all(len(set(row)) == len(row) <= room for row, room in zip(placed, slots, strict=True))
    held = {e for row in rows for e in row}
    assert {e for row in fit(rows, slots, experts, reads=False) for e in row} == held


def test_a_lost_rank_leaves_its_number_and_a_new_one_takes_it() -> None:
    left = after_loss(Topology(4, 2, 2), [0, 1, 3], 8, copies=1)
    assert left.alive == (True, True, False, True) and left.slots_W.tolist() == [3, 3, 2, 2]
    back, initial_slots = after_join(left, [2, 2, 2, 2], [0, 1, None, 3], [2])
    assert back.alive == (True,) * 4 and back.slots_W.tolist() == initial_slots == [2, 2, 2, 2]
    both = after_loss(Topology(3, 1, 4), [1, 2], 8, copies=5)  # no more copies than ranks
    assert both.slots_W.tolist() == [4, 8, 8]


def test_ranks_are_numbered_anew_where_no_place_is_free() -> None:
    left = after_loss(Topology(4, 1, 2, speeds=(1, 2, 3, 4)), [0, 1, 2], 8, copies=1)
    more, initial_slots = after_join(left, [2, 2, 2, 2], [None, 0, 1, 2], [5])
    assert more.slots_W.tolist() == initial_slots == [5, 2, 2, 2] and more.speed_W.tolist() == [1, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"5 ranks do not divide over 2 nodes.*\[a new one, 0, 1, 2, 3\]"):
        after_join(Topology(4, 2, 2), [2] * 4, [None, 0, 1, 2, 3], [2])


# Groups that change.


class Rank:
    """One process that serves; `original_rank` numbers its tokens."""

    def __init__(self, comm: object, original_rank: int, **changes: object) -> None:
        chosen: dict[str, object] = {"experts": "torch_cpu"}
        config = build.config(EXPERTS, TOP_K, **(chosen | changes))
        self.original_rank = original_rank
        self.layer = MoELayer(config, dtype=torch.float32, groups=ParallelGroups(ep=comm))  # type: ignore[arg-type]
        self.layer.load_weights(build.tensors(EXPERTS))
        self.manager = RebalanceManager([self.layer], RebalanceSettings(sync_every=2, inline=True))


def group(size: int, **changes: object) -> list[Rank]:
    return [
        Rank(comm, original_rank, **changes) for original_rank, comm in enumerate(LockstepWorld(size).communicators())
    ]


def serves_right(ranks: Sequence[Rank], steps: int = 5) -> bool:
    """Whether all outputs are those of one rank that has everything."""
    alone, right = build.layer(EXPERTS, TOP_K, experts="torch_cpu"), True
    for _ in range(steps):
        x = [
            torch.randn(TOKENS, build.HIDDEN, generator=torch.Generator().manual_seed(rank.original_rank))
            for rank in ranks
        ]
        outputs = interleave([rank.layer.steps(x_TH) for rank, x_TH in zip(ranks, x, strict=True)])
        right &= all(torch.allclose(y, alone(x_TH), atol=1e-5) for y, x_TH in zip(outputs, x, strict=True))
        interleave([rank.manager.steps() for rank in ranks])
    return right


def lose(ranks: list[Rank], *dead: int) -> list[Rank]:
    left = [rank for at, rank in enumerate(ranks) if at not in dead]
    comms = LockstepWorld(len(left)).communicators()
    interleave([rank.manager.rank_lost_steps(dead, comm) for rank, comm in zip(left, comms, strict=True)])
    return left


def join(ranks: list[Rank], at: int, original_rank: int) -> list[Rank]:
    comms = LockstepWorld(len(ranks) + 1).communicators()
    all_ranks = [*ranks[:at], Rank(comms[at], original_rank), *ranks[at:]]
    interleave([rank.manager.rank_joined_steps(at, comm) for rank, comm in zip(all_ranks, comms, strict=True)])
    return all_ranks


@pytest.mark.parametrize("dead", [(0,), (2,), (1, 3), (0, 1, 2)])
def test_any_ranks_may_be_lost_at_once(dead: tuple[int, ...]) -> None:
    left = lose(group(4), *dead)
    assert serves_right(left) and all(rank.layer.expert_map.lost == frozenset() for rank in left)
    assert left[0].layer.config.parallel.ep == len(left)


@pytest.mark.parametrize(
    "lost, lines",
    [
        ((3, 2, 3), "rank 0 (rank 0 of the machine) goes on with ranks [0, 1, 2]"),
        ((3, 2, 3), "rank 1 (rank 1 of the machine) goes on with ranks [0, 1, 3]"),
        ((3, 3, 9), "rank 2: lost ranks [9] are out of range; pass at least one, 0 <= rank < 4"),
        ((3, 3, [2, 3]), "rank 2: rank 2 is itself among the lost ranks [2, 3]"),
    ],
)
def test_ranks_that_name_different_losses_all_hear_of_it(lost: Sequence[int | list[int]], lines: str) -> None:
    ranks = group(4)

    def refused(rank: Rank, named: int | list[int], comm: Communicator) -> Flight[None]:
        with pytest.raises(RegroupError, match=re.escape(lines)):
            yield from rank.manager.rank_lost_steps(named, comm)

    comms = LockstepWorld(3).communicators()
    interleave([refused(*each) for each in zip(ranks[:3], lost, comms, strict=True)])
    assert serves_right(lose(ranks, 3))


def test_ranks_are_lost_one_after_the_other_down_to_the_last() -> None:
    ranks = group(4)
    for _ in range(3):
        assert serves_right(ranks)
        ranks = lose(ranks, 1)
    assert serves_right(ranks) and ranks[0].layer.decision.chosen.prepare_finalize == "no_ep"
    assert ranks[0].manager.status().epochs[0] >= 3


def test_ranks_that_noticed_the_loss_at_different_steps_go_on_at_one() -> None:
    ranks = group(4)
    assert serves_right(ranks, 3)
    ranks[1].manager._step += 1  # its forward went through, and its step() met the loss
    ranks[2].manager._plan_id, ranks[0].manager._flips = 5, 3  # so may have a plan and a flip
    left = lose(ranks, 3)
    assert {rank.manager._step for rank in left} == {4} and serves_right(left, 0)
    assert {(rank.manager.status().plan_id, rank.manager._flips) for rank in left} == {(6, 4)}
    assert serves_right(left)


def test_what_is_reported_of_a_loss_counts_sole_copies() -> None:
    with pytest.warns(
        RebalanceWarning, match=r"ranks \[0\] are lost and with them the only copies of 2 experts in 1 l"
    ):
        left = lose(group(4), 0)
    assert left[0].manager.status().incidents[0].then == "all experts serve in the group of 3"


def test_only_a_call_that_failed_is_recovered_from() -> None:
    ranks, comms = group(3), LockstepWorld(2).communicators()
    before = [comm.status.epoch for comm in comms]
    interleave([rank.manager.rank_lost_steps(2, comm) for rank, comm in zip(ranks, comms, strict=False)])
    assert [comm.status.epoch for comm in comms] == before and serves_right(ranks[:2])


@pytest.mark.parametrize("at", [0, 1])
def test_a_placement_that_cannot_be_tried_out_on_one_rank_is_refused_by_all(at: int) -> None:
    ranks = group(3)

    def failing(staged: ServingState) -> Flight[None]:
        yield from staged.try_out(ranks[at].layer.device)
        problem = OSError("no space for the windows")
        staged.experts.grid.ep.fail(problem)
        raise problem

    with (
        live_method(ranks[at].layer, "try_out", failing),
        pytest.raises(RegroupError, match=rf"trying out failed(?s:.)*rank {at}: OSError: no space for the windows"),
    ):
        lose(ranks, 2)
    assert [rank.layer.ep.size for rank in ranks] == [3] * 3 and serves_right(lose(ranks, 2))


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_new_rank_may_have_any_place_in_the_group(at: int) -> None:
    left = lose(group(4), 3)
    turned = ExpertMap(tuple(row[::-1] for row in left[0].layer.expert_map.experts_of_rank), EXPERTS)
    for rank in left:  # by its program, which does not change how many slots it has in a whole group
        rank.layer.live.set_placement(turned)
    assert serves_right(left, 1) and serves_right(ranks := join(left, at, original_rank=9))
    assert all(len(row) == 2 for row in ranks[0].layer.expert_map.experts_of_rank)
    assert len({rank.layer.expert_map for rank in ranks}) == 1 and len({rank.manager._step for rank in ranks}) == 1


def test_a_group_may_grow_beyond_what_it_was() -> None:
    ranks = join(group(2), 2, original_rank=5)
    assert serves_right(ranks, 10) and ranks[0].layer.expert_map.num_ranks == 3
    assert lose(ranks, 0)[0].layer.expert_map.num_ranks == 2


def test_a_pinned_transport_gives_way_and_comes_back() -> None:
    with pytest.warns(FallbackWarning, match="prepare_finalize = one_sided cannot serve a group of 1; no_ep does"):
        alone = lose(group(2, prepare_finalize="one_sided"), 1)
    assert serves_right(alone) and alone[0].layer.decision.chosen.prepare_finalize == "no_ep"
    comms = LockstepWorld(2).communicators()
    both = [alone[0], Rank(comms[1], 1, prepare_finalize="one_sided")]
    interleave([rank.manager.rank_joined_steps(1, comm) for rank, comm in zip(both, comms, strict=True)])
    assert serves_right(both) and both[0].layer.decision.chosen.prepare_finalize == "one_sided"


def test_what_is_flipped_back_serves_as_it_did() -> None:
    layer, x_TH = build.layer(EXPERTS, TOP_K, num_shared_experts=1), torch.randn(TOKENS, build.HIDDEN)
    before, config, y_TH = layer.state, layer.config, layer(x_TH)
    other = layer.live.stage(layer.expert_map, ep=LockstepWorld(1).communicators()[0])
    old = layer.live.flip(other)
    assert layer.config.parallel.ep == 1 and torch.equal(layer(x_TH), y_TH)
    layer.live.flip(old)
    assert layer.state.weights is before.weights and layer.config is config and torch.equal(layer(x_TH), y_TH)


def test_layers_without_a_source_are_warned_of_and_refused_until_they_have_one() -> None:
    source = build.layer(EXPERTS, TOP_K)
    ranks = []
    for original_rank, comm in enumerate(LockstepWorld(2).communicators()):
        rank = Rank(comm, original_rank)
        rank.layer.source = None  # as after take()
        with pytest.warns(RebalanceWarning, match=r"loss of ranks \[0, 1\] cannot be repaired.*read_from"):
            rank.manager = RebalanceManager([rank.layer], RebalanceSettings(sync_every=2, inline=True))
        ranks.append(rank)
    with pytest.raises(RegroupError, match="was given its weights by take"):
        lose(ranks, 1)
    assert source.source is not None
    ranks[0].layer.read_from(*source.source)
    assert serves_right(lose(ranks, 1))


def test_warnings_that_are_errors_do_not_stop_a_commit_half_way() -> None:
    ranks = group(3, on_lost_expert="drop")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        with pytest.raises(FallbackWarning, match="have no live copy"):
            lose(ranks, 2)
    assert all(rank.layer.ep.size == 2 for rank in ranks[:1]) and ranks[0].manager.comm.size == 2
