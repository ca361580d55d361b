"""What all emulations stand on: exchange over a group, and contents that are poison until they arrive."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.threads import ThreadWorld
from moe_mk.errors import CommError
from moe_mk.lab.testing.emulated.exchange import Exchange, exchange_over
from moe_mk.lab.testing.emulated.live import swap_among
from moe_mk.lab.testing.emulated.pending import poison
from moe_mk.lab.testing.on_ranks import run_ranks
from tests.testing.emulated.row_library_ranks import SNAPSHOT, differences


def swapped(exchange: Exchange, live: tuple[int, ...] = (0, 1, 2)) -> list[list[Tensor]]:
    """Rank r gives peer p: p rows of bf16, r + p bytes of FP8, nothing of int64."""
    parts = []
    for peer in range(exchange.size):
        rows = torch.full((peer, 3), float(10 * exchange.rank + peer), dtype=torch.bfloat16)
        codes = torch.full((exchange.rank + peer,), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        parts.append([rows, codes, torch.empty((0, 2), dtype=torch.int64)])
    return exchange.swap(parts, "test") if len(live) == exchange.size else swap_among(exchange, parts, live, "test")


def check(rank: int, arrived: list[list[Tensor]], live: tuple[int, ...] = (0, 1, 2)) -> None:
    for peer, (rows, codes, nothing) in enumerate(arrived):
        if peer not in live:
            assert [len(part) for part in (rows, codes, nothing)] == [0, 0, 0]
            continue
        assert rows.dtype == torch.bfloat16 and rows.tolist() == [[10.0 * peer + rank] * 3] * rank
        assert codes.dtype == torch.float8_e4m3fn and codes.float().tolist() == [1.0] * (rank + peer)
        assert nothing.shape == (0, 2) and nothing.dtype == torch.int64


SOME = [(0, 2), (0, 2), (1,), (2, 1)]


def over_gloo(rank: int) -> bool:
    group = dist.group.WORLD
    check(rank, swapped(exchange_over(group)))
    for live in SOME:
        if rank in live:
            check(rank, swapped(exchange_over(group), live), live)
    return True


def test_threads_and_processes_swap_the_same() -> None:
    world = ThreadWorld(3)
    groups = [comm.library_group() for comm in world.communicators()]
    for rank, arrived in enumerate(world.together([partial(lambda g: swapped(exchange_over(g)), g) for g in groups])):
        check(rank, arrived)
    assert run_ranks(over_gloo, 3) == [True] * 3


def test_ranks_that_are_left_out_are_not_waited_for() -> None:
    groups = [comm.library_group() for comm in ThreadWorld(3, timeout_s=5.0).communicators()]
    for live in SOME:
        jobs = [partial(lambda g, live: swapped(exchange_over(g), live), groups[rank], live) for rank in live]
        for rank, arrived in zip(live, groups[0].world.together(jobs), strict=True):
            check(rank, arrived, live)
    late = ThreadWorld(3, timeout_s=0.1).communicators()[2].library_group()
    with pytest.raises(CommError, match=r"rank 2, phase 'test', peer 1: is later than 0.1 s"):
        swapped(exchange_over(late), (1, 2))


def test_something_that_is_no_group_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a torch.distributed.ProcessGroup, not int"):
        exchange_over(4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int32, torch.uint8])
def test_poison_is_nothing_that_anybody_could_take_for_a_number(dtype: torch.dtype) -> None:
    poisoned = poison(torch.zeros(4, dtype=dtype))
    if dtype.is_floating_point:
        assert bool(poisoned.float().isnan().all())
    else:
        assert poisoned.unique().tolist() == [torch.iinfo(dtype).min if dtype.is_signed else 255]


@pytest.mark.parametrize("module", SNAPSHOT)
def test_signatures_are_those_of_the_libraries(module: str) -> None:
    assert differences(module) == []
