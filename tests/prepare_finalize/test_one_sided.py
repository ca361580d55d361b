"""One-sided dispatch and combine: by hand, against all-to-all bit for bit, under stress, and when a peer dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import Communicator, DistributedCommunicator, LockstepWorld, ParallelGroups, SingleRank
from moe_mk.comm.symmetric import StartWaiting
from moe_mk.comm.symmetric_wait import WaitingInLockstep
from moe_mk.comm.symmetric_words import is_behind
from moe_mk.config import device_profile, load_config
from moe_mk.config.problem import Problem
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.flight import Flight, interleave, land
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize, TransportContext
from moe_mk.prepare_finalize.one_sided import OneSided
from moe_mk.prepare_finalize.one_sided_window import Lanes, RegionShape
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant import BF16, FP32
from moe_mk.quant.fp8_block import FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.runner import prepare_async, run_dual, run_with
from moe_mk.testing.processes import RankError, RankWorld
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens
from moe_mk.trace.clock import now
from tests.layer.build import HIDDEN as LAYER_HIDDEN
from tests.layer.build import layer

RANKS, EXPERTS, TOP_K, HIDDEN = 4, 8, 3, 256
CPU = torch.device("cpu")


def context(
    comm: Communicator, *, wire: QuantScheme = FP32, dtype: Plain = FP32, experts: int = EXPERTS, hidden: int = HIDDEN,
    top_k: int = TOP_K,
) -> TransportContext:  # fmt: skip
    expert_map = ExpertMap.linear(experts, comm.size)
    return TransportContext(comm, expert_map, expert_map.tables(CPU), wire, dtype, hidden, top_k, CPU)


def there_and_back(transport: PrepareFinalize, x_TH: Tensor, routing: Routing) -> Flight[Tensor]:
    """Experts that scale a row by the sum of its local weights."""
    tokens = yield from transport.prepare(x_TH, routing)
    assert isinstance(tokens, RowTokens)
    return (yield from transport.finalize(scaled(tokens, transport.context.dtype.dtype), tokens))


def scaled(tokens: RowTokens, dtype: torch.dtype) -> ExpertOutput:
    y_RH = tokens.x_RH.dequantize(torch.float32) * tokens.weights_RK.sum(dim=1, keepdim=True)
    return ExpertOutput(y_RH.to(dtype), OutputStage.REDUCED)


def drawn(seed: int, tokens: int, dtype: torch.dtype, hidden: int = HIDDEN) -> tuple[Tensor, Routing]:
    draw = torch.Generator("cpu").manual_seed(seed)
    x_TH = torch.randn((tokens, hidden), generator=draw).to(dtype)
    ids_TK = torch.rand((tokens, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    ids_TK[torch.rand(ids_TK.shape, generator=draw) < 0.2] = -1
    weights_TK = torch.rand(ids_TK.shape, generator=draw).masked_fill(ids_TK < 0, 0.0)
    return x_TH, Routing(ids_TK, weights_TK)


# Ranks of one process.


def two_tokens_by_hand() -> tuple[list[OneSided], list[Flight[Tensor]], list[RowTokens]]:
    # Two ranks of one expert each. Token [1, 2] of rank 0 goes to expert 1 (weight 2), token [3, 4] to both (1 and 10).
    # Rank 1 has no token.
    made = [OneSided(context(c, experts=2, hidden=2, top_k=2)) for c in LockstepWorld(2).communicators()]
    x_TH = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    routing = Routing(torch.tensor([[1, -1], [0, 1]], dtype=torch.int32), torch.tensor([[2.0, 0.0], [1.0, 10.0]]))
    nothing = Routing(routing.ids_TK[:0], routing.weights_TK[:0])
    tokens = interleave([made[0].prepare(x_TH, routing), made[1].prepare(x_TH[:0], nothing)])
    rows = [each for each in tokens if isinstance(each, RowTokens)]
    outputs = [scaled(each, torch.float32) for each in rows]
    return made, [m.finalize(o, t) for m, o, t in zip(made, outputs, rows, strict=True)], rows


def test_rows_sums_and_bytes_by_hand() -> None:
    made, finals, (zero, one) = two_tokens_by_hand()
    assert zero.x_RH.values.tolist() == [[3.0, 4.0]] and one.x_RH.values.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert zero.ids_RK.tolist() == [[0, -1]] and one.ids_RK.tolist() == [[0, -1], [-1, 0]]
    assert zero.weights_RK.tolist() == [[1.0, 0.0]] and one.weights_RK.tolist() == [[2.0, 0.0], [0.0, 10.0]]
    home, empty = interleave(finals)
    # [1, 2] * 2 and [3, 4] * (1 + 10)
    assert home.tolist() == [[2.0, 4.0], [33.0, 44.0]] and empty.shape == (0, 2)
    # Two rows of 2 values (8 B), 2 ids and 2 weights (16 B) leave rank 0; two sums of 8 B leave rank 1.
    traffic = [dict(transport.context.comm.traffic.bytes_by_phase) for transport in made]
    assert traffic[0] == {"dispatch": 48, "dispatch flags": 8, "combine": 0, "combine flags": 8}
    assert traffic[1] == {"dispatch": 0, "dispatch flags": 8, "combine": 16, "combine flags": 8}


def test_more_tokens_than_a_window_holds_are_refused_before_anything_moves() -> None:
    made = [OneSided(replace(context(c), max_num_tokens=6)) for c in LockstepWorld(2).communicators()]
    with pytest.raises(ShapeError, match=r"x has T=7 tokens, a window holds 6 .*\[kernel.max_num_tokens\]"):
        land(made[0].prepare(*drawn(0, 7, torch.float32)))
    assert not made[0]._lanes._lanes
    everywhere = Routing(torch.tensor([[0, 4, 7]] * 6, dtype=torch.int32), torch.ones((6, 3)))
    home = interleave([there_and_back(transport, torch.ones((6, HIDDEN)), everywhere) for transport in made])
    assert all(torch.equal(y_TH, torch.full((6, HIDDEN), 3.0)) for y_TH in home), "a full window is full, not over"


def test_groups_and_devices_that_share_no_memory_are_refused() -> None:
    alone = context(SingleRank())
    with pytest.raises(UnsupportedError, match="a SingleRank joins neither processes nor virtual ranks"):
        OneSided(alone)
    with pytest.raises(UnsupportedError, match="runs on cpu, this device is meta"):
        OneSided(replace(context(LockstepWorld(2).communicators()[0]), device=torch.device("meta")))


def test_calls_under_way_at_once_have_lanes_of_their_own_and_give_them_back() -> None:
    made = [OneSided(context(comm)) for comm in LockstepWorld(2).communicators()]
    batches = [[drawn(10 * lane + rank, 5, torch.float32) for lane in range(3)] for rank in range(2)]
    alone: list[list[Tensor]] = [[], []]
    for lane in range(3):
        done = interleave([there_and_back(made[rank], *batches[rank][lane]) for rank in range(2)])
        alone = [[*alone[rank], done[rank]] for rank in range(2)]
    assert [len(transport._lanes._lanes) for transport in made] == [1, 1]
    flights = [there_and_back(made[rank], *batches[rank][lane]) for rank in range(2) for lane in range(3)]
    together = interleave(flights)
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(alone[rank], together[3 * rank :], strict=False))
        lanes = made[rank]._lanes._lanes
        assert len(lanes) == 3 and not any(lane.busy for lane in lanes)
        regions = [(lane._heap._memory.bytes.data_ptr(), lane._heap._memory.num_bytes) for lane in lanes]
        assert all(a + size <= b for (a, size), (b, _) in zip(sorted(regions), sorted(regions)[1:], strict=False))


def test_calls_that_are_never_finalized_end_in_an_error() -> None:
    comm = LockstepWorld(2).communicators()[0]
    lanes = Lanes.of(comm, RegionShape(1, 4, 4, 4))
    for _ in range(Lanes.MOST):
        lanes.take(comm)
    with pytest.raises(CommError, match="rank 0, phase 'dispatch': 16 calls were prepared and not finalized"):
        lanes.take(comm)


def test_a_call_is_finalized_once() -> None:
    made, finals, (zero, _) = two_tokens_by_hand()
    interleave(finals)
    with pytest.raises(CommError, match="rank 0, phase 'combine': epoch 1 was finalized before"):
        land(made[0].finalize(scaled(zero, torch.float32), zero))


def test_after_a_failure_no_call_is_served() -> None:
    zero = OneSided(context(LockstepWorld(2).communicators()[0]))
    with pytest.raises(CommError, match="rank 0, phase 'dispatch', peer 1: epoch 1: has made no such call"):
        land(zero.prepare(*drawn(0, 3, torch.float32)))
    with pytest.raises(CommError, match=r"an earlier call failed, .* build the layer anew \(rank 0, .* epoch 1"):
        land(zero.prepare(*drawn(0, 3, torch.float32)))


def test_a_repeated_call_takes_no_new_memory() -> None:
    made = [OneSided(context(comm)) for comm in LockstepWorld(2).communicators()]
    for _ in range(3):
        interleave([there_and_back(transport, *drawn(1, 4, torch.float32)) for transport in made])
    assert [len(transport._lanes._lanes) for transport in made] == [1, 1]
    assert made[0]._lanes._lanes[0].epoch == 3


def test_rows_do_not_change_under_a_later_call() -> None:
    made = [OneSided(context(comm)) for comm in LockstepWorld(2).communicators()]
    halves = [prepare_async(made[rank], *drawn(rank, 6, torch.float32)) for rank in range(2)]
    tokens = [half.receive() for half in halves]
    first = tokens[0]
    assert isinstance(first, RowTokens)
    before = first.x_RH.values.clone()
    outputs = [scaled(each, torch.float32) for each in tokens if isinstance(each, RowTokens)]
    interleave([t.finalize(o, each) for t, o, each in zip(made, outputs, tokens, strict=True)])
    interleave([there_and_back(made[rank], *drawn(9 + rank, 6, torch.float32)) for rank in range(2)])
    assert torch.equal(first.x_RH.values, before)


def problem(device: str, **settings: object) -> Problem:
    config = load_config("tiny").with_(max_num_tokens=64, **settings)
    return Problem(config, device_profile(device), BF16, 64)


def test_the_oracle_is_told_where_it_runs_and_that_it_is_cheaper_there() -> None:
    assert not OneSided.reasons_against(problem("cpu", ep=4))
    assert {r.code for r in OneSided.reasons_against(problem("h200", ep=4))} == {"device"}
    assert {r.code for r in OneSided.reasons_against(problem("cpu"))} == {"ranks"}
    far = problem("cpu", ep=4)
    far = replace(far, device=far.device.model_copy(update={"ranks_per_node": 2}))
    assert [r.text for r in OneSided.reasons_against(far)] == ["needs all ranks in one node, 4 ranks span 2 nodes"]
    ours, theirs = (PREPARE_FINALIZE[name].volume(problem("cpu", ep=4)) for name in ("one_sided", "all_to_all"))
    assert (ours.dispatch_rows, ours.combine_rows) == (theirs.dispatch_rows, theirs.combine_rows)
    assert ours.collectives < theirs.collectives
    assert OneSided.max_rows(problem("cpu", ep=4)) == 4 * 64


# Four processes.


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(RANKS) as ranks:
        yield ranks


def world_comm(timeout_s: float = 30.0) -> DistributedCommunicator:
    group = dist.group.WORLD
    assert group is not None
    return DistributedCommunicator(group, timeout_s=timeout_s, layer="layers.3")


def compare_with_all_to_all(rank: int) -> list[str]:
    """Every wire, with changing token counts, zero and -1 included: outputs, rows and traffic."""
    found = []
    for wire, dtype in ((FP32, FP32), (BF16, BF16), (FP8_1x128, BF16), (FP8_1x128_UE8M0, BF16)):
        made = {name: PREPARE_FINALIZE[name](context(world_comm(), wire=wire, dtype=dtype)) for name in NAMES}
        for seed, tokens in enumerate([(3, 0, 7, 1), (0, 0, 0, 0), (9, 9, 9, 9), (0, 5, 0, 0), (130, 1, 33, 2)]):
            x_TH, routing = drawn(100 * seed + rank, tokens[rank], dtype.dtype)
            home = {name: land(there_and_back(made[name], x_TH, routing)) for name in NAMES}
            if not torch.equal(home["one_sided"], home["all_to_all"]):
                found.append(f"{wire.name} {tokens}: outputs differ")
            bytes_ = {name: made[name].context.comm.traffic.bytes_by_phase for name in NAMES}
            model = modelled(routing, wire, dtype, rank)
            for phase in ("dispatch", "combine"):
                sent = bytes_["one_sided"][phase]
                if sent != bytes_["all_to_all"][phase] or (phase == "dispatch" and sent != model):
                    found.append(f"{wire.name} {tokens}: {sent} B in {phase}, {bytes_['all_to_all'][phase]}, {model}")
            for name in NAMES:
                made[name].context.comm.traffic.reset()
    return found


NAMES = ("one_sided", "all_to_all")


def modelled(routing: Routing, wire: QuantScheme, dtype: Plain, rank: int) -> int:
    """A row for each pair of a token and another rank that holds one of its experts, counted one by one."""
    rows = sum(len({e // (EXPERTS // RANKS) for e in ids if e >= 0} - {rank}) for ids in routing.ids_TK.tolist())
    return rows * packed_row_bytes(wire, HIDDEN, TOP_K)


@pytest.mark.row(55)
def test_processes_give_the_bits_and_the_bytes_of_all_to_all(world: RankWorld) -> None:
    assert world.call(compare_with_all_to_all) == [[]] * RANKS


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
    lanes = transport._lanes._lanes
    names = [os.fstat(lane._heap._memory._descriptor).st_nlink for lane in lanes]  # type: ignore[attr-defined]
    return {"wrong": wrong, "lanes": len(lanes), "named files": sum(names)}


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


@pytest.mark.row(55)
def test_a_thousand_random_calls_with_delays_all_come_home(world: RankWorld) -> None:
    assert world.call(stress, 1_000) == [{"wrong": 0, "lanes": 3, "named files": 0}] * RANKS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_random_calls_with_delays_all_come_home(world: RankWorld) -> None:
    result = world.call(stress, 10_000, timeout_s=500.0)
    assert result == [{"wrong": 0, "lanes": 3, "named files": 0}] * RANKS


def grow(rank: int) -> list[int]:
    """Pages taken by the file after calls of 8, 8, 64, 64 and 8 tokens."""
    transport, taken = OneSided(context(world_comm())), []
    for tokens in (8, 8, 64, 64, 8):
        land(there_and_back(transport, *drawn(rank, tokens, torch.float32)))
        heap = transport._lanes._lanes[0]._heap
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
    alone = land(there_and_back(transport, x_TH, routing))
    (lane,) = transport._lanes._lanes
    waiting = lane._heap._waiting

    def meanwhile() -> bool:
        deadline, heap = now() + 30.0, lane._heap
        flags = [heap._flag_at(rank, peer) for peer in lane.peers]
        while any(is_behind(heap._words.load(at), lane.epoch) for at in flags):
            if now() > deadline:
                return False
        heap._waiting = NoWaiting.begin(rank)
        return True

    tokens, arrived = run_with(transport.prepare(x_TH, routing), meanwhile)
    assert isinstance(tokens, RowTokens)
    lane._heap._waiting = waiting
    y_TH = land(transport.finalize(scaled(tokens, torch.float32), tokens))
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
    lanes = [each.kernel.prepare_finalize._lanes for each in made]  # type: ignore[union-attr]
    return {
        "equal": all(torch.equal(y_TH, outputs[0]) for y_TH in outputs),
        "lanes": [len(each._lanes) for each in lanes],
        "shared": [each is lanes[0] for each in lanes],
    }


@pytest.mark.row(111)
def test_layers_of_the_same_groups_share_one_file(world: RankWorld) -> None:
    found = {"equal": True, "lanes": [1, 1, 1, 1], "shared": [True, True, True, False]}
    assert world.call(layers_of_one_model) == [found] * RANKS


def call_with_a_late_peer(rank: int) -> str:
    transport = OneSided(context(world_comm(timeout_s=0.5)))
    land(there_and_back(transport, *drawn(rank, 4, torch.float32)))
    if rank == 2:
        time.sleep(1.0)
        return ""
    with pytest.raises(CommError) as caught:
        land(there_and_back(transport, *drawn(rank, 4, torch.float32)))
    return str(caught.value)


def test_a_late_peer_ends_the_call_with_rank_phase_epoch_and_peer(world: RankWorld) -> None:
    texts = world.call(call_with_a_late_peer)
    for rank in (0, 1, 3):
        assert texts[rank].startswith(f"rank {rank}, phase 'dispatch', layer 'layers.3', peer 2: epoch 2: sent nothing")
        assert "within 0.5 s [kernel.timeout_s]" in texts[rank]


def call_until_one_dies(rank: int, dying: int) -> str:
    transport = OneSided(context(world_comm(timeout_s=30.0)))
    for call in range(20):
        x_TH, routing = drawn(rank, 8, torch.float32)
        flight: Flight[Tensor] = there_and_back(transport, x_TH, routing)
        if rank == dying and call == 10:
            next(flight)  # its tokens are sent; its sums never will be
            os.kill(os.getpid(), signal.SIGKILL)
        start = now()
        try:
            land(flight)
        except CommError as error:
            return f"{call} {now() - start < 10.0} {error}"
    return "nobody died"


# Last of all: the world does not outlive it.
@pytest.mark.row(55)
def test_a_killed_peer_is_named_long_before_the_deadline(world: RankWorld) -> None:
    with pytest.raises(RankError, match="1 of 4 ranks failed\nrank 2: the process ended with exit code -9") as caught:
        world.call(call_until_one_dies, 2)
    for rank in (0, 1, 3):
        text = str(caught.value.results[rank])
        assert text.startswith(f"10 True rank {rank}, phase 'combine', layer 'layers.3', peer 2: epoch 11: its process")
        assert text.endswith("has ended")
