"""Bytes by link: nodes as data, counts by hand, and what each collective sends to whom."""

import pytest
import torch
from torch import Tensor

from moe_mk.comm import LINKS, Communicator, LockstepWorld, Nodes, Traffic
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight, interleave


def test_nodes_are_neighbouring_ranks_by_default() -> None:
    nodes = Nodes.of(5, ranks_per_node=2)
    assert nodes.node_of_W == (0, 0, 1, 1, 2) and nodes.num_nodes == 3 and nodes.sizes == (2, 2, 1)
    assert nodes.members(1) == (2, 3) and nodes.local_index(3) == 1
    assert Nodes.of(4).node_of_W == (0, 0, 0, 0) and Nodes.of(0).num_nodes == 0
    scattered = Nodes((1, 0, 1, 0))
    assert scattered.members(1) == (0, 2) and scattered.local_index(2) == 1
    assert [scattered.link(0, peer) for peer in range(4)] == ["self", "inter_node", "intra_node", "inter_node"]


@pytest.mark.parametrize("node_of_W", [(0, 2), (1, 1), (-1, 0)])
def test_nodes_that_are_not_numbered_from_zero_are_refused(node_of_W: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"must be numbered from 0 without a gap"):
        Nodes(node_of_W)


@pytest.mark.row(44)
def test_the_same_counts_read_for_other_nodes_by_hand() -> None:
    # Rank 1 of 4 keeps 10 bytes and sends 1, 4 and 8 to ranks 0, 2 and 3; then 100 more to rank 3.
    traffic = Traffic()
    traffic.sent("dispatch", [1, 10, 4, 8], rank=1)
    traffic.sent("combine", [0, 0, 0, 100], rank=1)
    assert traffic.bytes_by_phase == {"dispatch": 13, "combine": 100}
    assert traffic.calls_by_phase == {"dispatch": 1, "combine": 1}
    two_by_two = traffic.by_link(Nodes.of(4, 2), rank=1)
    assert two_by_two == {"self": 10, "intra_node": 1, "inter_node": 112}
    assert traffic.by_link(Nodes.of(4), 1) == {"self": 10, "intra_node": 113, "inter_node": 0}
    assert traffic.by_link(Nodes.of(4, 2), 1, phases=["combine"]) == {"self": 0, "intra_node": 0, "inter_node": 100}
    traffic.reset()
    assert traffic.by_link(Nodes.of(4, 2), 1) == dict.fromkeys(LINKS, 0)
    assert not traffic.bytes_by_phase and not traffic.calls_by_phase


def every_collective(comm: Communicator) -> Flight[None]:
    rows: Tensor = torch.zeros((6, 3), dtype=torch.bfloat16)  # 6 bytes a row
    yield from comm.all_to_all(rows, [0, 1, 2, 3], [comm.rank] * 4, "all_to_all")
    yield from comm.all_gather(rows[: comm.rank], [0, 1, 2, 3], "all_gather")
    yield from comm.all_reduce(rows, "all_reduce")
    yield from comm.reduce_scatter(rows, [0, 1, 2, 3], "reduce_scatter")


@pytest.mark.row(44)
def test_every_collective_counts_what_goes_to_whom() -> None:
    comms = LockstepWorld(4).communicators()
    interleave([every_collective(comm) for comm in comms])
    for rank, comm in enumerate(comms):
        peers = comm.traffic.bytes_by_peer
        assert [peers["all_to_all"][peer] for peer in range(4)] == [0, 6, 12, 18]
        assert [peers["all_gather"][peer] for peer in range(4)] == [6 * rank] * 4
        # 18 numbers in f32 in parts of 4, 5, 4 and 5: a rank sends each its part, and the sum of its own.
        parts = [4, 5, 4, 5]
        sent = [0 if peer == rank else 4 * (parts[peer] + parts[rank]) for peer in range(4)]
        assert [peers["all_reduce"][peer] for peer in range(4)] == sent
        assert [peers["reduce_scatter"][peer] for peer in range(4)] == [0, 6, 12, 18]
        for phase, total in comm.traffic.bytes_by_phase.items():
            assert total == sum(peers[phase].values()) - peers[phase][rank], "what stays is no traffic"
