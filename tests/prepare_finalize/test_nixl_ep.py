"""NIXL EP over its emulation: one call by hand, how ranks meet, and the limits that are its own."""

from __future__ import annotations

import pytest
import torch

from moe_mk import Problem
from moe_mk.errors import CommError
from moe_mk.flight import land
from moe_mk.prepare_finalize.nixl_ep import NixlEP
from moe_mk.quant import FP8_1x128_UE8M0
from tests.prepare_finalize.deepep_ranks import ROUTINGS, XB, asked, ranks_of, small, told
from tests.prepare_finalize.test_deepep_ll import come_home, rows_of_expert

NAME = "nixl_ep"


def test_each_expert_gets_its_tokens_and_sums_come_home() -> None:
    ranks = ranks_of(NAME)
    first, second = ranks.dispatched(XB)
    assert first.counts_L.tolist() == [2, 1] and second.counts_L.tolist() == [1, 1]
    assert rows_of_expert(first, 0) == [[1.0, 2.0], [5.0, 6.0]] and rows_of_expert(second, 1) == [[1.0, 2.0]]
    assert come_home(ranks, [first, second]) == [[[2.5, 5.0], [12.0, 16.0], [0.0, 0.0]], [[5.0, 6.0]]]


def test_ids_are_those_of_the_library_and_every_rank_is_connected() -> None:
    ranks = ranks_of(NAME, FP8_1x128_UE8M0)
    for transport in ranks.transports:
        buffer, status = transport._dispatch._function.__self__, torch.full((2,), 7, dtype=torch.int32)
        buffer.query_mask_buffer(status)
        assert status.tolist() == [0, 0] and buffer.num_experts == 4
    (home, _) = (tokens.handle for tokens in ranks.dispatched(XB))
    assert home.ids_TK.dtype == torch.int32 and len(home.handle) == 4


def test_limits_are_its_own() -> None:
    assert told(NAME, asked()) == {} and told(NAME, asked(num_tokens=1024)) == {}, "no queue pairs to fill"
    assert told(NAME, small(top_k=16)) == {}
    assert "takes 16 experts a token, the router has 17" in told(NAME, small(top_k=17))["top_k"]
    assert NixlEP.dialect.hidden_for(3200) == 3584
    assert NixlEP.buffer_bytes(small(hidden=3200)) == NixlEP.buffer_bytes(small(hidden=3584))
    assert "nixl_ep is not installed" in told(NAME, _without_libraries())["library"]


def _without_libraries() -> Problem:
    problem = asked()
    return Problem(problem.config, problem.device, problem.dtype, problem.num_tokens)


def test_a_late_peer_ends_in_an_error() -> None:
    ranks = ranks_of(NAME)
    ranks.world.timeout_s = 0.2
    with pytest.raises(CommError, match=r"rank 0, phase 'low-latency dispatch', peer 1"):
        land(ranks.transports[0].prepare(XB[0], ROUTINGS[0]))
