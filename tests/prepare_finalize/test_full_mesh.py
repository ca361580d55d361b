"""One message to each rank: whatever its tokens and their experts, a rank signals each peer once."""

import pytest
import torch

from moe_mk.comm import LockstepWorld
from moe_mk.comm.symmetric.flags import WORD_BYTES
from moe_mk.flight import interleave
from moe_mk.kernels.native import exchange
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import TransportContext
from moe_mk.prepare_finalize.one_sided.transport import OneSided
from moe_mk.quant import BF16
from moe_mk.tokens import ExpertOutput, OutputStage, RowTokens
from tests.support.library_layers import batch

CPU, HIDDEN, EXPERTS, TOP_K, MOST = torch.device("cpu"), 8, 8, 2, 64


@pytest.mark.row(143)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_dispatch_is_one_flag_to_each_other_rank_behind_all_rows_for_it(ranks: int) -> None:
    place, comms = ExpertMap.linear(EXPERTS, ranks), LockstepWorld(ranks).communicators()
    made = [
        OneSided(TransportContext(c, place, place.tables(CPU), BF16, BF16, HIDDEN, TOP_K, CPU, max_num_tokens=MOST))
        for c in comms
    ]
    for seed, most in enumerate((0, 1, MOST, MOST)):
        given = [batch(10 * seed + rank, HIDDEN, most) for rank in range(ranks)]
        for comm in comms:
            comm.traffic.reset()
        tokens = interleave([transport.prepare(*own) for transport, own in zip(made, given, strict=True)])
        for rank, comm in enumerate(comms):
            flags = comm.traffic.bytes_by_peer["dispatch flags"]
            assert flags == {peer: WORD_BYTES * (peer != rank) for peer in range(ranks)}, "N - 1 messages"
            assert comm.traffic.calls_by_phase["dispatch"] == comm.traffic.calls_by_phase["dispatch flags"] == 1
            # All experts of a rank share the message: a token is in it once, whichever of them it visits.
            ranks_TK = place.tables(CPU).rank_of_P[given[rank][1].ids_TK.clamp_min(0).long()]
            ranks_TK = torch.where(given[rank][1].ids_TK >= 0, ranks_TK, -1)
            row = 2 * HIDDEN + TOP_K * 8
            visits_W = [int((ranks_TK == peer).any(dim=1).sum()) for peer in range(ranks)]
            visits_W[rank] = 0
            assert comm.traffic.bytes_by_peer["dispatch"] == {p: row * count for p, count in enumerate(visits_W)}
        interleave([t.finalize(_sums(got), got) for t, got in zip(made, tokens, strict=True)])


@pytest.mark.row(55, 143, "N17")
def test_windows_count_the_bytes_that_a_dispatch_and_a_combine_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ready", lambda: None)  # rows are put by the heap, which counts each operation
    place, comms = ExpertMap.linear(EXPERTS, 4), LockstepWorld(4).communicators()
    made = [
        OneSided(TransportContext(c, place, place.tables(CPU), BF16, BF16, HIDDEN, TOP_K, CPU, max_num_tokens=MOST))
        for c in comms
    ]
    for seed in range(3):
        given = [batch(10 * seed + rank, HIDDEN, MOST) for rank in range(4)]
        for comm in comms:
            comm.traffic.reset()
        tokens = interleave([transport.prepare(*own) for transport, own in zip(made, given, strict=True)])
        for rank, (comm, got) in enumerate(zip(comms, tokens, strict=True)):
            heap = got.handle.buffer.heap
            put = {peer: heap.traffic.bytes_by_peer["put"][peer] for peer in range(4) if peer != rank}
            assert put == {peer: comm.traffic.bytes_by_peer["dispatch"][peer] for peer in put} and sum(put.values())
            heap.traffic.reset()
        interleave([t.finalize(_sums(got), got) for t, got in zip(made, tokens, strict=True)])
        for got in tokens:
            assert got.handle.buffer.heap.traffic.bytes_by_peer["put"].total() == 0, "sums are read where they are"
            got.handle.buffer.heap.traffic.reset()


def _sums(tokens: object) -> ExpertOutput:
    assert isinstance(tokens, RowTokens)
    return ExpertOutput(tokens.x_RH.values, OutputStage.REDUCED)
