"""FlashInfer's one-sided transport over its emulation: payloads, limits, bytes, and versions that do not fit."""

import pytest
import torch

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.errors import ConfigError, LibraryMissing, UnsupportedError
from moe_mk.lab.testing.conformance import check_transport
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import TransportContext
from moe_mk.prepare_finalize.flashinfer.nvlink import NvlinkOneSided, workspace_bytes
from moe_mk.quant import BF16, MXFP8
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.plain import FP32
from moe_mk.tokens import Routing
from tests.support.library_ranks import (
    CPU,
    PLACE,
    ROUTINGS,
    Ranks,
    problem,
    reported,
    with_top_k,
)

NAME = "nvlink_one_sided"


def test_an_id_of_minus_one_sends_nothing_to_rank_0() -> None:
    first, second = Ranks(NAME).dispatched()
    # b has a -1 beside expert 2 of rank 1: it goes there alone. d, all -1, stays on its own rank, and nobody reads it.
    assert sorted(first.x_RH.values[:, 0].nan_to_num(nan=0.0).tolist()) == [0.0] * 5 + [1.0, 5.0, 7.0]
    lonely = Routing(torch.full((1, 2), -1, dtype=torch.int32), torch.zeros(1, 2))
    first, second = Ranks(NAME).dispatched(routings=[ROUTINGS[0], lonely])
    assert 5.0 not in first.x_RH.values[:, 0].tolist() and 5.0 in second.x_RH.values[:, 0].tolist()


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
