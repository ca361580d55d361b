"""Ranks as threads: the bits of lockstep, lists of tensors for libraries, and an end for whoever waits in vain."""

from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.comm.threads import ThreadCommunicator, ThreadWorld
from moe_mk.errors import CommError
from moe_mk.flight import Flight, interleave, wait


def rows_of(rank: int, ranks: int) -> tuple[Tensor, list[int], list[int]]:
    """Rank r sends r + p rows to peer p: zero from 0 to 0."""
    send = [rank + peer for peer in range(ranks)]
    draw = torch.Generator("cpu").manual_seed(rank)
    return torch.randn((sum(send), 3), generator=draw), send, [peer + rank for peer in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_to_all_and_reduce_give_the_bits_of_lockstep(ranks: int) -> None:
    lockstep, threads = LockstepWorld(ranks).communicators(), ThreadWorld(ranks)
    given = [rows_of(rank, ranks) for rank in range(ranks)]
    want = interleave([comm.all_to_all(*rows, "test") for comm, rows in zip(lockstep, given, strict=True)])
    comms = threads.communicators()
    got = threads.together([partial(wait, c.all_to_all(*rows, "test")) for c, rows in zip(comms, given, strict=True)])
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
    sums = threads.together([partial(wait, c.all_reduce(torch.ones(2) * c.rank, "sum")) for c in comms])
    assert all(total.tolist() == [sum(range(ranks))] * 2 for total in sums)
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert threads.together([torch.is_grad_enabled] * ranks) == [mode] * ranks


def test_swap_carries_lists_of_tensors_of_any_dtype_and_length() -> None:
    world = ThreadWorld(3)

    def job(comm: ThreadCommunicator) -> list[list[Tensor]]:
        flags = torch.full((1,), comm.rank, dtype=torch.uint8)
        return comm.swap([[torch.full((peer, 2), float(comm.rank)), flags] for peer in range(3)], "swap")

    landed = world.together([partial(job, comm.library_group()) for comm in world.communicators()])
    for rank, mail in enumerate(landed):
        assert [tuple(rows.shape) for rows, _ in mail] == [(rank, 2)] * 3
        assert [flag.item() for _, flag in mail] == [0, 1, 2]


def test_a_rank_that_never_comes_is_named_within_the_time() -> None:
    world = ThreadWorld(3, timeout_s=0.2)
    comms = world.communicators()
    jobs = [partial(wait, comms[0].gather_count(1, "count")), list, partial(wait, comms[2].gather_count(3, "count"))]
    with pytest.raises(CommError, match=r"rank 0.*count.*peer 1.*later than 0\.2 s|peer 1.*is later"):
        world.together(jobs)


def test_an_error_of_one_rank_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="no such expert"):
        ThreadWorld(2).together([Mock(), Mock(side_effect=ValueError("no such expert"))])


@pytest.mark.parametrize("kind", [LockstepWorld, ThreadWorld])
def test_every_recovery_is_one_of_all_ranks_and_the_next_call_may_come_at_once(kind: type[Any]) -> None:
    world = kind(3)
    comms = world.communicators()

    def recovered(comm: Communicator, number: int) -> Flight[tuple[int, list[int], int]]:
        largest = yield from comm.recover(number)
        return largest, (yield from comm.gather_count(comm.rank, "counts")), comm.status.epoch

    for epoch, number in ((1, 30), (2, 20), (3, 10)):  # the largest number is that of this recovery
        next(comms[0].gather_count(1, "of the call that fails"))
        comms[1].fail(RuntimeError("a bad forward"))
        flights = [recovered(comm, number + comm.rank) for comm in comms]
        found = interleave(flights) if kind is LockstepWorld else world.together([partial(wait, f) for f in flights])
        assert found == [(number + 2, [0, 1, 2], epoch)] * 3


def test_a_call_for_which_all_have_come_ends_whoever_fails_afterwards() -> None:
    comms = ThreadWorld(2).communicators()
    flights = [comm.gather_count(comm.rank, "counts") for comm in comms]
    next(flights[0]), next(flights[1])
    comms[1].fail(RuntimeError("in its next call"))
    assert wait(flights[0]) == [0, 1]
