"""DeepEP V2 over its emulation: groups by hand; counts on the host or not, call by call; limits and bytes."""

import pytest
import torch
from moe_mk_contrib import deepep_v2
from moe_mk_contrib.deepep_v2 import DeepEPElastic, DeepEPElasticGrouped
from torch import Tensor

from moe_mk.flight import wait
from moe_mk.quant import FP32
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage
from tests.support.deepep_ranks import ROUTINGS, XB, asked, ranks_of, small
from tests.support.library_ranks import live_rows, reported

NAME, GROUPED = "deepep_v2", "deepep_v2_grouped"
A, B, C = (1.0, 2.0), (3.0, 4.0), (5.0, 6.0)


def test_the_mode_is_chosen_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(NAME)
    assert [len(t.ids_RK) for t in ranks.dispatched(XB)] == [2, 2], "the host waits for counts"
    with monkeypatch.context() as graph:
        graph.setattr(deepep_v2, "capturing", lambda device: True)
        tokens = ranks.dispatched(XB)
    assert [len(t.ids_RK) for t in tokens] == [2 * 4, 2 * 4], "there is room for the worst"
    for t in tokens:
        assert bool((t.ids_RK[2:] == -1).all()) and bool((t.weights_RK[2:] == 0).all()), "padding is nothing"
        assert bool(t.x_RH.values[2:].isnan().all())
    assert live_rows(tokens[0]) == [(A, (0, -1), (0.5, 0.0)), (C, (0, 1), (0.75, 0.125))]
    first, _ = ranks.combined([t.x_RH.values for t in tokens], tokens)
    assert first.tolist() == [[2.0, 4.0], [3.0, 4.0], [0.0, 0.0]]
    assert [len(t.ids_RK) for t in ranks.dispatched(XB)] == [2, 2]


def groups(tokens: GroupedTokens) -> list[list[tuple[float, ...]]]:
    rows = torch.cat((tokens.x_NH.dequantize(torch.float32), tokens.weights_N[:, None]), dim=1)
    return [sorted(map(tuple, part.tolist())) for part in torch.split(rows, tokens.counts_L.tolist())]


def test_groups_hold_a_row_for_each_assignment_of_each_expert() -> None:
    ranks = ranks_of(GROUPED)
    first, second = ranks.dispatched(XB)
    assert groups(first) == [[(*A, 0.5), (*C, 0.75)], [(*C, 0.125)]]
    assert groups(second) == [[(*B, 1.0)], [(*A, 0.25)]]

    def weighted(tokens: GroupedTokens) -> Tensor:
        return (tokens.x_NH.values.float() * tokens.weights_N[:, None]).bfloat16()

    def combined(transport: DeepEPElasticGrouped, tokens: GroupedTokens) -> list[list[float]]:
        y_TH: Tensor = wait(transport.finalize(ExpertOutput(weighted(tokens), OutputStage.WEIGHTED), tokens))
        return y_TH.tolist()  # type: ignore[no-any-return]

    # a: (0.5 + 0.25) a; b: 1 b; d: nothing; c: (0.75 + 0.125) c
    assert ranks.each(combined, ranks.transports, [first, second]) == [
        [[0.75, 1.5], [3.0, 4.0], [0.0, 0.0]],
        [[4.375, 5.25]],
    ]


def test_nothing_to_send_is_a_call_like_any_other() -> None:
    for name in (NAME, GROUPED):
        ranks = ranks_of(name)
        nothing = [type(r)(r.ids_TK[:0], r.weights_TK[:0]) for r in ROUTINGS]
        first, _ = ranks.dispatched([x[:0] for x in XB], nothing)
        assert len((first.x_NH if isinstance(first, GroupedTokens) else first.x_RH).values) == 0


def test_planned_bytes_follow_ranks_and_tokens_and_not_experts() -> None:
    # A row: 14336, and 8 x 8 + 4 x 9 = 100 bytes of ids rounded up to 128. EP8, 128 tokens: 8 ranks and its own.
    used = 9 * 128 * (14336 + 128)
    assert DeepEPElastic.buffer_bytes(asked()) == -(-used // 2**21) * 2**21 == 8 * 2**21
    assert round(DeepEPElastic.buffer_bytes(asked()) / 2**30, 3) == 0.016
    # EP32: 8 ranks of 4 nodes, its own, and 4 nodes with 1024 tokens of slack.
    used = 14464 * (8 * 4 * 128 + 128 + 4 * (128 + 1024))
    assert DeepEPElastic.buffer_bytes(asked(ep=32)) == -(-used // 2**21) * 2**21
    assert DeepEPElastic.max_rows(asked()) == 8 * 128 and DeepEPElasticGrouped.max_rows(asked()) == 8 * 8 * 128


def test_every_limit_is_reported() -> None:
    assert (
        reported(NAME, asked()) == {} and reported(GROUPED, asked()) == {} and reported(NAME, asked(graphs=True)) == {}
    )
    assert "graphs" in reported(GROUPED, asked(graphs=True))
    assert "takes 32 experts a token, here are 40" in reported(NAME, small(top_k=40))["top_k"]
    assert "takes 256 experts of a rank, here are 320" in reported(NAME, small(experts=640, ep=2))["experts"]
    assert "takes 2048 physical experts, here are 4096" in reported(NAME, small(experts=4096, ep=128))["experts"]
    assert "takes 1024 ranks, here are 2048" in reported(NAME, small(experts=2048, ep=2048))["ranks"]
    assert "carries bf16 rows" in reported(NAME, asked(dtype=FP32))["dtype"]
    assert "deterministic" in reported(NAME, asked(deterministic=True))
