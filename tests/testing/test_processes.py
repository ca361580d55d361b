"""Ranks as processes: results, failures, deaths and lateness, each reported by rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.lab.testing import on_ranks
from moe_mk.lab.testing.on_ranks import RankError, RankWorld, run_ranks
from tests.support.worlds import world_of

world = world_of(2)


def add_up(rank: int, start: Tensor, name: str) -> dict[str, Tensor | str]:
    total = start + rank
    dist.all_reduce(total)
    return {"total": total, "fp8": total.to(torch.float8_e4m3fn), "name": f"{name} {rank}"}


def test_results_come_back_by_rank(world: RankWorld) -> None:
    # (10 + 0) + (10 + 1) = 21
    for rank, result in enumerate(world.call(add_up, torch.tensor([10.0]), "rank")):
        assert isinstance(result["fp8"], Tensor) and result["fp8"].dtype == torch.float8_e4m3fn
        assert result["total"] == torch.tensor([21.0]) and result["name"] == f"rank {rank}"


def fail_on(rank: int, failing: int) -> int:
    if rank == failing:
        raise ValueError(f"no luck on {rank}")
    return 10 * rank


def test_an_error_names_its_rank_and_keeps_the_other_results(world: RankWorld) -> None:
    with pytest.raises(
        RankError, match=r"1 of 2 ranks failed\nrank 1: Traceback(.|\n)*ValueError: no luck on 1"
    ) as caught:
        world.call(fail_on, 1)
    assert caught.value.results == {0: 0} and list(caught.value.problems) == [1]
    assert world.call(fail_on, -1) == [0, 10]  # the world goes on


def fail_or_be_slow(rank: int) -> str:
    if rank == 1:
        raise ValueError("no luck")
    time.sleep(0.3)
    return "slow"


def test_the_others_have_time_to_end_after_a_failure(world: RankWorld) -> None:
    with pytest.raises(RankError, match="1 of 2 ranks failed") as caught:
        world.call(fail_or_be_slow)
    assert caught.value.results == {0: "slow"}


def die_or_outlast_the_grace(rank: int, grace_s: float) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2 * grace_s)
    return "survivor"


def test_the_peers_of_a_dead_process_have_their_whole_time(world: RankWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ranks, "GRACE_S", 0.5)
    with pytest.raises(RankError, match="rank 1: the process ended with exit code -9") as caught:
        world.call(die_or_outlast_the_grace, 0.5)
    assert caught.value.results == {0: "survivor"} and list(caught.value.problems) == [1]


def die_on(rank: int, dying: int) -> int:
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_death_ends_the_world_and_the_next_call_starts_another(world: RankWorld) -> None:
    before = world.call(die_on, -1)
    with pytest.raises(RankError, match="rank 0: the process ended with exit code -9"):
        world.call(die_on, 0)
    assert not any(map(is_running, before))
    after = world.call(die_on, -1)
    assert len(after) == 2 and not set(after) & set(before)


def sleep_on(rank: int, sleeping: int) -> None:
    if rank == sleeping:
        time.sleep(600)


def test_a_rank_that_does_not_finish_is_named_and_killed(world: RankWorld) -> None:
    before = world.call(die_on, -1)
    with pytest.raises(RankError, match="1 of 2 ranks failed\nrank 1: did not finish within 0.5 s"):
        world.call(sleep_on, 1, timeout_s=0.5)
    assert not any(map(is_running, before))


class Foreign:
    pass


def return_an_object(rank: int) -> Foreign:
    return Foreign()


def test_only_plain_results_are_read() -> None:
    with pytest.raises(RankError, match="rank 0: returned more than tensors, numbers, texts"):
        run_ranks(return_an_object, 1)
