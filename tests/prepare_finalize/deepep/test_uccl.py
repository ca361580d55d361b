"""UCCL-EP over its emulation: both halves by hand, and where its wrapper is found."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from moe_mk.lab.testing.emulated import uccl
from moe_mk.prepare_finalize.deepep import high_throughput, low_latency
from moe_mk.prepare_finalize.deepep.low_latency import UcclHighThroughput, UcclLowLatency
from tests.prepare_finalize.deepep.test_low_latency import combine_all, rows_of_expert
from tests.support.deepep_ranks import XB, asked, ranks_of
from tests.support.library_ranks import live_rows, reported


@pytest.mark.row(160)
def test_low_latency_and_normal_kernels_answer_to_the_calls_of_deep_ep() -> None:
    ranks = ranks_of("uccl_ep")
    first, second = ranks.dispatched(XB)
    assert rows_of_expert(first, 0) == [[1.0, 2.0], [5.0, 6.0]] and rows_of_expert(second, 1) == [[1.0, 2.0]]
    assert combine_all(ranks, [first, second]) == [[[2.5, 5.0], [12.0, 16.0], [0.0, 0.0]], [[5.0, 6.0]]]
    ranks = ranks_of("uccl_ep_ht")
    tokens = ranks.dispatched(XB)
    assert live_rows(tokens[0]) == [((1.0, 2.0), (0, -1), (0.5, 0.0)), ((5.0, 6.0), (0, 1), (0.75, 0.125))]
    first_TH, second_TH = ranks.combined([10.0**rank * t.x_RH.values for rank, t in enumerate(tokens)], tokens)
    assert first_TH.tolist() == [[11.0, 22.0], [30.0, 40.0], [0.0, 0.0]] and second_TH.tolist() == [[5.0, 6.0]]


@pytest.mark.parametrize("name,module", [("uccl_ep", low_latency), ("uccl_ep_ht", high_throughput)])
def test_the_wrapper_goes_by_the_name_of_what_it_stands_in_for(
    name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought = []
    monkeypatch.setattr(module, "load", lambda library, allow_emulated: SimpleNamespace(ep=None))
    monkeypatch.setattr(module, "find", lambda library: (sought.append(library), uccl)[1])
    assert len(ranks_of(name).dispatched(XB)) == 2 and set(sought) == {"deep_ep"}


def test_limits_and_bytes_are_those_of_deep_ep() -> None:
    assert reported("uccl_ep", asked()) == {} and reported("uccl_ep_ht", asked(ep=32)) == {}
    assert "511 tokens a rank" in reported("uccl_ep", asked(num_tokens=1024))["tokens"]
    assert UcclLowLatency.buffer_bytes(asked()) == 1_908_410_368
    assert UcclHighThroughput.buffer_bytes(asked()) == 335_709_824
    bare = type(asked())(asked().config, asked().device, asked().dtype, 128)
    assert "deep_ep_wrapper" in reported("uccl_ep", bare)["library"]
