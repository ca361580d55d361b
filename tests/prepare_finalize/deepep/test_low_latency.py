"""DeepEP low latency over its emulation: two calls in flight, scales, limits, bytes."""

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.flight import wait
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.deepep.low_latency import DeepEPLowLatency
from moe_mk.quant import FP32, FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import ExpertOutput, OutputStage
from tests.support.deepep_ranks import ROUTINGS, XB, asked, ranks_of, small
from tests.support.library_ranks import combine_all, reported, rows_of_expert

NAME = "deepep_ll"


@pytest.mark.parametrize("wire", [FP8_1x128, FP8_1x128_UE8M0], ids=lambda wire: wire.name)
def test_the_kernel_rounds_to_fp8_and_scales_keep_the_order_of_columns(wire: QuantScheme) -> None:
    ranks = ranks_of(NAME, wire, hidden=256)
    x = [torch.randn(len(rows), 256, generator=torch.Generator().manual_seed(1)).bfloat16() for rows in XB]
    first, _ = ranks.dispatched(x)
    expected = wire.quantize(x[1]).dequantize(torch.float32)
    assert rows_of_expert(first, 1) == expected.tolist()
    assert first.x_LSH.values.dtype == torch.float8_e4m3fn and first.x_LSH.scales is not None
    if not wire.ue8m0:
        assert first.x_LSH.scales.shape == (2, 8, 2) and first.x_LSH.scales.stride()[1] == 1, "column-major"


def test_a_hook_that_was_called_may_be_called_again() -> None:
    ranks = ranks_of(NAME)
    hooks = []
    for transport in ranks.transports:
        surface = transport._session.buffer
        call = surface.dispatch

        def watched(needed: object, options: object, call: object = call) -> object:
            *made, hook = call(needed, options)  # type: ignore[operator]
            hooks.append(hook)
            return (*made, hook)

        surface.dispatch = watched
    tokens = ranks.dispatched(XB)
    before = [t.counts_L.tolist() for t in tokens]
    for hook in hooks:
        hook()
    assert [t.counts_L.tolist() for t in tokens] == before == [[2, 1], [1, 1]]


def test_planned_bytes_follow_experts_and_tokens_and_not_ranks() -> None:
    # H=7168, E=256. A message: 16 + 14336 out; 4 x 56 + 14336 = 14560 back.
    # M=128: twice 128 x 256 rows to send and as many to receive, each of 14560; and 2 x 1024 of counts.
    assert DeepEPLowLatency.buffer_bytes(asked()) == 2 * (2 * 32768 * 14560 + 1024) == 1_908_410_368
    assert DeepEPLowLatency.buffer_bytes(asked(ep=32)) == 1_908_410_368
    gib = [DeepEPLowLatency.buffer_bytes(asked(num_tokens=m)) / 2**30 for m in (128, 256, 1024)]
    assert [round(size, 2) for size in gib] == [1.78, 3.55, 14.22]
    assert DeepEPLowLatency.max_rows(asked()) == 32 * 8 * 128  # a slot for every token at every local expert


def test_the_library_itself_asks_for_no_more() -> None:
    ranks = ranks_of(NAME)
    buffer = ranks.transports[0]._session.buffer.buffer
    # Rows of 2 travel as 2048: a message back is 4 x 16 + 4096 = 4160; 4 tokens, 4 experts; 128 bytes of counts.
    assert buffer.num_rdma_bytes == 2 * (2 * 16 * 4160 + 128)


def test_every_limit_is_reported() -> None:
    assert reported(NAME, asked()) == {} and reported(NAME, asked(ep=32)) == {}
    assert "up to 8192, this layer has 8320" in reported(NAME, small(hidden=8320))["hidden"]
    assert "takes 11 experts a token, the router has 12" in reported(NAME, small(top_k=12))["top_k"]
    assert (
        "the requests of 511 tokens a rank, 512 are asked for [kernel.max_num_tokens = 508]"
        in (reported(NAME, asked(num_tokens=512))["tokens"])
    )
    assert reported(NAME, asked(num_tokens=508)) == {}
    assert "up to 8 ranks or a multiple, the group has 12" in reported(NAME, small(experts=60, ep=12))["ranks"]
    assert reported(NAME, small(experts=60)) == {}, "ranks may hold 7 or 8"
    assert "carries bf16 rows, this layer computes in fp32" in reported(NAME, asked(dtype=FP32))["dtype"]
    narrow = {"weights": "fp8_block", "block": (64, 64)}
    assert "groups of 1x128, not fp8_1x64 [kernel.wire = plain]" in reported(NAME, small(quant=narrow))["wire"]
    assert reported(NAME, small(quant=narrow, wire="plain")) == {}
    assert "deterministic" in reported(NAME, asked(deterministic=True)) and reported(NAME, asked(graphs=True)) == {}


@pytest.mark.row(43)
def test_all_prerequisites_that_are_missing_are_reported_at_once() -> None:
    problem = asked(num_tokens=1024, device="b200", ep=12, dtype=FP32, deterministic=True)
    bare = type(problem)(problem.config, problem.device, problem.dtype, problem.num_tokens)
    assert set(reported(NAME, bare)) == {"library", "deterministic", "ranks", "dtype", "tokens"}
    assert "pip install sgl-deep-ep" in reported(NAME, bare)["library"]


def test_rows_that_are_too_long_are_refused_when_it_is_built() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)rows of 9000 cannot travel.*8192"):
        ranks_of(NAME, hidden=9000)


def test_an_idle_rank_makes_the_same_calls() -> None:
    ranks = ranks_of(NAME)
    nobody = [ROUTINGS[0], type(ROUTINGS[1])(ROUTINGS[1].ids_TK[:0], ROUTINGS[1].weights_TK[:0])]
    tokens = ranks.dispatched([XB[0], XB[1][:0]], nobody)
    assert [t.counts_L.tolist() for t in tokens] == [[1, 0], [1, 1]]
    assert combine_all(ranks, tokens)[1] == []


def test_ranks_may_hold_different_numbers_of_experts() -> None:
    ranks = ranks_of(NAME, place=ExpertMap(((0,), (1, 2, 3)), 4))  # three numbers a rank, two of them nobody's
    tokens = ranks.dispatched(XB)
    assert [t.counts_L.tolist() for t in tokens] == [[2], [1, 1, 1]]
    assert rows_of_expert(tokens[0], 0) == [[1.0, 2.0], [5.0, 6.0]], "a and c"
    assert [rows_of_expert(tokens[1], slot) for slot in range(3)] == [[[5.0, 6.0]], [[3.0, 4.0]], [[1.0, 2.0]]]
    y = [t.x_LSH.values * 10.0**rank for rank, t in enumerate(tokens)]
    outputs = [ExpertOutput(y_LSH, OutputStage.RAW) for y_LSH in y]
    combined = ranks.each(lambda t, out, got: wait(t.finalize(out, got)).tolist(), ranks.transports, outputs, tokens)
    # a: (0.5 + 0.25 x 10) a; b: 10 b; d: nothing; c: (0.75 + 0.125 x 10) c
    assert combined == [[[3.0, 6.0], [30.0, 40.0], [0.0, 0.0]], [[10.0, 12.0]]]


def test_hidden_rows_are_padded_to_the_next_length_the_kernels_know() -> None:
    lengths = [DeepEPLowLatency.hidden_for(h) for h in (1, 2048, 2049, 2880, 7168, 8193)]
    assert lengths == [2048, 2048, 2560, 3072, 7168, None]
