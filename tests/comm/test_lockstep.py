"""Ranks of one process: order of arrival, sums, calls that do not match, and agreement on notes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.comm.agreement import agree, digest
from moe_mk.errors import CommError
from moe_mk.flight import Flight, interleave, wait

Calls = tuple[list[str], list[int]]
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


def hops(comm: Communicator, phases: list[str], counts: list[int]) -> Flight[None]:
    for phase in phases:
        yield from comm.all_gather(rows(*range(counts[comm.rank])), counts, phase)


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ((["a", "b"], [1, 1]), (["a"], [1, 1]), r"phase 'b', peer 1: made no such call \(number 1\)"),
        ((["dispatch"], [1, 1]), (["combine"], [1, 1]), "phase 'dispatch', peer 1: is in phase 'combine' instead"),
        ((["g"], [1, 1]), (["g"], [1, 2]), "phase 'g', peer 1: sent 2 rows, expected 1"),
    ],
)
def test_a_rank_in_another_call_is_named(mine: Calls, theirs: Calls, text: str) -> None:
    first, second = (world := LockstepWorld(2)).communicators()
    with pytest.raises(CommError, match=f"rank 0, {text}"):
        interleave([hops(first, *mine), hops(second, *theirs)])
    world.boxes[-1, 0][0] = ("memory that ranks share", rows(1))
    interleave([first.recover(), second.recover()])
    assert set(world.boxes) == {(-1, 0)}, "of calls nothing is left"


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


def test_digest_sees_names_and_values_but_not_their_order() -> None:
    notes = {"a": "1", "b": "2"}
    assert digest(notes) == digest(dict(reversed(notes.items()))) and len(digest(notes)) == 32
    others = [{"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "b": "2", "c": ""}, {"a": "1", "c": "2"}, {}]
    assert len({digest(other) for other in [notes, *others]}) == 6


def test_equal_notes_cost_one_exchange_of_a_digest_and_numbers_of_loads() -> None:
    comms = LockstepWorld(3).communicators()
    interleave([agree(comm, {"text": "one\nline, two = signs"}) for comm in comms])
    for comm in comms:
        assert comm.traffic.bytes_by_phase == {"agreement": 2 * (32 + 8 * (2 + 3))} and comm.traffic.calls_by_phase == {
            "agreement": 1
        }


@given(st.integers(1, 4), st.data())
def test_that_some_ranks_alone_have_loaded_again_is_seen_however_loads_and_agreements_were_interrupted(
    size: int, data: st.DataObject
) -> None:
    """Against what happened: a rank has loaded since the last agreement that ended anywhere, or it has not."""
    some = st.sets(st.integers(0, size - 1))
    loads, known, has_loaded = [0] * size, [()] * size, [False] * size
    comms, any_agreed = LockstepWorld(size).communicators(), False
    for _ in range(data.draw(st.integers(1, 8))):
        # Some ranks load, some of them again: the first time was interrupted, or a second call of a verb.
        for rank in [*data.draw(some), *data.draw(some)]:
            loads[rank], has_loaded[rank] = loads[rank] + 1, True
        flights = [agree(comm, NOTES, "", n, of) for comm, n, of in zip(comms, loads, known, strict=True)]
        expected = ""
        if any_agreed and len(set(has_loaded)) > 1:
            again = [rank for rank in range(size) if has_loaded[rank]]
            others = [rank for rank in range(size) if not has_loaded[rank]]
            expected = f"weights were loaded again on ranks {again} and not on ranks {others}; load them there too"
        for flight in flights:
            next(flight)
        agreed, refused = [], []
        for flight in flights:
            try:
                next(flight)
            except StopIteration as end:
                agreed.append(end.value)
            except CommError as problem:
                refused.append((problem.detail, problem.harmless_to_peers))
        assert refused == [(expected, True)] * bool(expected) * size and len(agreed) + len(refused) == size
        for rank in data.draw(some) if agreed else ():  # others were interrupted before they kept it
            known[rank], any_agreed, has_loaded = agreed[rank], True, [False] * size
