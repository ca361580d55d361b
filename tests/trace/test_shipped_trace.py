"""The routing trace that comes with the examples: what it is of, that it is whole, and that it is not even."""

from pathlib import Path

import numpy as np
import pytest

from moe_mk.lab.trace.routing import RoutingTrace
from moe_mk.placement.expert_map import ExpertMap

FILE = Path(__file__).parents[2] / "examples" / "data" / "tiny_routing.safetensors"


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return RoutingTrace.read(FILE)


def test_it_is_of_a_grouped_router_on_four_ranks(trace: RoutingTrace) -> None:
    facts = trace.facts
    assert (facts.num_experts, facts.top_k, facts.num_groups, facts.num_ranks) == (32, 4, 4, 4)
    assert trace.layers == [1, 2, 3] and trace.num_rows == 3 * 64 * 128
    assert FILE.stat().st_size < 300_000
    # Two of four groups are kept, so a token's experts are in two groups of eight.
    groups_R = np.array([len(set(row)) for row in (trace.ids_RK.numpy() // 8).tolist()])
    assert groups_R.max() == 2


def test_its_layers_load_experts_unevenly_and_ranks_nearly_evenly(trace: RoutingTrace) -> None:
    loads_XE = trace.loads()
    assert loads_XE.sum(1).tolist() == [64 * 128 * 4] * 3
    owner = ExpertMap.linear(32, 4)
    ranks_XW = np.stack([loads_XE[:, list(experts)].sum(1) for experts in owner.experts_of_rank], axis=1)
    # The bias has evened out training; on text it has not seen experts differ, and ranks of eight average that out.
    assert (loads_XE.max(1) / loads_XE.mean(1) > 1.2).all()
    assert (ranks_XW.max(1) / ranks_XW.mean(1) < 1.2).all()
