"""UCCL-EP over its emulation: its limits, and where its wrapper is found."""

from types import ModuleType, SimpleNamespace

import pytest

from moe_mk.lab.testing.emulated import uccl
from moe_mk.prepare_finalize.deepep import high_throughput, low_latency
from moe_mk.prepare_finalize.deepep.low_latency import UcclHighThroughput, UcclLowLatency
from tests.support.deepep_ranks import XB, asked, ranks_of
from tests.support.library_ranks import reported


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
    assert "deep_ep_wrapper" in reported("uccl_ep", asked(installed=()))["library"]
