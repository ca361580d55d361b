"""One-sided dispatch and combine between four processes: all-to-all bit for bit, stress, overlap, peers that die."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import ParallelGroups
from moe_mk.comm.symmetric.flags import WaitingInLockstep, is_behind
from moe_mk.comm.symmetric.heap import StartWaiting
from moe_mk.flight import Flight, wait
from moe_mk.kernels.native import exchange
from moe_mk.kernels.native.selfcheck import loaded, reasons_against
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize
from moe_mk.prepare_finalize.one_sided.transport import OneSided
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant import BF16, FP16, FP32
from moe_mk.quant.fp8 import FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.microscaling import MXFP8
from moe_mk.quant.nvfp4 import NVFP4_TOKENS
from moe_mk.quant.tensor import QuantScheme
from moe_mk.runner import run_dual, run_with
from moe_mk.tokens import Routing, RowTokens
from moe_mk.trace.clock import now
from tests.support.layers import HIDDEN as LAYER_HIDDEN
from tests.support.layers import layer
from tests.support.one_sided_ranks import (
    EXPERTS,
    HIDDEN,
    RANKS,
    TOP_K,
    context,
    drawn,
    scaled,
    there_and_back,
    world_comm,
)
from tests.support.worlds import world_of

world = world_of(RANKS)
WIRES = (
    (FP32, FP32), (BF16, BF16), (FP16, FP16), (FP8_1x128, BF16), (FP8_1x128_UE8M0, BF16), (INT8_TOKEN, BF16),
    (MXFP8, BF16), (NVFP4_TOKENS, FP32),
)  # fmt: skip


def compare_with_all_to_all(rank: int, with_kernels: tuple[int, ...]) -> list[str]:
    """Every wire, with changing token counts, zero and -1 included: outputs, rows and traffic."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if rank not in with_kernels:
            patch.setattr(exchange, "ready", lambda: None)
        for wire, dtype in WIRES:
            made = {name: PREPARE_FINALIZE[name](context(world_comm(), wire=wire, dtype=dtype)) for name in NAMES}
            for seed, tokens in enumerate([(3, 0, 7, 1), (0, 0, 0, 0), (9, 9, 9, 9), (0, 5, 0, 0), (130, 1, 33, 2)]):
                found += differences(made, wire, tokens, drawn(100 * seed + rank, tokens[rank], dtype.dtype), rank)
            (buffer,) = made["one_sided"]._pool.slots  # type: ignore[attr-defined]
            if (buffer.exchange is not None) != (rank in with_kernels):
                found.append(f"{wire.name}: rows go by the wrong way")
    return found


def differences(
    made: dict[str, PrepareFinalize],
    wire: QuantScheme,
    tokens: tuple[int, ...],
    batch: tuple[Tensor, Routing],
    rank: int,
) -> list[str]:
    """What reports the two transports, and both from the model, after one call of each."""
    found, traffic = [], {name: made[name].context.comm.traffic for name in NAMES}
    for each in traffic.values():
        each.reset()
    combined = {name: wait(there_and_back(made[name], *batch)) for name in NAMES}
    if not torch.equal(combined["one_sided"], combined["all_to_all"]):
        found.append(f"{wire.name} {tokens}: outputs differ")
    model = modelled(batch[1], wire, rank)
    for phase in ("dispatch", "combine"):
        ours, theirs = (traffic[name].bytes_by_phase[phase] for name in NAMES)
        if ours != theirs or (phase == "dispatch" and ours != model):
            found.append(f"{wire.name} {tokens}: {ours} B in {phase}, {theirs}, {model}")
    return found


NAMES = ("one_sided", "all_to_all")


