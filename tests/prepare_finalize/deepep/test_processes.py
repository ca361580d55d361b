"""The DeepEP family between real processes over gloo, and what survivors see when one of them dies."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.comm.groups import ParallelGroups
from moe_mk.experts.base import ExpertsContext
from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.layer.grid import Grid
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize, TransportContext
from moe_mk.quant import BF16, FP8_1x128
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import MappedExpertWeights
from tests.support.worlds import world_of

RANKS, HIDDEN = 2, 256
NAMES = ["deepep_ll", "deepep_ht", "uccl_ep", "uccl_ep_ht"]
CPU = torch.device("cpu")


world = world_of(RANKS)


def transport_of(
    name: str, wire: QuantScheme, timeout_s: float, comm: DistributedCommunicator | None = None
) -> PrepareFinalize:
    comm = comm or DistributedCommunicator(dist.new_group(timeout=timedelta(seconds=timeout_s)))
    place = ExpertMap.linear(4, RANKS)
    context = TransportContext(
        comm, place, place.tables(CPU), wire, BF16, HIDDEN, 2, CPU, max_num_tokens=4, allow_emulated=True
    )
    return PREPARE_FINALIZE[name](context)


def tokens_of(rank: int) -> tuple[torch.Tensor, Routing]:
    """Rank 1 brings nothing."""
    ids = torch.tensor([[0, 3], [2, -1], [-1, -1]], dtype=torch.int32)[: 3 * (1 - rank)]
    weights = torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.0, 0.0]])[: 3 * (1 - rank)]
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()[: 3 * (1 - rank)]
    return x, Routing(ids, weights)


def one_call(rank: int, name: str, wire: QuantScheme) -> float:
    """The largest distance from token times the sum of its weights, relative."""
    transport, (x, routing) = transport_of(name, wire, 30.0), tokens_of(rank)
    kernel = FusedMoEKernel(transport, IdentityExperts(ExpertsContext(BF16, BF16, "silu", 2, HIDDEN, HIDDEN, CPU)))
    y = wait(kernel.steps(x, routing, MappedExpertWeights((), BF16)))
    want = wire.quantize(x).dequantize(torch.float32) * routing.weights_TK.sum(dim=1)[:, None]
    return 0.0 if rank else float(((y.float() - want).abs() / want.abs().clamp_min(1e-3)).max())


@pytest.mark.parametrize("name", NAMES)
def test_processes_carry_tokens_and_one_may_be_idle(world: RankWorld, name: str) -> None:
    for wire in (BF16, FP8_1x128):
        error = world.call(one_call, name, wire)[0]
        assert error <= 2.0**-7, "rounded twice to bf16"


def buffers_of_two_layers(rank: int, names: list[str]) -> list[int]:
    """Of each transport, how many buffers two layers have that are given one group, each with a view of its own."""
    groups, counts = ParallelGroups(ep=dist.group.WORLD), []
    for name in names:
        grids = [Grid(groups, 30.0, f"layer {number}") for number in range(2)]
        layers = [transport_of(name, BF16, 30.0, grid.ep) for grid in grids]  # type: ignore[arg-type]
        assert grids[0].ep is not grids[1].ep
        counts.append(len({id(each._session.buffer) for each in layers}))  # type: ignore[attr-defined]
    return counts


@pytest.mark.row(111)
@pytest.mark.parametrize("names", [NAMES], ids=["all"])
def test_layers_of_one_model_share_a_buffer(world: RankWorld, names: list[str]) -> None:
    assert world.call(buffers_of_two_layers, names) == [[1] * len(names)] * RANKS
