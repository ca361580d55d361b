"""One-sided between ranks on a GPU: virtual ranks, a captured graph, and processes that share one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import Communicator, DistributedCommunicator, LockstepWorld
from moe_mk.flight import interleave, wait
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize, TransportContext
from moe_mk.quant import BF16
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import Routing
from tests.support.one_sided_ranks import there_and_back
from tests.support.worlds import world_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]
HIDDEN, EXPERTS, TOP_K, TOKENS = 1024, 32, 4, 16


def built(comm: Communicator, name: str, wire: QuantScheme = BF16) -> PrepareFinalize:
    cuda = torch.device("cuda", 0)
    expert_map = ExpertMap.linear(EXPERTS, comm.size)
    tables = expert_map.tables(cuda)
    given = TransportContext(comm, expert_map, tables, wire, BF16, HIDDEN, TOP_K, cuda, max_num_tokens=TOKENS)
    return PREPARE_FINALIZE[name](given)


def drawn(seed: int, tokens: int) -> tuple[Tensor, Routing]:
    draw = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand((tokens, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    ids_TK[torch.rand(ids_TK.shape, generator=draw) < 0.2] = -1
    weights_TK = torch.rand(ids_TK.shape, generator=draw).masked_fill(ids_TK < 0, 0.0)
    x_TH = torch.randn((tokens, HIDDEN), generator=draw).bfloat16()
    return x_TH.cuda(), Routing(ids_TK.cuda(), weights_TK.cuda())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("wire", [BF16, FP8_1x128], ids=lambda wire: wire.name)
def test_virtual_ranks_give_the_bits_of_all_to_all(ranks: int, wire: QuantScheme) -> None:
    made = {
        name: [built(comm, name, wire) for comm in LockstepWorld(ranks).communicators()]
        for name in ("one_sided_gpu", "all_to_all")
    }
    for call, tokens in enumerate((TOKENS, 0, 5)):
        batches = [drawn(ranks * call + rank, tokens if rank else TOKENS) for rank in range(ranks)]
        ours, theirs = (
            interleave([there_and_back(each, *batch) for each, batch in zip(of, batches, strict=True)])
            for of in made.values()
        )
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_captured_graph_serves_other_tokens_fewer_tokens_and_another_mask() -> None:
    made = [built(comm, "one_sided_gpu") for comm in LockstepWorld(2).communicators()]
    batches = [drawn(rank, TOKENS) for rank in range(2)]

    def call(of: list[tuple[Tensor, Routing]]) -> list[Tensor]:
        return interleave([there_and_back(each, *batch) for each, batch in zip(made, of, strict=True)])

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(batches)  # opens the window and compiles
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = call(batches)
    for seed, kept, active in ((10, TOKENS, (1, 1)), (20, 3, (1, 1)), (30, 0, (1, 1)), (40, TOKENS, (1, 0))):
        others = [drawn(seed + rank, TOKENS) for rank in range(2)]
        for (x_TH, routing), (other_TH, other) in zip(batches, others, strict=True):
            other.ids_TK[kept:] = -1  # fewer tokens: those behind go nowhere
            x_TH.copy_(other_TH)
            routing.ids_TK.copy_(other.ids_TK)
            routing.weights_TK.copy_(other.weights_TK)
        for each in made:
            each.leave_out(torch.tensor(active, dtype=torch.int32, device="cuda"))  # type: ignore[attr-defined]
        graph.replay()
        torch.cuda.synchronize()
        got = [y_TH.clone() for y_TH in captured]
        assert all(torch.equal(one, other) for one, other in zip(got, call(others), strict=True))
        assert not any(bool(y_TH[kept:].any()) for y_TH in got)


world = world_of(2)


def compared(rank: int) -> list[bool]:
    """Several calls between processes on one device, against all-to-all through the host."""
    group = dist.group.WORLD
    assert group is not None
    ours, theirs = (built(DistributedCommunicator(group), name) for name in ("one_sided_gpu", "all_to_all"))
    batches = [drawn(10 * call + rank, (TOKENS, 0, 7)[(call + rank) % 3]) for call in range(6)]
    return [torch.equal(*(wait(there_and_back(each, *batch)) for each in (ours, theirs))) for batch in batches]


def test_processes_on_one_device_give_the_bits_of_all_to_all(world: RankWorld) -> None:
    assert world.call(compared, timeout_s=200.0) == [[True] * 6] * 2
