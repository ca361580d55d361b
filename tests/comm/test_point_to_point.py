"""An all-to-all of messages: the bits of the collective, 2 (n - 1) messages, in one process and in three."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import Communicator, DistributedCommunicator, LockstepWorld
from moe_mk.comm.single import SingleRank
from moe_mk.flight import Flight, interleave, wait
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.prepare_finalize.all_to_all import PointToPoint
from tests.support.worlds import world_of

# SEND[r][p]: rows from rank r to rank p. Rank 1 sends nothing, some pairs exchange nothing.
SEND = [[2, 0, 3, 1], [0, 0, 0, 0], [1, 4, 0, 2], [0, 1, 1, 5]]
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.int64]


def rows_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[rank, row, 7] for row in range(count)], dtype=dtype, device="cpu").view(count, 3)


def exchanged(comm: Communicator, ranks: int) -> Flight[list[Tensor]]:
    """All dtypes, one after the other."""
    send, receive = SEND[comm.rank][:ranks], [SEND[peer][comm.rank] for peer in range(ranks)]
    found = []
    for dtype in DTYPES:
        found.append((yield from comm.all_to_all(rows_of(comm.rank, sum(send), dtype), send, receive, "dispatch")))
    return found


@pytest.mark.row(33)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_is_the_collective_in_lockstep(ranks: int) -> None:
    plain = interleave([exchanged(comm, ranks) for comm in LockstepWorld(ranks).communicators()])
    comms = [PointToPoint(comm) for comm in LockstepWorld(ranks).communicators()]
    by_messages = interleave([exchanged(comm, ranks) for comm in comms])
    for one, other in zip(plain, by_messages, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for comm in comms:
        assert comm.messages["dispatch"] == len(DTYPES) * 2 * (ranks - 1)
        sent = sum(SEND[comm.rank][:ranks]) - SEND[comm.rank][comm.rank]
        assert comm.traffic.bytes_by_phase["dispatch"] == sent * 3 * sum(dtype.itemsize for dtype in DTYPES)


def test_what_stays_on_a_rank_is_no_message() -> None:
    # Rank 0 keeps 2 rows and sends 1 to rank 1, which keeps none and sends 2.
    send = [[2, 1], [2, 0]]

    def others(comm: Communicator) -> Flight[Tensor]:
        receive = [send[peer][comm.rank] for peer in range(2)]
        received = torch.empty((receive[1 - comm.rank], 3), dtype=torch.int64)
        rows = rows_of(comm.rank, send[comm.rank][1 - comm.rank], torch.int64)
        yield from comm.all_to_others(received, rows, send[comm.rank], receive, "dispatch")
        return received

    comms = [PointToPoint(comm) for comm in LockstepWorld(2).communicators()]
    assert [got[:, :2].tolist() for got in interleave([others(comm) for comm in comms])] == [[[1, 0], [1, 1]], [[0, 0]]]
    assert [comm.traffic.bytes_by_peer["dispatch"][comm.rank] for comm in comms] == [0, 0]


def test_everything_else_is_the_groups_own() -> None:
    assert wait(PointToPoint(SingleRank()).exchange_counts([3], "counts")) == [3]

    def other_calls(comm: Communicator) -> Flight[tuple[list[int], list[float]]]:
        counts = yield from comm.gather_count(comm.rank + 1, "counts")
        total = yield from comm.all_reduce(torch.ones(2), "late")
        return counts, total.tolist()

    comms = LockstepWorld(3).communicators()
    made = [PointToPoint(comm) for comm in comms]
    made[1].fail(RuntimeError("a bad forward"))
    interleave([one.recover() for one in made])
    assert interleave([other_calls(one) for one in made]) == [([1, 2, 3], [3.0, 3.0])] * 3
    for one, comm in zip(made, comms, strict=True):
        assert comm.status.epoch == 1
        assert all(getattr(one, name) is getattr(comm, name) for name in ("kept", "lock", "status", "traffic"))


world = world_of(3)


def both_ways(rank: int) -> dict[str, object]:
    """The collective and the messages over one process group."""
    inner = DistributedCommunicator(dist.group.WORLD, timeout_s=30.0)  # type: ignore[arg-type]
    comm = PointToPoint(inner)
    plain, by_messages = wait(exchanged(inner, 3)), wait(exchanged(comm, 3))
    equal = all(torch.equal(a, b) for a, b in zip(plain, by_messages, strict=True))
    return {
        "equal": equal,
        "messages": comm.messages["dispatch"],
        "counts": wait(comm.exchange_counts([rank] * 3, "c")),
    }


@pytest.mark.row(33)
def test_it_is_the_collective_between_processes(world: RankWorld) -> None:
    for found in world.call(both_ways):
        assert found == {"equal": True, "messages": len(DTYPES) * 4, "counts": [0, 1, 2]}
