"""One-sided dispatch and combine between ranks of one process: by hand, its slots and limits, what the oracle hears."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from moe_mk.comm import LockstepWorld, SingleRank
from moe_mk.errors import CommError, ShapeError, UnsupportedError
from moe_mk.flight import Flight, interleave, wait
from moe_mk.kernels.native import exchange
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.prepare_finalize.one_sided.buffers import OneSidedBufferPool, RegionShape
from moe_mk.prepare_finalize.one_sided.transport import OneSided
from moe_mk.runner import prepare_async
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens
from tests.support import problems
from tests.support.one_sided_ranks import HIDDEN, context, drawn, scaled, there_and_back


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
    combined, empty = interleave(finals)
    # [1, 2] * 2 and [3, 4] * (1 + 10)
    assert combined.tolist() == [[2.0, 4.0], [33.0, 44.0]] and empty.shape == (0, 2)
    # Two rows of 2 values (8 B), 2 ids and 2 weights (16 B) leave rank 0; two sums of 8 B leave rank 1.
    traffic = [dict(transport.context.comm.traffic.bytes_by_phase) for transport in made]
    assert traffic[0] == {"dispatch": 48, "dispatch flags": 8, "combine": 0, "combine flags": 8}
    assert traffic[1] == {"dispatch": 0, "dispatch flags": 8, "combine": 16, "combine flags": 8}


def test_more_tokens_than_a_window_holds_are_refused_before_anything_moves() -> None:
    made = [OneSided(replace(context(c), max_num_tokens=6)) for c in LockstepWorld(2).communicators()]
    with pytest.raises(ShapeError, match=r"x has T=7 tokens, a window holds 6 .*\[kernel.max_num_tokens\]"):
        wait(made[0].prepare(*drawn(0, 7, torch.float32)))
    assert not made[0]._pool.slots
    everywhere = Routing(torch.tensor([[0, 4, 7]] * 6, dtype=torch.int32), torch.ones((6, 3)))
    combined = interleave([there_and_back(transport, torch.ones((6, HIDDEN)), everywhere) for transport in made])
    assert all(torch.equal(y_TH, torch.full((6, HIDDEN), 3.0)) for y_TH in combined), "a full window is full, not over"


def test_groups_and_devices_that_share_no_memory_are_refused() -> None:
    alone = context(SingleRank())
    with pytest.raises(UnsupportedError, match="a SingleRank joins neither processes nor virtual ranks"):
        OneSided(alone)
    with pytest.raises(UnsupportedError, match="runs on cpu, this device is meta"):
        OneSided(replace(context(LockstepWorld(2).communicators()[0]), device=torch.device("meta")))


def test_calls_that_are_never_finalized_end_in_an_error() -> None:
    comm = LockstepWorld(2).communicators()[0]
    slots = OneSidedBufferPool.of(comm, RegionShape(1, 4, 4, 4))
    for _ in range(OneSidedBufferPool.MAX_OPEN_CALLS):
        slots.take(comm)
    with pytest.raises(CommError, match="rank 0, phase 'dispatch': 16 calls were prepared and not finalized"):
        slots.take(comm)


def test_a_call_is_finalized_once() -> None:
    made, finals, (zero, _) = two_tokens_by_hand()
    interleave(finals)
    with pytest.raises(CommError, match="rank 0, phase 'combine': epoch 1 was finalized before"):
        wait(made[0].finalize(scaled(zero, torch.float32), zero))


def test_windows_opened_in_inference_mode_are_written_outside_of_it() -> None:
    made = [OneSided(context(comm)) for comm in LockstepWorld(2).communicators()]
    batches = [drawn(rank, 5, torch.float32) for rank in range(2)]
    with torch.inference_mode():
        inside = interleave([there_and_back(m, *batch) for m, batch in zip(made, batches, strict=True)])
    tokens = interleave([m.prepare(*batch) for m, batch in zip(made, batches, strict=True)])
    for each in tokens:
        assert isinstance(each, RowTokens) and each.out_RH is not None
        each.out_RH.copy_(scaled(each, torch.float32).y)
    flights = [
        m.finalize(ExpertOutput(each.out_RH, OutputStage.REDUCED), each)
        for m, each in zip(made, tokens, strict=True)
        if isinstance(each, RowTokens) and each.out_RH is not None
    ]
    assert all(torch.equal(y_TH, again_TH) for y_TH, again_TH in zip(inside, interleave(flights), strict=True))


def test_rows_stay_until_their_call_is_finalized_whatever_other_calls_do() -> None:
    made = [OneSided(context(comm)) for comm in LockstepWorld(2).communicators()]
    halves = [prepare_async(made[rank], *drawn(rank, 6, torch.float32)) for rank in range(2)]
    tokens = [each for half in halves if isinstance(each := half.receive(), RowTokens)]
    before = [each.x_RH.values.clone() for each in tokens]
    for seed in (9, 19):
        interleave([there_and_back(made[rank], *drawn(seed + rank, 6, torch.float32)) for rank in range(2)])
    assert all(torch.equal(each.x_RH.values, rows) for each, rows in zip(tokens, before, strict=True))
    outputs = [scaled(each, torch.float32) for each in tokens]
    combined = interleave([t.finalize(o, each) for t, o, each in zip(made, outputs, tokens, strict=True)])
    again = interleave([there_and_back(made[rank], *drawn(rank, 6, torch.float32)) for rank in range(2)])
    assert all(torch.equal(one, other) for one, other in zip(combined, again, strict=True))


problem = partial(problems.problem, "tiny", max_num_tokens=64)


def test_the_oracle_is_reported_where_it_runs_and_that_it_is_cheaper_there() -> None:
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


@pytest.mark.parametrize("by_kernels", [True, False])
def test_a_failure_in_the_next_call_leaves_a_complete_call_to_peers_that_read_late(
    by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_kernels:
        monkeypatch.setattr(exchange, "ready", lambda: None)
    made = [OneSided(context(comm)) for comm in LockstepWorld(2).communicators()]
    batches = [drawn(rank, 5, torch.float32) for rank in range(2)]
    expected = interleave([there_and_back(m, *batch) for m, batch in zip(made, batches, strict=True)])
    tokens = interleave([m.prepare(*batch) for m, batch in zip(made, batches, strict=True)])
    late, ahead = (m.finalize(scaled(t, torch.float32), t) for m, t in zip(made, tokens, strict=True))
    next(late), next(ahead)  # both have signalled their sums
    assert torch.equal(wait(ahead), expected[1])
    made[1].context.comm.fail(MemoryError("in the next call"))
    assert torch.equal(wait(late), expected[0]), "all of this call has come"
    made[0].context.comm.status.failure = None  # between processes each rank has its own
    with pytest.raises(CommError, match=r"rank 0, phase 'dispatch', peer 1: its call failed: MemoryError: in the next"):
        wait(made[0].prepare(*batches[0]))
