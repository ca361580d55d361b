"""Rows that are sent with their counts: the bits, bytes and yields of counts first, whatever each rank brings."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import DistributedCommunicator
from moe_mk.comm.header import EAGER_BYTES, HEADER_BYTES
from moe_mk.errors import CommError
from moe_mk.flight import Flight, interleave, wait
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import TransportContext
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant import BF16
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens
from tests.support.tiers import quick_where
from tests.support.worlds import world_of

RANKS, EXPERTS, TOP_K, HIDDEN, MOST = 3, 9, 3, 2048, 40
FEW = EAGER_BYTES // packed_row_bytes(BF16, HIDDEN, TOP_K)
SIZES = (0, 1, 3, FEW, FEW + 1, 2 * FEW - 3, MOST)
"""Tokens of a rank: around the number from which counts go first, for bf16 rows. 2 * FEW - 3 rows in FP8 fit into one
message, and their sums do not."""


class CountsFirst(AllToAll):
    """The same transport with two exchanges a dispatch, also of few rows."""

    counts_first = True


world = world_of(RANKS)


def context_of(wire: Any = BF16) -> TransportContext:
    assert dist.group.WORLD is not None
    place, cpu = ExpertMap.linear(EXPERTS, RANKS), torch.device("cpu")
    comm = DistributedCommunicator(dist.group.WORLD, timeout_s=30.0)
    return TransportContext(comm, place, place.tables(cpu), wire, BF16, HIDDEN, TOP_K, cpu, max_num_tokens=MOST)


def batch(rank: int, tokens: int, seed: int) -> tuple[Tensor, Routing]:
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    scores_TE = torch.rand((tokens, EXPERTS), generator=draw)
    ids_TK = scores_TE.topk(TOP_K).indices.to(torch.int32)
    ids_TK[torch.rand(ids_TK.shape, generator=draw) < 0.3] = -1
    x_TH = torch.randn((tokens, HIDDEN), generator=draw).to(torch.bfloat16)
    return x_TH, Routing(ids_TK, torch.rand((tokens, TOP_K), generator=draw))


def call(transport: AllToAll, x_TH: Tensor, routing: Routing, seen: list[Any], number: int = 2) -> Flight[Tensor]:
    """number: of the call; the outputs of some are not dense, or in f32."""
    received = yield from transport.prepare(x_TH, routing)
    assert isinstance(received, RowTokens)
    x_RH = received.x_RH
    seen += [x_RH.values.clone(), x_RH.scales, received.ids_RK.clone(), received.weights_RK.clone()]
    y_RH = x_RH.dequantize(torch.float32) * received.weights_RK.sum(dim=1, keepdim=True)
    y_RH = y_RH.to(torch.bfloat16) if number % 3 else y_RH
    y_RH = torch.cat((y_RH, y_RH + 1), 1)[:, :HIDDEN] if number % 2 else y_RH
    return (yield from transport.finalize(ExpertOutput(y_RH, OutputStage.REDUCED), received))


def yields_of(flight: Flight[Tensor]) -> tuple[list[str], Tensor]:
    names = []
    while True:
        try:
            names.append(next(flight).what)
        except StopIteration as end:
            return names, end.value


def bits(parts: list[Any]) -> list[Any]:
    return [None if part is None else part.contiguous().view(torch.uint8) for part in parts]


def compare(rank: int, seed: int, wire: Any) -> list[str]:
    """What differs between the two transports over some calls, of sizes that change by rank and call."""
    draw, context, wrong = random.Random(seed), context_of(wire), []
    merged, first = (kind(replace(context, comm=context_of().comm)) for kind in (AllToAll, CountsFirst))
    if rank == seed % RANKS:
        merged._format = None  # a rank without a compiler, among others
    for number in range(8):
        sizes = [draw.choice(SIZES) for _ in range(RANKS)]
        x_TH, routing = batch(rank, sizes[rank], 10 * seed + number)
        found = []
        for transport in (merged, first):
            transport.context.comm.traffic.reset()
            seen: list[Any] = []
            names, y_TH = yields_of(call(transport, x_TH, routing, seen, number))
            traffic = transport.context.comm.traffic
            peers = {phase: {p: n for p, n in by.items() if n} for phase, by in traffic.bytes_by_peer.items()}
            found.append((names, peers, traffic.bytes_by_phase, bits([*seen, y_TH])))
        (names, peers, phases, got), (other_names, other_peers, other_phases, expected) = found
        if (names, peers, phases) != (other_names, other_peers, other_phases):
            wrong.append(f"{sizes}: {names} {peers} instead of {other_names} {other_peers}")
        for what, mine, theirs in zip(("x", "scales", "ids", "weights", "y"), got, expected, strict=True):
            if (mine is None) != (theirs is None) or (mine is not None and not torch.equal(mine, theirs)):
                wrong.append(f"{sizes}: other {what}")
    return wrong


@pytest.mark.parametrize("seed", quick_where([0].__contains__, range(6)))
@pytest.mark.parametrize("wire", [BF16, FP8_1x128], ids=["bf16", "fp8"])
def test_rows_with_counts_give_the_bits_bytes_and_yields_of_counts_first(
    world: RankWorld, seed: int, wire: Any
) -> None:
    assert world.call(compare, seed, wire) == [[]] * RANKS


def observed(rank: int) -> list[int]:
    """Bytes behind headers that gloo was given, and bytes of rows that were reported, over calls of all sizes."""
    context = context_of()
    comm: Any = context.comm
    transport, sent = AllToAll(context), 0
    post = comm._messages.connections.post

    def counting(how: str, message: Tensor, peer: int, tag: int) -> Any:
        nonlocal sent
        if how == "send":
            sent += message.numel() * message.element_size()
            sent -= HEADER_BYTES * (message.dtype is torch.uint8 and tag < 2**16)
        return post(how, message, peer, tag)

    comm._messages.connections.post = counting
    for number, tokens in enumerate(SIZES):
        wait(call(transport, *batch(rank, tokens, number), []))
    wait(call(transport, *batch(rank, SIZES[rank + 3 - rank % 2 * 3], 99), []))
    del comm._messages.connections.post
    return [sent, comm.traffic.bytes_by_phase["dispatch"] + comm.traffic.bytes_by_phase["combine"]]


@pytest.mark.row(37)
def test_reported_bytes_are_those_that_gloo_was_given(world: RankWorld) -> None:
    for sent, reported in world.call(observed):
        assert sent == reported > 0


def two_at_once(rank: int) -> list[bool]:
    """Two micro-batches in flight at once, one of them of many rows; each alone gives the same."""
    transport, found = AllToAll(context_of()), []
    for sizes in ((1, 3), (2, MOST), (MOST, 1), (0, 0)):
        inputs = [batch(rank, tokens, number) for number, tokens in enumerate(sizes)]
        both = interleave([call(transport, *each, []) for each in inputs])
        alone = [wait(call(transport, *each, [])) for each in inputs]
        found.append(all(map(torch.equal, both, alone)))
    return found


def test_micro_batches_in_flight_at_once_do_not_mix(world: RankWorld) -> None:
    assert all(map(all, world.call(two_at_once)))


def announces_others(rank: int, more: int) -> str:
    """Rank 1 announces another number of rows than it sends."""
    transport = AllToAll(context_of())
    comm: Any = transport.context.comm
    wait(call(transport, *batch(rank, 3, 0), []))
    dist.barrier()
    if rank == 1:
        swap = comm.swap_eager

        def changed(going: Any, awaited: Any, phase: str) -> Any:
            return swap({p: e._replace(num_rows=e.num_rows + more) for p, e in going.items()}, awaited, phase)

        comm.swap_eager = changed
    x_TH, routing = batch(rank, 3, 0)
    try:
        wait(call(transport, x_TH, Routing(torch.full_like(routing.ids_TK, 0), routing.weights_TK), []))
    except CommError as error:
        comm.fail(error)
        dist.barrier()
        wait(comm.recover())
        return f"{error.peer} {error}"
    dist.barrier()
    wait(comm.recover())
    return ""


@pytest.mark.parametrize("more", [1, -1])
def test_a_count_that_does_not_fit_the_rows_names_its_sender(world: RankWorld, more: int) -> None:
    first = world.call(announces_others, more)[0]
    assert first.startswith("1 ") and f"announced {3 + more} rows of" in first and "and sent" in first
