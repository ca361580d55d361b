"""The routing trace that comes with the examples: what it is of, that it is whole, and that it is not even."""

from pathlib import Path

from moe_mk.lab.trace.routing import RoutingTrace

FILE = Path(__file__).parents[2] / "examples" / "data" / "tiny_routing.safetensors"


def test_it_is_of_a_grouped_router_on_four_ranks() -> None:
    trace = RoutingTrace.read(FILE)
    facts, loads_XE = trace.facts, trace.loads()
    assert (facts.num_experts, facts.top_k, facts.num_groups, facts.num_ranks) == (32, 4, 4, 4)
    assert trace.layers == [1, 2, 3] and trace.num_rows == 3 * 64 * 128 and FILE.stat().st_size < 300_000
    # Two of four groups are kept, so a token's experts are in two groups of eight.
    assert max(len(set(row)) for row in (trace.ids_RK.numpy() // 8).tolist()) == 2
    # The bias has evened out training; on text it has not seen experts differ, and ranks of eight average that out.
    ranks_XW = loads_XE.reshape(3, 4, 8).sum(2)
    assert loads_XE.sum(1).tolist() == [64 * 128 * 4] * 3 and (loads_XE.max(1) / loads_XE.mean(1) > 1.2).all()
    assert (ranks_XW.max(1) / ranks_XW.mean(1) < 1.2).all()
