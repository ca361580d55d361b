"""The one-sided transport of GPUs on CPU tensors: virtual ranks and processes; run with TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import Communicator, DistributedCommunicator, LockstepWorld
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.flight import Flight, interleave, wait
from moe_mk.kernels.triton.one_sided import FLAG_BYTES
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.prepare_finalize.one_sided_gpu.transport import OneSidedGpu
from moe_mk.quant import BF16, FP32
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.microscaling import MXFP8
from moe_mk.quant.nvfp4 import NVFP4_TOKENS
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import Routing, RowTokens, Tokens
from tests.support import one_sided_ranks
from tests.support.one_sided_ranks import EXPERTS, TOP_K, context, scaled, there_and_back
from tests.support.worlds import world_of

HIDDEN, TOKENS = 128, 4


class Hasty(OneSidedGpu):
    """Looks at a flag three times: virtual ranks have raised theirs before."""

    looks = 3


def small(comm: Communicator, wire: QuantScheme = FP32) -> TransportContext:
    return replace(context(comm, wire=wire, dtype=FP32, hidden=HIDDEN), max_num_tokens=TOKENS)


def drawn(seed: int, tokens: int) -> tuple[Tensor, Routing]:
    return one_sided_ranks.drawn(seed, tokens, torch.float32, HIDDEN)


@pytest.mark.parametrize("wire", [FP32, BF16, FP8_1x128, INT8_TOKEN, MXFP8, NVFP4_TOKENS], ids=lambda w: w.name)
def test_virtual_ranks_give_the_bits_of_all_to_all(wire: QuantScheme) -> None:
    ranks = 3 if wire is FP32 else 2
    ours, theirs = (
        [make(small(comm, wire)) for comm in LockstepWorld(ranks).communicators()]
        for make in (Hasty, PREPARE_FINALIZE["all_to_all"])
    )
    for call, counts in enumerate([(3, 0, 4), (0, 0, 0), (1, 4, 2)]):
        batches = [drawn(10 * call + rank, counts[rank]) for rank in range(ranks)]
        got, expected = (
            interleave([there_and_back(made[rank], *batches[rank]) for rank in range(ranks)]) for made in (ours, theirs)
        )
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert [len(each._pool.slots) for each in ours] == [1] * ranks


def test_every_place_of_the_window_is_a_row_and_empty_ones_go_nowhere() -> None:
    # Two ranks of four experts. Rank 0 sends token 0 to expert 5 (slot 1 of rank 1); rank 1 nothing at all.
    made = [Hasty(small(comm)) for comm in LockstepWorld(2).communicators()]
    x_TH = torch.full((1, HIDDEN), 3.0)
    routing = Routing(torch.tensor([[5, -1, -1]], dtype=torch.int32), torch.tensor([[2.0, 0.0, 0.0]]))
    nothing = Routing(routing.ids_TK[:0], routing.weights_TK[:0])
    zero, one = interleave([made[0].prepare(x_TH, routing), made[1].prepare(x_TH[:0], nothing)])
    assert isinstance(zero, RowTokens) and isinstance(one, RowTokens) and one.out_RH is not None
    assert zero.x_RH.shape == one.out_RH.shape == (2 * TOKENS, HIDDEN) and bool((zero.ids_RK == -1).all())
    assert one.ids_RK[0].tolist() == [1, -1, -1] and bool((one.ids_RK[1:] == -1).all())
    assert one.weights_RK[0].tolist() == [2.0, 0.0, 0.0] and torch.equal(one.x_RH.values[0], x_TH[0])
    assert (zero.expected_N, one.expected_N) == (2 * 1 * TOP_K / 2, None), "as if every rank had one token; unknown"
    outputs = [scaled(zero, torch.float32), scaled(one, torch.float32)]
    combined, _ = interleave([m.finalize(o, t) for m, o, t in zip(made, outputs, (zero, one), strict=True)])
    assert torch.equal(combined, 2 * x_TH)
    with pytest.raises(CommError, match="finalized before"):
        wait(made[0].finalize(outputs[0], zero))


def test_a_rank_that_stays_away_is_named_by_the_next_call_and_may_be_left_out() -> None:
    made = [Hasty(small(comm)) for comm in LockstepWorld(2).communicators()]
    batch = drawn(1, 3)
    interleave([there_and_back(each, *drawn(rank, 2)) for rank, each in enumerate(made)])
    alone = wait(there_and_back(made[0], *batch))
    with pytest.raises(CommError, match="rank 0, phase 'dispatch', peer 1: epoch 2: raised no flag in time"):
        wait(made[0].prepare(*batch))
    fresh = Hasty(small(LockstepWorld(2).communicators()[0]))
    with pytest.raises(UnsupportedError, match=r"(?s)has no windows yet.*make one call with every rank"):
        fresh.leave_out(torch.tensor([1, 0], dtype=torch.int32))
    wait(there_and_back(fresh, *drawn(1, 0)))  # opens the window, and hears of rank 1
    (buffer,) = fresh._pool.slots
    buffer._seen_2W.zero_()
    fresh.leave_out(torch.tensor([1, 0], dtype=torch.int32))
    buffer._late_2W.zero_()
    for _ in range(2):
        assert torch.equal(wait(there_and_back(fresh, *batch)), alone), "experts of rank 0 alone, and no complaint"
    tokens = wait(fresh.prepare(*batch))
    with pytest.raises(UnsupportedError, match="one more window needs every rank"):
        wait(fresh.prepare(*batch))
    assert isinstance(tokens, RowTokens)
    wait(fresh.finalize(scaled(tokens, torch.float32), tokens))


@pytest.mark.parametrize("value", [TOKENS + 1, 0x7FFFFFFF, -1, -0x80000000])
def test_a_count_beyond_the_window_leaves_its_rows_out_and_is_named_by_the_next_call(value: int) -> None:
    made, flights = sent()
    (buffer,) = made[0]._pool.slots
    buffer.own[FLAG_BYTES : FLAG_BYTES + 4].copy_(torch.tensor([value], dtype=torch.int64).view(torch.uint8)[:4])
    tokens = wait(flights[0])
    assert isinstance(tokens, RowTokens) and bool((tokens.ids_RK[TOKENS:] == -1).all())
    assert bool((tokens.ids_RK[:TOKENS] >= 0).any()), "rows of this rank are there"
    buffer.busy = False
    count = min(value % (1 << 32), 0x7FFFFFFF)
    text = rf"rank 0, phase 'dispatch', peer 1: epoch 1: sent {count} rows into a region of {TOKENS}"
    with pytest.raises(CommError, match=text):
        wait(made[0].prepare(*drawn(0, 2)))


@pytest.mark.parametrize("value", [EXPERTS, 0x7FFFFFFF, -2, -0x80000000])
def test_an_id_of_no_expert_goes_nowhere_and_is_named_by_the_next_call(value: int) -> None:
    made, flights = sent()
    (buffer,) = made[0]._pool.slots
    ids_at = 4 * HIDDEN + 4
    row = buffer.windows.rows(buffer.own)[1, 2]
    row[ids_at : ids_at + 4].copy_(torch.tensor([value], dtype=torch.int32).view(torch.uint8))
    tokens = wait(flights[0])
    assert isinstance(tokens, RowTokens) and int(tokens.ids_RK[TOKENS + 2, 1]) == -1
    assert int(tokens.ids_RK.amin()) == -1 and int(tokens.ids_RK.amax()) < EXPERTS // 2
    buffer.busy = False
    text = rf"rank 0, phase 'dispatch', peer 1: epoch 1: a row is for expert {value}, out of range \(0 <= expert < 8"
    with pytest.raises(CommError, match=text):
        wait(made[0].prepare(*drawn(0, 2)))


def sent() -> tuple[list[Hasty], list[Flight[Tokens]]]:
    """Two ranks that have sent every token to expert 0 of each; nobody has looked yet."""
    made = [Hasty(small(comm)) for comm in LockstepWorld(2).communicators()]
    routing = Routing(torch.tensor([[0, 4, -1]] * TOKENS, dtype=torch.int32), torch.ones((TOKENS, TOP_K)))
    flights = [each.prepare(torch.ones((TOKENS, HIDDEN)), routing) for each in made]
    for flight in flights:
        next(flight)
    return made, flights


def test_what_cannot_be_served_is_refused() -> None:
    comm = LockstepWorld(2).communicators()[0]
    with pytest.raises(UnsupportedError, match="a sum of 8 bytes does not divide into 16"):
        OneSidedGpu(context(comm, hidden=2))
    with pytest.raises(ShapeError, match=r"x has T=5 tokens, a window holds 4"):
        wait(Hasty(small(comm)).prepare(*drawn(0, 5)))


world = world_of(2)


def compared(rank: int) -> list[bool]:
    """Whether several calls between processes are those of all-to-all; the wait really waits here."""
    group = dist.group.WORLD
    assert group is not None
    ours = OneSidedGpu(small(DistributedCommunicator(group), BF16))
    theirs = PREPARE_FINALIZE["all_to_all"](small(DistributedCommunicator(group), BF16))
    batches = [drawn(10 * call + rank, (2, 0)[(call + rank) % 2]) for call in range(2)]
    return [torch.equal(*(wait(there_and_back(each, *batch)) for each in (ours, theirs))) for batch in batches]


def test_processes_give_the_bits_of_all_to_all(world: RankWorld) -> None:
    assert world.call(compared, timeout_s=90.0) == [[True] * 2] * 2
