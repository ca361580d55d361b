"""Rows out and sums back: by hand, few bytes and many alike, with the counts of a plain all-to-all."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.flight import Flight, interleave
from moe_mk.prepare_finalize.packing import Rows, side_by_side
from moe_mk.prepare_finalize.rows import exchange as row_exchange
from moe_mk.prepare_finalize.rows.exchange import RowExchange, Scratch, Write

CPU, VALUES, TAIL = torch.device("cpu"), 3, 2
# SEND[r][p]: rows from rank r to rank p. Rank 1 sends nothing, some pairs exchange nothing.
SEND = [[2, 0, 3, 1], [0, 0, 0, 0], [1, 4, 0, 2], [0, 1, 1, 5]]


@pytest.fixture(params=["few bytes", "many bytes"], autouse=True)
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many bytes":
        monkeypatch.setattr(row_exchange, "SMALL_BYTES", 1)


def packed(rank: int, count: int) -> Tensor:
    """Rows that say who sent them and which they are, in their values and in their tails."""
    number_X = torch.arange(count)
    return torch.stack([torch.full((count,), rank), number_X, number_X + 50, number_X + 100, number_X + 150], 1).byte()


def writer(rows: Rows) -> Write:
    return lambda to, span: to.put(rows[span])


def out(comm: Communicator, send: Sequence[Sequence[int]], here: str = "") -> Flight[Tensor]:
    mine, theirs = send[comm.rank], [counts[comm.rank] for counts in send]
    write = writer(side_by_side(packed(comm.rank, sum(mine)), VALUES))
    rows = yield from RowExchange(comm, CPU).dispatch(write, (VALUES, TAIL), mine, theirs, "dispatch", here)
    assert rows.widths == (VALUES, TAIL)
    return torch.cat((rows.values, rows.tails), dim=1)


def combined(comm: Communicator, send: Sequence[Sequence[int]], here: str = "") -> Flight[Tensor]:
    """Every row comes back as 2 to the power of its sender's peer, so that a sum reports which ranks a row went to."""
    mine, theirs = send[comm.rank], [counts[comm.rank] for counts in send]
    exchange, most = RowExchange(comm, CPU), max(mine, default=0)
    y_RH = torch.full((sum(theirs), 2), 2.0**comm.rank)
    row_X = torch.cat([torch.arange(count) for count in mine])
    back = yield from exchange.combine(y_RH, row_X, mine, theirs, "combine", here)
    y_TH = exchange.summed([back.parts], (most, 2), torch.float32)
    exchange.scratch.give(back.memory)
    return y_TH


def everywhere(make: object, send: Sequence[Sequence[int]], here: str = "") -> tuple[list[Tensor], list[Communicator]]:
    comms = LockstepWorld(len(send)).communicators()
    return interleave([make(comm, send, here) for comm in comms]), list(comms)  # type: ignore[operator]


def plain(send: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Communicator]]:
    def one(comm: Communicator) -> Flight[Tensor]:
        mine = send[comm.rank]
        theirs = [counts[comm.rank] for counts in send]
        return comm.all_to_all(packed(comm.rank, sum(mine)), mine, theirs, "dispatch")

    comms = LockstepWorld(len(send)).communicators()
    return interleave([one(comm) for comm in comms]), list(comms)


def test_rows_arrive_in_rank_order_with_the_own_ones_among_them() -> None:
    # Rank 3 gets row 5 of rank 0, rows 5 and 6 of rank 2, and its own rows 2 to 6.
    arrived, _ = everywhere(out, SEND)
    assert arrived[3][:, :2].tolist() == [[0, 5], [2, 5], [2, 6], *[[3, row] for row in range(2, 7)]]
    assert arrived[3][0].tolist() == [0, 5, 55, 105, 155], "values, then tail"
    assert arrived[1][:, :2].tolist() == [[2, 1], [2, 2], [2, 3], [2, 4], [3, 0]]


def test_sums_return_to_the_rows_they_are_of() -> None:
    # Rank 0: both rows 0 and 1 went to rank 0, rows 0 to 2 to rank 2, row 0 to rank 3: 1 + 4 + 8, 1 + 4, 4.
    sums, _ = everywhere(combined, SEND)
    assert sums[0][:, 0].tolist() == [13.0, 5.0, 4.0]
    assert sums[1].shape == (0, 2)
    assert sums[2][:, 1].tolist() == [1.0 + 2.0 + 8.0, 2.0 + 8.0, 2.0, 2.0]


@settings(max_examples=25)
@given(st.integers(1, 5), st.data())
def test_any_sizes_arrive_and_are_counted_as_by_a_plain_all_to_all(ranks: int, data: st.DataObject) -> None:
    send = [[data.draw(st.integers(0, 3)) for _ in range(ranks)] for _ in range(ranks)]
    (ours, comms), (theirs, plains) = everywhere(out, send), plain(send)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for comm, other in zip(comms, plains, strict=True):
        assert comm.traffic.bytes_by_peer["dispatch"] == other.traffic.bytes_by_peer["dispatch"]
        assert comm.traffic.bytes_by_phase == other.traffic.bytes_by_phase
        assert comm.traffic.calls_by_phase == other.traffic.calls_by_phase


def test_what_stays_can_be_counted_under_a_phase_of_its_own() -> None:
    _, comms = everywhere(out, SEND, "relay")
    _, returned = everywhere(combined, SEND, "gather")
    for rank, (comm, back) in enumerate(zip(comms, returned, strict=True)):
        sent = [(VALUES + TAIL) * count * (peer != rank) for peer, count in enumerate(SEND[rank])]
        arrived = sum(counts[rank] for counts in SEND)
        assert [comm.traffic.bytes_by_peer["dispatch"][peer] for peer in range(4)] == sent
        assert comm.traffic.bytes_by_peer["relay"] == {rank: (VALUES + TAIL) * arrived}
        assert back.traffic.bytes_by_peer["gather"] == {rank: 2 * 4 * arrived}
        assert back.traffic.bytes_by_peer["combine"][rank] == 0


@pytest.mark.parametrize("make", [out, combined])
def test_memory_comes_back_after_a_call_and_not_before(request: pytest.FixtureRequest, make: object) -> None:
    comms = LockstepWorld(4).communicators()
    for _ in range(3):
        flights = [make(comm, SEND) for comm in comms]  # type: ignore[operator]
        for flight in flights:
            next(flight)
        assert not any(Scratch.of(comm).free for comm in comms), "peers may still read what is sent"
        interleave(flights)
    free = [len(Scratch.of(comm).free) for comm in comms]
    if "many" in request.node.name:
        assert max(free) == 2, "rows out and rows in, used again by the next call"
    else:
        assert free == [0] * 4
