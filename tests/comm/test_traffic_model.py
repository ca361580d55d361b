"""What transports send for a routing, from the routing alone: by hand, and against the published table."""

import pytest
import torch
from torch import Tensor

from moe_mk.comm import Nodes
from moe_mk.comm.destinations import expected_groups
from moe_mk.lab.plan.exchange import RowBytes, all_to_all_flow, hierarchical_flow

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


@pytest.mark.row(37)
def test_the_expected_number_of_ranks_is_what_routing_gives() -> None:
    draw = torch.Generator().manual_seed(0)
    ids_TK = torch.rand((4000, 256), generator=draw).argsort(dim=1)[:, :8]
    rows = all_to_all_flow([ids_TK // 32, *[ids_TK[:0]] * 7], RowBytes(1, 1)).phases["dispatch"].sum()
    assert float(rows) / 4000 == pytest.approx(expected_groups(256, 8, 8), rel=0.01)
