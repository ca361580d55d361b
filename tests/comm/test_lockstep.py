"""Ranks of one process: order of arrival, sums, and calls that do not match."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.comm.agreement import agree
from moe_mk.errors import CommError
from moe_mk.flight import Flight, InFlight, interleave, wait

NOTES = {"experts": "torch_cpu", "wire": "fp8_1x128"}


def rows(*numbers: int) -> Tensor:
    return torch.tensor([[number] for number in numbers], dtype=torch.int64).view(len(numbers), 1)


def test_rows_are_those_of_the_moment_of_the_call() -> None:
    first, second = LockstepWorld(2).communicators()
    mine = rows(1, 2)
    flight, other = first.all_gather(mine, [2, 1], "g"), second.all_gather(rows(3), [2, 1], "g")
    next(flight)
    mine.zero_()
    next(other)
    assert wait(other).flatten().tolist() == [1, 2, 3]


@given(st.integers(1, 5), st.data())
def test_there_and_back_again_for_any_sizes(size: int, data: st.DataObject) -> None:
    send = [[data.draw(st.integers(0, 3)) for _ in range(size)] for _ in range(size)]

    def there_and_back(comm: Communicator) -> Flight[bool]:
        mine, theirs = send[comm.rank], [send[peer][comm.rank] for peer in range(size)]
        sent = rows(*range(100 * comm.rank, 100 * comm.rank + sum(mine)))
        assert (yield from comm.exchange_counts(mine, "counts")) == theirs
        arrived = yield from comm.all_to_all(sent, mine, theirs, "dispatch")
        back = yield from comm.all_to_all(arrived, theirs, mine, "combine")
        return torch.equal(back, sent)

    assert all(interleave([there_and_back(comm) for comm in LockstepWorld(size).communicators()]))


def test_sums_run_in_rank_order_in_f32() -> None:
    # As over gloo: 1e8 + 1 - 1e8 + 1 is 1 in rank order, 2 in any other that cancels first.
    numbers = [1e8, 1.0, -1e8, 1.0]
    comms = LockstepWorld(4).communicators()
    parts = [torch.full((4, 1), number) for number in numbers]
    reduced = interleave([c.reduce_scatter(x, [1] * 4, "r") for c, x in zip(comms, parts, strict=True)])
    assert [float(x) for x in reduced] == [1.0] * 4
    summed = interleave([c.all_reduce(x[0], "a") for c, x in zip(comms, parts, strict=True)])
    assert [float(x) for x in summed] == [1.0] * 4 and float(parts[0][0]) == 1e8


@pytest.mark.row(35)
@pytest.mark.parametrize("size", [2, 4])
def test_an_all_reduce_sends_the_bytes_of_a_reduce_scatter_and_an_all_gather(size: int) -> None:
    # Exactly 2 (N - 1) / N of the tensor; the usual formula of 2 S D is its limit for many ranks.
    tokens, hidden = 8, 16
    comms = LockstepWorld(size).communicators()
    parts = torch.randn(size, tokens, hidden, generator=torch.Generator().manual_seed(0))
    share = [tokens // size] * size

    def in_two_steps(comm: Communicator) -> Flight[Tensor]:
        mine = yield from comm.reduce_scatter(parts[comm.rank], share, "two steps")
        return (yield from comm.all_gather(mine, share, "two steps"))

    twice = interleave([in_two_steps(comm) for comm in comms])
    once = interleave([comm.all_reduce(parts[comm.rank], "one step") for comm in comms])
    assert all(torch.equal(x, y) for x, y in zip(once, twice, strict=True))
    for comm in comms:
        assert comm.traffic.bytes_by_phase["two steps"] == 2 * (size - 1) * tokens * hidden * 4 // size
        assert comm.traffic.bytes_by_phase["one step"] == comm.traffic.bytes_by_phase["two steps"]


@pytest.mark.row(37)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_an_expert_parallel_exchange_sends_k_rows_a_token_less_those_that_stay(size: int) -> None:
    # Each token sends its K = 8 assignments evenly to M ranks: K (M - 1) / M of them leave, and as many come back.
    top_k, tokens, hidden = 8, 16, 32
    send = [tokens * top_k // size] * size

    def exchange(comm: Communicator) -> Flight[None]:
        assignments = torch.zeros(tokens * top_k, hidden, dtype=torch.bfloat16)
        arrived = yield from comm.all_to_all(assignments, send, send, "dispatch")
        yield from comm.all_to_all(arrived, send, send, "combine")

    comms = LockstepWorld(size).communicators()
    interleave([exchange(comm) for comm in comms])
    for comm in comms:
        sent = comm.traffic.bytes_by_phase
        assert sent["dispatch"] == sent["combine"] == tokens * (top_k - top_k // size) * hidden * 2


def hops(comm: Communicator, phases: list[str], counts: list[int]) -> Flight[None]:
    for phase in phases:
        yield from comm.all_gather(rows(*range(counts[comm.rank])), counts, phase)


def test_a_rank_that_makes_fewer_calls_is_named() -> None:
    first, second = LockstepWorld(2).communicators()
    flights = [hops(first, ["a", "b"], [1, 1]), hops(second, ["a"], [1, 1])]
    with pytest.raises(CommError, match=r"rank 0, phase 'b', peer 1: made no such call \(number 1\)"):
        interleave(flights)


def test_a_rank_in_another_phase_is_named() -> None:
    first, second = LockstepWorld(2).communicators()
    with pytest.raises(CommError, match="rank 0, phase 'dispatch', peer 1: is in phase 'combine' instead"):
        interleave([hops(first, ["dispatch"], [1, 1]), hops(second, ["combine"], [1, 1])])


def test_sizes_that_peers_see_differently_are_refused() -> None:
    first, second = LockstepWorld(2).communicators()
    with pytest.raises(CommError, match="rank 0, phase 'g', peer 1: sent 2 rows, expected 1"):
        interleave([hops(first, ["g"], [1, 1]), hops(second, ["g"], [1, 2])])


def test_every_call_is_one_hop() -> None:
    comm = LockstepWorld(1).communicators()[0]
    assert list(comm.all_gather(rows(1), [1], "gather")) == [InFlight("gather")]
    assert list(comm.reduce_scatter(rows(1), [1], "combine")) == [InFlight("combine")]


@pytest.mark.parametrize("other", [{}, {"experts": "torch_cpu"}, {**NOTES, "wire": "bf16"}])
def test_ranks_that_decided_differently_all_raise(other: dict[str, str]) -> None:
    comms = LockstepWorld(3).communicators()
    flights = [agree(comm, other if comm.rank == 1 else NOTES, "layers.0") for comm in comms]
    reported = []
    for _ in range(5):  # every rank must raise, so each is advanced by hand
        for rank, flight in enumerate(flights):
            try:
                next(flight, None)
            except CommError as problem:
                reported.append((rank, str(problem)))
    wire = other.get("wire", "(nothing)")
    assert [rank for rank, _ in reported] == [0, 1, 2]
    for rank, text in reported:
        assert text.startswith(f"rank {rank}, phase 'agreement', layer 'layers.0': ranks decided differently")
        assert text.endswith(f"  wire:\n    rank 0: fp8_1x128\n    rank 1: {wire}\n    rank 2: fp8_1x128")
        assert ("experts:" in text) == ("experts" not in other)