def modelled(routing: Routing, wire: QuantScheme, rank: int) -> int:
    """A row for each pair of a token and another rank that holds one of its experts, counted one by one."""
    rows = sum(len({e // (EXPERTS // RANKS) for e in ids if e >= 0} - {rank}) for ids in routing.ids_TK.tolist())
    return rows * packed_row_bytes(wire, HIDDEN, TOP_K)


@pytest.fixture(scope="module")
def compiled() -> None:
    if reasons := reasons_against():
        pytest.skip("; ".join(reasons))
    loaded()  # from here on every process finds them


@pytest.mark.slow
@pytest.mark.row(55)
@pytest.mark.parametrize("with_kernels", [(0, 1, 2, 3), (), (1, 2)], ids=["kernels", "torch", "mixed"])
def test_processes_give_the_bits_and_the_bytes_of_all_to_all(
    world: RankWorld, compiled: None, with_kernels: tuple[int, ...]
) -> None:
    assert world.call(compare_with_all_to_all, with_kernels) == [[]] * RANKS


def stress(rank: int, epochs: int) -> dict[str, int]:
    """Random tokens, -1 ids, delays and micro-batches; each output is known without any communication."""
    delays, same, wrong = random.Random(rank), random.Random(0), 0
    transport = OneSided(context(world_comm(), wire=BF16, dtype=BF16))
    for epoch in range(epochs):
        batches = []
        for _ in range(same.choice((1, 1, 1, 2, 3))):
            x_TH, routing = drawn(RANKS * delays.randrange(1 << 30) + rank, delays.choice((0, 1, 2, 5, 33)), BF16.dtype)
            batches.append((x_TH, routing))
        flights = [delayed(there_and_back(transport, *batch), delays) for batch in batches]
        for (x_TH, routing), y_TH in zip(batches, run_dual(flights), strict=True):
            wrong += not torch.equal(y_TH, expected(x_TH, routing))
        if epoch % 50 == 7 * rank:
            time.sleep(0.003)
    slots = transport._pool.slots
    names = [os.fstat(buffer.heap._memory._descriptor).st_nlink for buffer in slots]  # type: ignore[attr-defined]
    return {"wrong": wrong, "slots": len(slots), "named files": sum(names)}


def delayed(flight: Flight[Tensor], delays: random.Random) -> Flight[Tensor]:
    while True:
        if delays.random() < 0.1:
            time.sleep(delays.random() * 5e-4)
        try:
            hop = next(flight)
        except StopIteration as landed:
            return landed.value  # type: ignore[no-any-return]
        yield hop


def expected(x_TH: Tensor, routing: Routing) -> Tensor:
    """What each rank's scaling gives, rounded there, added in rank order in f32."""
    total_TH, rank_TK = torch.zeros(x_TH.shape), routing.ids_TK // (EXPERTS // RANKS)
    for rank in range(RANKS):
        weights_TK = routing.weights_TK * ((rank_TK == rank) & (routing.ids_TK >= 0))
        total_TH += (x_TH.float() * weights_TK.sum(dim=1, keepdim=True)).to(x_TH.dtype).float()
    return total_TH.to(x_TH.dtype)


@pytest.mark.slow
@pytest.mark.row(55)
def test_a_thousand_random_calls_with_delays_all_return(world: RankWorld) -> None:
    assert world.call(stress, 1_000) == [{"wrong": 0, "slots": 3, "named files": 0}] * RANKS


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_ten_thousand_random_calls_with_delays_all_return(world: RankWorld) -> None:
    result = world.call(stress, 10_000, timeout_s=500.0)
    assert result == [{"wrong": 0, "slots": 3, "named files": 0}] * RANKS


def grow(rank: int) -> list[int]:
    """Pages taken by the file after calls of 8, 8, 64, 64 and 8 tokens."""
    transport, taken = OneSided(context(world_comm())), []
    for tokens in (8, 8, 64, 64, 8):
        wait(there_and_back(transport, *drawn(rank, tokens, torch.float32)))
        heap = transport._pool.slots[0].heap
        heap.barrier()
        taken.append(os.fstat(heap._memory._descriptor).st_blocks)  # type: ignore[attr-defined]
        heap.barrier()
    return taken


@pytest.mark.row(111)
def test_pages_are_taken_by_the_largest_call_and_never_again(world: RankWorld) -> None:
    for small, again, large, still, after in world.call(grow):
        assert small == again < large == still == after


class NoWaiting(WaitingInLockstep):
    """Whoever has to wait for a word has failed."""

    @classmethod
    def begin(cls, rank: int) -> StartWaiting:
        return lambda phase, epoch, layer: cls(rank, phase, epoch, layer)


def compute_while_rows_arrive(rank: int) -> list[bool]:
    """Other work that looks at the flags of this rank and touches nothing else of the transport."""
    transport = OneSided(context(world_comm()))
    x_TH, routing = drawn(rank, 6, torch.float32)
    alone = wait(there_and_back(transport, x_TH, routing))
    (buffer,) = transport._pool.slots
    waiting = buffer.heap._waiting

    def meanwhile() -> bool:
        deadline, heap = now() + 30.0, buffer.heap
        flags = [heap._flag_at(rank, peer) for peer in buffer.peers]
        while any(is_behind(heap._words.load(at), buffer.epoch) for at in flags):
            if now() > deadline:
                return False
        heap._waiting = NoWaiting.begin(rank)
        return True

    tokens, arrived = run_with(transport.prepare(x_TH, routing), meanwhile)
    assert isinstance(tokens, RowTokens)
    buffer.heap._waiting = waiting
    y_TH = wait(transport.finalize(scaled(tokens, torch.float32), tokens))
    return [arrived, torch.equal(y_TH, alone)]


@pytest.mark.row(93)
def test_rows_of_peers_arrive_while_this_rank_computes(world: RankWorld) -> None:
    assert world.call(compute_while_rows_arrive) == [[True, True]] * RANKS


def layers_of_one_model(rank: int) -> dict[str, object]:
    """Three layers given the same groups, and one given groups of its own."""
    groups, x_TH = ParallelGroups(ep=dist.group.WORLD), torch.randn((rank, LAYER_HIDDEN))
    made = [layer(8, 2, groups, prepare_finalize="one_sided", max_num_tokens=8) for _ in range(3)]
    made.append(layer(8, 2, ParallelGroups(ep=dist.group.WORLD), prepare_finalize="one_sided", max_num_tokens=8))
    outputs = [each(x_TH) for each in made]
    pools = [each.kernel.prepare_finalize._pool for each in made]  # type: ignore[union-attr]
    return {
        "equal": all(torch.equal(y_TH, outputs[0]) for y_TH in outputs),
        "slots": [len(each.slots) for each in pools],
        "shared": [each is pools[0] for each in pools],
    }


@pytest.mark.row(111)
def test_layers_of_the_same_groups_share_one_file(world: RankWorld) -> None:
    found = {"equal": True, "slots": [1, 1, 1, 1], "shared": [True, True, True, False]}
    assert world.call(layers_of_one_model) == [found] * RANKS
