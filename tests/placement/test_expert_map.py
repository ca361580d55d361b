"""Any placement: tables, ids and slots fit each other; what cannot serve is refused. By hand: `test_replicas.py`."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.errors import ConfigError
from moe_mk.placement.expert_map import ExpertMap

CPU = torch.device("cpu")


@st.composite
def placements(draw: st.DrawFn, most_lost: int = 0) -> ExpertMap:
    """Experts dealt to ranks in any order, up to two of them twice, some lost, ranks of different sizes."""
    num_ranks, num_lost = draw(st.integers(1, 5)), draw(st.integers(0, most_lost))
    num_experts = draw(st.integers(num_ranks, 12)) + num_lost
    mixed = draw(st.permutations(range(num_experts)))
    order, lost = mixed[num_lost:], frozenset(mixed[:num_lost])
    ranks: list[list[int]] = [[expert] for expert in order[:num_ranks]]
    for expert in [*order[num_ranks:], *draw(st.lists(st.sampled_from(order), max_size=2))]:
        ranks[draw(st.integers(0, num_ranks - 1))].append(expert)
    return ExpertMap(tuple(tuple(dict.fromkeys(experts)) for experts in ranks), num_experts, lost=lost)


@pytest.mark.row(107, 108)
@given(st.integers(1, 12), st.integers(0, 300))
def test_both_placements_serve_every_expert_and_the_first_ranks_take_the_remainder(num_ranks: int, more: int) -> None:
    num_experts = num_ranks + more
    linear, dealt = ExpertMap.linear(num_experts, num_ranks), ExpertMap.round_robin(num_experts, num_ranks)
    assert linear.physical_to_global() == list(range(num_experts)) and linear.is_identity
    for placement in (linear, dealt):
        assert sorted(placement.physical_to_global()) == list(range(num_experts))
        sizes = [placement.num_slots(rank) for rank in range(num_ranks)]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] == (num_experts % num_ranks > 0)
    assert all(expert % num_ranks == rank for rank, mine in enumerate(dealt.experts_of_rank) for expert in mine)


@pytest.mark.row(104, 105, 106)
@given(placements(most_lost=3))
def test_the_three_tables_fit_each_other(placement: ExpertMap) -> None:
    table1, table2 = placement.global_to_physical(), placement.physical_to_global()
    kept = [expert for expert in range(placement.num_experts) if expert not in placement.lost]
    assert [expert for expert, physical in enumerate(table1) if physical != -1] == kept
    assert [table2[table1[expert]] for expert in kept] == kept
    assert [e for rank in range(placement.num_ranks) for e in placement.local_to_global(rank)] == table2
    assert len(table2) == placement.num_physical
    assert placement.has_replicas == (len(set(table2)) < len(table2))
    if not placement.has_replicas:  # a bijection
        assert sorted(table1[expert] for expert in kept) == list(range(placement.num_physical))
    for logical, physical in enumerate(placement.physical_of_logical):
        assert list(physical) == [p for p, expert in enumerate(table2) if expert == logical]


@given(placements(), st.integers(0, 9), st.lists(st.integers(0, 2**16), max_size=24), st.sampled_from([1, 3]))
def test_ids_go_to_a_replica_of_their_expert_on_one_rank_alone(
    placement: ExpertMap, salt: int, numbers: list[int], top_k: int
) -> None:
    chosen = [number % (placement.num_experts + 1) - 1 for number in numbers[: len(numbers) // top_k * top_k]]
    ids_TK = torch.tensor(chosen, dtype=torch.int32).view(-1, top_k)
    before, tables = ids_TK.clone(), placement.tables(CPU)
    physical_TK = tables.to_physical(ids_TK, salt)
    assert physical_TK.dtype == ids_TK.dtype and physical_TK.shape == ids_TK.shape and torch.equal(ids_TK, before)
    assert torch.equal(tables.to_physical(ids_TK, salt), physical_TK), "no state, no draw"
    table2 = placement.physical_to_global()
    for logical, physical in zip(ids_TK.flatten().tolist(), physical_TK.flatten().tolist(), strict=True):
        assert (physical == -1) if logical == -1 else (table2[physical] == logical)
    slots = [tables.local_slots(physical_TK, rank) for rank in range(placement.num_ranks)]
    for place, physical in enumerate(physical_TK.flatten().tolist()):
        mine = [(rank, int(slot.flatten()[place])) for rank, slot in enumerate(slots) if slot.flatten()[place] >= 0]
        if physical == -1:
            assert mine == []
        else:
            ((rank, slot),) = mine
            assert placement.local_to_global(rank)[slot] == table2[physical]


@pytest.mark.parametrize("make", [ExpertMap.linear, ExpertMap.round_robin])
@pytest.mark.parametrize("experts, ranks", [(3, 4), (0, 1), (4, 0)])
def test_a_rank_without_experts_is_refused(make: Callable[[int, int], ExpertMap], experts: int, ranks: int) -> None:
    problem = rf"{experts} experts cannot be spread over {ranks} ranks.*use 1 to {experts} ranks"
    with pytest.raises(ConfigError, match=problem):
        make(experts, ranks)


@pytest.mark.parametrize(
    "experts_of_rank, problem",
    [
        (((0, 1), (9, -1)), r"expert ids \[-1, 9\] lie outside \[0, 4\)"),
        (((0, 1), (2, 1)), r"1 of 4 experts have no rank, for example \[3\]"),
        (((0, 1, 2, 3), ()), r"ranks \[1\] hold no expert"),
        (((0, 7), (1, 1)), r"ids \[7\] lie.*2 of 4 experts have no rank"),
    ],
)
def test_placements_that_cannot_serve_are_refused(experts_of_rank: tuple[tuple[int, ...], ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ExpertMap(experts_of_rank, 4)


@pytest.mark.parametrize(
    "physical, ranks, problem",
    [
        ([0, 1, 2], 2, "3 physical experts do not divide over 2 ranks; add 1 replicas"),
        ([0, 1, 2], 0, "3 experts cannot be spread over 0 ranks"),
        ([0, 1, 1, 0], 2, r"1 of 3 experts have no rank, for example \[2\]"),
    ],
)
def test_physical_orders_that_do_not_fit_are_refused(physical: list[int], ranks: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ExpertMap.from_physical(physical, ranks, 3)
