"""Bytes by link: nodes as data, counts by hand, what each collective sends to whom, and what transports send."""

import random

import pytest
import torch
from torch import Tensor

from moe_mk.comm import LINKS, Communicator, LockstepWorld, Nodes, Traffic
from moe_mk.comm.traffic import COUNT_BYTES
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight, interleave
from moe_mk.lab.plan.exchange import RowBytes, all_to_all_flow, hierarchical_flow


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


TWO_BY_TWO = Nodes.of(4, ranks_per_node=2)
SIZE = RowBytes(row=100, sum=10)


def ranks(*tokens: list[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64).view(len(tokens), 3)


# Rank 0 has two tokens, rank 3 one: their experts lie on
ROUTED = [ranks([0, 2, 3], [1, 1, -1]), ranks(), ranks(), ranks([0, 1, 3])]


def test_all_to_all_by_hand() -> None:
    flow = all_to_all_flow(ROUTED, SIZE)
    # Rank 0: its first token to 0, 2 and 3, its second once to 1. Rank 3: to 0, 1 and itself.
    assert flow.phases["dispatch"].tolist() == [[100, 100, 100, 100], [0] * 4, [0] * 4, [100, 100, 0, 100]]
    assert flow.phases["combine"].tolist() == [[10, 0, 0, 10], [10, 0, 0, 10], [10, 0, 0, 0], [10, 0, 0, 10]]
    only = ["dispatch", "combine"]
    assert flow.by_link(TWO_BY_TWO, 0, only) == {"self": 110, "intra_node": 100, "inter_node": 210}
    assert flow.by_link(TWO_BY_TWO, 0)["inter_node"] == 210 + 2 * 8


def test_hierarchical_by_hand() -> None:
    flow = hierarchical_flow(ROUTED, SIZE, TWO_BY_TWO)
    # Between nodes: rank 0's first token once to rank 2, the relay of its place; rank 3's token once to rank 1.
    between = torch.zeros((4, 4), dtype=torch.int64)
    between[0, 2] = between[3, 1] = 1
    assert torch.equal(flow.phases["dispatch"], 100 * between) and torch.equal(flow.phases["combine"], 10 * between.T)
    # Within: 0 keeps its first token and gives the second to 1; 2 forwards to itself and to 3; 1 forwards rank 3's
    # token to 0 and to itself; 3 keeps its own.
    within = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]])
    assert torch.equal(flow.phases["relay"], 100 * within) and torch.equal(flow.phases["gather"], 10 * within.T)
    assert flow.by_link(TWO_BY_TWO, 0, ["dispatch", "relay"]) == {"self": 100, "intra_node": 100, "inter_node": 100}
    flat = all_to_all_flow(ROUTED, SIZE).by_link(TWO_BY_TWO, 0, ["dispatch"])["inter_node"]
    assert flat == 200, "the first token crossed twice"


@pytest.mark.row(144)
@pytest.mark.parametrize("shape", [(4, 2), (8, 4), (8, 2), (6, 3)])
def test_only_ranks_of_equal_place_speak_across_nodes(shape: tuple[int, int]) -> None:
    nodes, draw = Nodes.of(*shape), torch.Generator().manual_seed(0)
    routed = [torch.randint(-1, shape[0], (9, 4), generator=draw) for _ in range(shape[0])]
    for sent_WW in hierarchical_flow(routed, SIZE, nodes).phases.values():
        for source in range(shape[0]):
            for peer in range(shape[0]):
                if nodes.link(source, peer) == "inter_node" and sent_WW[source, peer]:
                    assert nodes.local_index(source) == nodes.local_index(peer)


def test_whatever_was_noted_phases_count_what_left_the_rank_and_links_count_all() -> None:
    draw, ranks, rank = random.Random(0), 4, 2
    for _ in range(30):
        traffic, total, calls = Traffic(), 0, 0
        meter = traffic.meter(ranks, rank, row_bytes=10, sum_bytes=4)
        for _ in range(draw.randrange(12)):
            phase, num_bytes = draw.choice("ab"), draw.randrange(100)
            match draw.choice(("sent", "moved", "stayed", "native", "reset")):
                case "sent":
                    each = [draw.randrange(100) for _ in range(ranks)]
                    traffic.sent(phase, each, rank)
                    total, calls = total + sum(each), calls + 1
                case "moved":
                    traffic.moved(phase, draw.randrange(ranks), num_bytes, rank)
                    total, calls = total + num_bytes, calls + 1
                case "native":  # a dispatch: rows to all ranks, and a flag to each of the others
                    rows = [draw.randrange(5) for _ in range(ranks)]
                    for peer, count in enumerate(rows):
                        meter.words[peer] += count
                    meter.words[2 * ranks] += 1
                    total, calls = total + 10 * (sum(rows) - rows[rank]) + COUNT_BYTES * (ranks - 1), calls + 2
                case "reset":
                    traffic.reset()
                    total = calls = 0
                case _:
                    traffic.stayed(phase, num_bytes, rank)
                    total += num_bytes
        nodes = Nodes.of(ranks, 2)
        by_link = traffic.by_link(nodes, rank)
        assert sum(by_link.values()) == total and traffic.calls_by_phase.total() == calls
        for phase, peers in traffic.bytes_by_peer.items():
            assert traffic.bytes_by_phase[phase] == peers.total() - peers[rank]
            one = traffic.by_link(nodes, rank, [phase])
            assert one["self"] == peers[rank] and one["intra_node"] == peers[3]
