"""Numbers that a division takes apart, whatever the placement."""

from __future__ import annotations

import pytest
import torch

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.deepep.common import UniformExpertIds
from moe_mk.quant.plain import FP32

CPU = torch.device("cpu")


def numbers(place: ExpertMap, rank: int, multiple: int = 1) -> UniformExpertIds:
    comm = LockstepWorld(place.num_ranks).communicators()[rank]
    return UniformExpertIds(TransportContext(comm, place, place.tables(CPU), FP32, FP32, 2, 2, CPU), multiple)


def test_ranks_with_fewer_experts_leave_gaps() -> None:
    # Physical experts 0 1 | 2 | 3 4 on three ranks become numbers 0 1 | 2 | 4 5.
    place = ExpertMap(((0, 1), (2,), (3, 4)), 5)
    ids_TK = torch.tensor([[0, 1, 2], [3, 4, -1]])
    assert numbers(place, 0).of(ids_TK).tolist() == [[0, 1, 2], [4, 5, -1]]
    assert numbers(place, 0).of(ids_TK, nowhere=6).tolist() == [[0, 1, 2], [4, 5, 6]]
    assert numbers(place, 2).slots(torch.tensor([[0, 1, 2], [4, 5, -1]])).tolist() == [[-1, -1, -1], [0, 1, -1]]
    assert numbers(place, 1).slots(torch.tensor([[2, 3]])).tolist() == [[0, -1]], "number 3 is a gap"


@pytest.mark.parametrize("ranks,multiple,per_rank", [(2, 4, 6), (3, 4, 4), (4, 4, 3), (8, 4, 2)])
def test_there_are_as_many_numbers_as_a_library_wants_multiples_of(ranks: int, multiple: int, per_rank: int) -> None:
    made = numbers(ExpertMap.linear(max(9, ranks), ranks), 0, multiple)
    assert made.per_rank == per_rank and made.total == ranks * per_rank and made.total % multiple == 0


def test_division_finds_the_rank_and_slots_the_way_back() -> None:
    place = ExpertMap.from_physical([5, 0, 3, 1, 4, 2, 0, 5], 4, 6)
    tables, physical = place.tables(CPU), torch.arange(8)
    for rank in range(4):
        made = numbers(place, rank)
        number = made.of(physical)
        assert torch.equal(number // made.per_rank, tables.rank_of_P)
        assert torch.equal(made.slots(number), tables.local_slots(physical, rank).to(torch.int32))
