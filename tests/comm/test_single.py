"""One rank: everything comes back as it was, in one hop, and nothing is sent."""

import torch

from moe_mk.comm import SingleRank
from moe_mk.flight import InFlight, wait


def test_every_collective_returns_what_it_got() -> None:
    comm = SingleRank()
    rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(wait(comm.all_to_all(rows, [3], [3], "a")), rows)
    assert torch.equal(wait(comm.all_gather(rows, [3], "b")), rows)
    assert torch.equal(wait(comm.all_reduce(rows, "c")), rows)
    assert torch.equal(wait(comm.reduce_scatter(rows, [3], "d")), rows)
    assert wait(comm.exchange_counts([5], "e")) == [5] and wait(comm.gather_count(7, "f")) == [7]
    assert (comm.rank, comm.size) == (0, 1) and not comm.traffic.bytes_by_phase


def test_it_hops_as_often_as_any_group() -> None:
    comm, rows = SingleRank(), torch.zeros(0, 2)
    assert list(comm.all_to_all(rows, [0], [0], "dispatch")) == [InFlight("dispatch")]
    assert list(comm.all_reduce(rows, "late")) == [InFlight("late")]
