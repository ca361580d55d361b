"""The plain ways: the bits of all-to-all, two collectives a dispatch, and no oracle prefers them."""

import pytest
import torch
from torch import Tensor

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.flight import Flight, interleave
from moe_mk.oracle import select
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize, TransportContext
from moe_mk.prepare_finalize.all_to_all import PointToPoint
from moe_mk.quant.plain import FP32
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens
from tests.support.problems import problem

CPU = torch.device("cpu")
TOKENS = (3, 0, 5)  # rank 1 brings none


def there_and_back(transport: PrepareFinalize, rank: int) -> Flight[tuple[RowTokens, Tensor]]:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], 8, generator=draw)
    ids = torch.randint(-1, 6, (TOKENS[rank], 2), generator=draw, dtype=torch.int32)
    arrived = yield from transport.prepare(x, Routing(ids, torch.full(ids.shape, 0.5)))
    assert isinstance(arrived, RowTokens)
    output = ExpertOutput(arrived.x_RH.values * 2, OutputStage.REDUCED)
    return arrived, (yield from transport.finalize(output, arrived))


def carried(name: str) -> tuple[list[PrepareFinalize], list[tuple[RowTokens, Tensor]]]:
    place = ExpertMap.linear(6, 3)
    comms = LockstepWorld(3).communicators()
    contexts = [TransportContext(comm, place, place.tables(CPU), FP32, FP32, 8, 2, CPU) for comm in comms]
    transports = [PREPARE_FINALIZE[name](context) for context in contexts]
    return transports, interleave([there_and_back(t, rank) for rank, t in enumerate(transports)])


@pytest.mark.row(33, 137)
@pytest.mark.parametrize("name", ["all_to_all_p2p", "all_to_all_v"])
def test_rows_and_sums_are_those_of_all_to_all(name: str) -> None:
    for (one, combined), (other, other_combined) in zip(carried("all_to_all")[1], carried(name)[1], strict=True):
        assert torch.equal(one.x_RH.values, other.x_RH.values) and torch.equal(one.ids_RK, other.ids_RK)
        assert torch.equal(one.weights_RK, other.weights_RK) and torch.equal(combined, other_combined)


@pytest.mark.row(137)
def test_the_table_costs_a_second_collective_that_brings_it_whole() -> None:
    for transport in carried("all_to_all_v")[0]:
        traffic = transport.context.comm.traffic
        assert traffic.calls_by_phase["dispatch counts"] + traffic.calls_by_phase["dispatch"] == 2
        # Three counts to each of two peers, where counts alone would be one to each.
        assert traffic.bytes_by_phase["dispatch counts"] == 2 * 3 * 8
    for transport in carried("all_to_all")[0]:
        assert transport.context.comm.traffic.bytes_by_phase["dispatch counts"] == 2 * 8


@pytest.mark.row(33)
def test_each_hop_is_one_message_to_and_from_each_peer() -> None:
    for transport in carried("all_to_all_p2p")[0]:
        comm = transport.context.comm
        assert isinstance(comm, PointToPoint)
        assert comm.messages == {"dispatch counts": 4, "dispatch": 4, "combine": 4}


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_baseline_serves_and_is_not_preferred(device: str, ranks: int) -> None:
    decision = select(problem("tiny", device, 8, ep=ranks))
    assert decision.chosen.prepare_finalize not in ("all_to_all_p2p", "all_to_all_v")
    pinned = problem("tiny", device, 8, ep=ranks, prepare_finalize="all_to_all_v")
    assert select(pinned).chosen.prepare_finalize == "all_to_all_v"
