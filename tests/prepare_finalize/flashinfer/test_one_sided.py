"""FlashInfer's one-sided transport over its emulation: one dispatch by hand, limits, bytes, and peers that fail."""

from __future__ import annotations

import pytest
import torch

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.errors import ConfigError, LibraryMissing, ShapeError, UnsupportedError
from moe_mk.flight import wait
from moe_mk.lab.testing.conformance import check_transport
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import TransportContext
from moe_mk.prepare_finalize.flashinfer.nvlink import NvlinkOneSided, workspace_bytes
from moe_mk.quant import BF16, MXFP8, NVFP4_TOKENS
from moe_mk.quant.fp8_block import FP8_1x128
from moe_mk.quant.plain import FP32
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import Routing
from tests.support.library_ranks import (
    CPU,
    PLACE,
    ROUTINGS,
    Ranks,
    X,
    expect_rounded,
    live_rows,
    problem,
    reported,
    with_top_k,
)

NAME = "nvlink_one_sided"


@pytest.mark.row(77)
def test_each_rank_gets_each_token_once_with_the_slots_that_are_its_own() -> None:
    first, second = Ranks(NAME).dispatched()
    assert live_rows(first) == [
        ((1.0, 2.0), (0, -1), (0.5, 0.0)),  # a, for expert 0
        ((5.0, 6.0), (0, 1), (0.75, 0.125)),  # c, for both: one row
    ]
    assert live_rows(second) == [((1.0, 2.0), (-1, 1), (0.0, 0.25)), ((3.0, 4.0), (0, -1), (1.0, 0.0))]
    assert len(first.x_RH.values) == 2 * 4, "a window of 4 tokens for each rank"
    assert all(bool((t.weights_RK[t.ids_RK < 0] == 0).all()) for t in (first, second)), "padding weighs nothing"


def test_an_id_of_minus_one_sends_nothing_to_rank_0() -> None:
    first, second = Ranks(NAME).dispatched()
    # b has a -1 beside expert 2 of rank 1: it goes there alone. d, all -1, stays on its own rank, and nobody reads it.
    assert sorted(first.x_RH.values[:, 0].nan_to_num(nan=0.0).tolist()) == [0.0] * 5 + [1.0, 5.0, 7.0]
    lonely = Routing(torch.full((1, 2), -1, dtype=torch.int32), torch.zeros(1, 2))
    first, second = Ranks(NAME).dispatched(routings=[ROUTINGS[0], lonely])
    assert 5.0 not in first.x_RH.values[:, 0].tolist() and 5.0 in second.x_RH.values[:, 0].tolist()


def test_sums_return_and_padding_is_never_read() -> None:
    ranks = Ranks(NAME)
    tokens = ranks.dispatched()
    assert all(bool(t.x_RH.values.isnan().any()) for t in tokens), "what no token fills is NaN"
    ranks.expect_sums(tokens)


@pytest.mark.row(77)
@pytest.mark.parametrize("scheme", [FP8_1x128, MXFP8, NVFP4_TOKENS], ids=lambda scheme: scheme.name)
def test_rounded_rows_arrive_bit_for_bit(scheme: QuantScheme) -> None:
    expect_rounded(NAME, scheme)


def test_payloads_go_from_the_widest_element_to_the_narrowest() -> None:
    # Three ranks, one token each: 3 rows of 25 values of one byte before scales of four would break their alignment.
    place = ExpertMap.linear(6, 3)
    ranks, seen = Ranks(NAME, place, hidden=25, wire=FP8_1x128, dtype=BF16, max_num_tokens=1), []
    for transport in ranks.transports:
        exchange = transport._session.pool.slots[0].buffer
        dispatch = exchange.dispatch
        exchange.dispatch = lambda ids, payloads, *more, dispatch=dispatch, **named: (
            seen.append([part.element_size() for part in payloads]),
            dispatch(ids, payloads, *more, **named),
        )[1]
    x = [torch.ones(1, 25, dtype=torch.bfloat16)] * 3
    ranks.dispatched(x, [Routing(torch.tensor([[0, 5]], dtype=torch.int32), torch.ones(1, 2))] * 3)
    assert seen == [[4, 4, 4, 1]] * 3, "scales, ids, weights, values"


@pytest.mark.parametrize("top_k,filled", [(3, 4), (8, 8), (9, 10), (19, 22)])
def test_top_k_is_filled_up_to_one_that_the_kernels_know(top_k: int, filled: int) -> None:
    ranks = Ranks(NAME, ExpertMap.linear(24, 2), top_k=top_k)
    assert [t._top_k for t in ranks.transports] == [filled] * 2
    ids_TK = torch.randperm(24)[None, :top_k].to(torch.int32)
    routings = [Routing(ids_TK, torch.ones(1, top_k))] * 2
    tokens = ranks.dispatched([part[:1] for part in X], routings)
    assert all(t.ids_RK.shape[1] == top_k for t in tokens)
    assert sum(int((t.ids_RK >= 0).sum()) for t in tokens) == 2 * top_k


def test_layers_of_one_size_share_workspaces_and_calls_in_flight_do_not() -> None:
    ranks = Ranks(NAME)

    def workspaces(transport: NvlinkOneSided) -> list[int]:
        twin = NvlinkOneSided(transport.context)
        tokens = [wait(each.prepare(X[0], ROUTINGS[0])) for each in (transport, twin, transport)]
        slots = [t.handle.buffer_slot for t in tokens]  # type: ignore[union-attr]
        assert slots == transport._session.pool.slots == twin._session.pool.slots
        return [id(buffer_slot.buffer.workspace) for buffer_slot in slots]

    assert [len(set(own)) for own in ranks.each(workspaces, ranks.transports)] == [3, 3]


def test_more_tokens_than_the_window_are_refused() -> None:
    ranks = Ranks(NAME)
    with pytest.raises(ShapeError, match=r"T=5 tokens, a window holds 4 .*\[kernel\.max_num_tokens\]"):
        wait(ranks.transports[0].prepare(torch.zeros(5, 2), Routing(torch.zeros(5, 2), torch.zeros(5, 2))))


def test_a_peer_that_never_calls_ends_in_commerror_and_so_does_every_later_call() -> None:
    Ranks(NAME).expect_late(0)


def test_without_the_library_and_without_leave_to_emulate_it_cannot_be_built() -> None:
    comm = LockstepWorld(2).communicators()[0]
    context = TransportContext(comm, PLACE, PLACE.tables(CPU), FP32, FP32, 2, 2, CPU)
    with pytest.raises(LibraryMissing, match=r"(?s)flashinfer.*is not installed.*allow_emulated = true"):
        NvlinkOneSided(context)
    allowed = TransportContext(comm, PLACE, PLACE.tables(CPU), FP32, FP32, 2, 2, CPU, allow_emulated=True)
    with pytest.raises(ConfigError, match="has no group for a communication library"):
        NvlinkOneSided(allowed)


def test_a_version_without_the_class_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("moe_mk.lab.testing.emulated.flashinfer.comm.MoeAlltoAll")
    with pytest.raises(UnsupportedError, match=r"(?s)installed flashinfer.*no flashinfer\.comm\.MoeAlltoAll"):
        Ranks(NAME)


def test_planned_bytes_are_those_of_the_librarys_formula() -> None:
    # H200, EP8, 128 tokens of 7168 bf16, top-8: 29.4 MB.
    #   counters 8 + 64 -> 128, flags 32 -> 128 and 128, routes 128 * 22 * 4 = 11264 and 11264         22,912
    #   1024 windows of 14336 + 8 * 8 out                                                          14,745,600
    #   1024 windows of 14336 back                                                                 14,680,064
    assert workspace_bytes(8, 128, 14400, 14336) == 22_912 + 14_745_600 + 14_680_064
    plan = NvlinkOneSided.plan(problem("h200"))
    assert plan.buffer_bytes == 29_448_576 and plan.reasons == ()
    exchange = (
        Ranks(NAME, hidden=64, dtype=BF16, wire=BF16, max_num_tokens=16).transports[0]._session.pool.slots[0].buffer
    )
    assert exchange.workspace.shape == (2, workspace_bytes(2, 16, 128 + 16, 128))


@pytest.mark.row(77)
def test_every_limit_is_reported() -> None:
    assert reported(NAME, problem("h200")) == {}
    assert reported(NAME, with_top_k(22, "h200")) == {}
    assert reported(NAME, with_top_k(23, "h200"))["top_k"] == "the kernels take 22 experts a token, this router has 23"
    assert "needs all ranks in one node, 32 ranks span 4 nodes" in reported(NAME, problem("h200", ep=32))["fabric"]
    many = reported(NAME, problem("h200", ep=128, num_tokens=16))
    assert set(many) == {"fabric", "ranks"} and "128" in many["ranks"]
    assert set(reported(NAME, problem("mi300x"))) == {"device"}
    assert reported(NAME, problem("h200", deterministic=True))["deterministic"]
    # A rack of 72 in one NVLink domain is one node.
    assert set(reported(NAME, problem("b200", ep=64, num_tokens=16, ranks_per_node=72))) == set()


def test_rows_of_one_number_format_after_the_other_pass_the_kit() -> None:
    assert check_transport(NAME, num_ranks=3, wire=MXFP8, dtype=BF16, hidden_size=64, top_k=1) >= 12
