"""A routing trace as an object: its table, its loads, replay, and the nodes its tokens reach."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.lab.trace.routing import RoutingTrace, TracedForward, TraceError, TraceFacts
from moe_mk.placement.eplb import Topology, plan, slot_loads
from moe_mk.placement.expert_map import ExpertMap
from tests.support.routing_cases import by_hand, drawn, equal, group_limited


def test_loads_by_hand() -> None:
    trace = by_hand()
    assert (trace.num_forwards, trace.num_rows, trace.layers, trace.steps) == (6, 7, [3, 5], [0, 1])
    # Layer 3: experts 0 1, 0 3, 2, 0 2.   Layer 5: 3 2, 3 1, 3 0.   The -1 counts for no expert.
    assert trace.loads().tolist() == [[3, 1, 2, 1], [1, 1, 1, 3]]
    assert trace.windows(2).tolist() == [[[2, 1, 1, 1], [1, 1, 1, 3]], [[1, 0, 1, 0], [0, 0, 0, 0]]]
    assert trace.windows(9).shape == (2, 2, 4)  # two steps make no more than two windows
    with pytest.raises(ShapeError, match="count=0 windows"):
        trace.windows(0)


def test_forwards_come_back_as_they_were_put_in() -> None:
    trace = by_hand()
    back = list(trace.forwards())
    assert [(f.step, f.layer, f.rank, f.phase, len(f.ids_TK)) for f in back] == [
        (0, 3, 0, "prefill", 2), (0, 3, 1, "prefill", 1), (0, 5, 0, "prefill", 2),
        (0, 5, 1, "prefill", 1), (1, 3, 0, "decode", 1), (1, 3, 1, "decode", 0),
    ]  # fmt: skip
    assert back[1].ids_TK.tolist() == [[2, -1]] and back[1].token_ids_T.tolist() == [100]
    assert equal(RoutingTrace.of(trace.facts, back), trace)


def test_filters_meet_every_condition() -> None:
    trace = by_hand()
    assert [f.rank for f in trace.filter(layers=[3]).forwards()] == [0, 1, 0, 1]
    assert trace.filter(layers=[3], phase="prefill", ranks=[1]).ids_RK.tolist() == [[2, -1]]
    assert trace.filter(steps=[1]).tokens_X.tolist() == [1, 0]
    empty = trace.filter(layers=[99])
    assert empty.num_forwards == empty.num_rows == 0 and empty.loads().shape == (0, 4)
    with pytest.raises(ConfigError, match="did you mean 'decode'"):
        trace.filter(phase="decod")  # type: ignore[arg-type]


def test_joined_parts_are_the_whole() -> None:
    trace = by_hand()
    parts = [trace.filter(steps=[step]) for step in trace.steps]
    assert equal(RoutingTrace.concat(parts), trace)
    with pytest.raises(TraceError, match="no traces to join"):
        RoutingTrace.concat([])
    with pytest.raises(TraceError, match="they are of 2 kinds.*1 of 2 have weights_RK; leave it out of the others"):
        RoutingTrace.concat([trace, drawn(16, 2).without(weights=True)])
    for name, left_out in (("weights_RK", {"weights": True}), ("token_ids_R", {"token_ids": True})):
        for mixed in ([trace, trace.without(**left_out)], [trace.without(**left_out), trace, trace]):
            with pytest.raises(TraceError, match=rf"joined: \d of {len(mixed)} have {name}"):
                RoutingTrace.concat(mixed)


@pytest.mark.row(9)
def test_a_router_repeats_what_was_recorded() -> None:
    trace = by_hand()
    router = trace.router(layer=3, rank=0)
    first = router(torch.zeros(2, 4))
    assert first.ids_TK.tolist() == [[0, 1], [0, 3]] and first.ids_TK.dtype == torch.int32
    assert first.weights_TK.tolist() == [[0.625, 0.375]] * 2
    with pytest.raises(TraceError, match="forward 1 of layer 3 on rank 0 had 1 tokens, now come 5"):
        router(torch.zeros(5, 4))
    assert router(torch.zeros(1, 4)).ids_TK.tolist() == [[0, 2]] and router.position == 2
    with pytest.raises(TraceError, match="holds 2 forwards of layer 3 on rank 0, and all of them were replayed"):
        router(torch.zeros(1, 4))


def test_without_weights_all_experts_of_a_token_count_alike() -> None:
    one = TracedForward(0, 0, 0, "prefill", torch.tensor([[2, 0, -1], [-1, -1, -1]]))
    assert one.routing().weights_TK.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


# Nodes: 2 nodes of one GPU with 3 slots each. Node 0 holds experts 0 1 2, node 1 holds 2 3 0, copies take halves.
PLACED = ExpertMap(((0, 1, 2), (2, 3, 0)), 4)


def test_nodes_by_hand() -> None:
    trace = by_hand().filter(layers=[3], phase="prefill")
    # Near first: rank 0 has 0, 1, 2 itself, rank 1 has 2 itself. Token (0 1) of rank 0 stays, (0 3) of rank 0 goes to
    # node 1 for 3, (2) of rank 1 stays: nodes 1 + 2 + 1, remote 0 + 1 + 0, over three tokens.
    found = trace.nodes_per_token(PLACED, Topology(2, 2, 3))
    assert (found.all, found.remote) == pytest.approx((4 / 3, 1 / 3))
    # By share alone: (0 1): 0 is on node 0 or 1, 1 on node 0 -> nodes 1.5, remote .5. (0 3): 1.5, remote 1.
    # (2) of rank 1: 1 node, remote .5.
    found = trace.nodes_per_token(PLACED, Topology(2, 2, 3), choice="share")
    assert (found.all, found.remote) == pytest.approx((4 / 3, 2 / 3))


def test_tokens_of_fewer_ranks_are_dealt_out_to_the_gpus() -> None:
    # One recorded rank, two GPUs: token t belongs to GPU t mod 2. Expert 1 is on node 0, expert 3 on node 1.
    ids = torch.tensor([[1], [1], [3], [3]])
    trace = RoutingTrace.of(TraceFacts(4, 1), [TracedForward(0, 0, 0, "decode", ids)])
    assert trace.nodes_per_token(PLACED, Topology(2, 2, 3)).remote == pytest.approx(0.5)
    # Of each forward anew, from the GPU of its rank number on: 1 on 0 (near), 3 on 0 (far).
    apart = [TracedForward(0, 0, 0, "decode", ids[:1]), TracedForward(1, 0, 0, "decode", ids[3:])]
    found = RoutingTrace.of(TraceFacts(4, 1), apart).nodes_per_token(PLACED, Topology(2, 2, 3))
    assert found.remote == pytest.approx(0.5)
    # With GPU 1 dead all tokens belong to GPU 0, which holds expert 1; expert 3 is nowhere.
    placed = plan(trace.loads() + 1, Topology(2, 2, 4, alive=(True, False)))
    alone = trace.nodes_per_token(placed, Topology(2, 2, 4, alive=(True, False)))
    assert (alone.all, alone.remote) == (1.0, 0.0)
    # Those that two ranks recorded as well.
    two = replace(trace, facts=TraceFacts(4, 1, num_ranks=2), rank_X=torch.tensor([1]))
    assert two.nodes_per_token(placed, Topology(2, 2, 4, alive=(True, False))).remote == 0.0


def test_nodes_equal_what_a_layers_tables_choose() -> None:
    """The expectation against the hash that layers really use, over many tokens of every rank."""
    draw = torch.Generator().manual_seed(3)
    ranks, nodes, experts, tokens = 4, 2, 8, 4096
    placed = plan(torch.rand(1, experts, generator=draw) ** 3, Topology(ranks, nodes, 3), policy="flat")
    slots = [tuple(placed.phy2log[0][3 * r : 3 * r + 3].tolist()) for r in range(ranks)]
    expert_map = ExpertMap(tuple(slots), experts, tuple(placed.share[0].tolist()))
    ids = [torch.rand(tokens, experts, generator=draw).topk(2).indices for _ in range(ranks)]
    trace = RoutingTrace.of(
        TraceFacts(experts, 2, num_ranks=ranks), [TracedForward(0, 0, r, "prefill", ids[r]) for r in range(ranks)]
    )
    remote = 0
    for rank in range(ranks):
        tables = expert_map.tables(torch.device("cpu"), rank, ranks // nodes)
        node_TK = tables.rank_of_P[tables.to_physical(ids[rank], rank).long()] // (ranks // nodes)
        remote += int((node_TK != rank // (ranks // nodes)).any(1).sum())
    found = trace.nodes_per_token(expert_map, Topology(ranks, nodes, 3)).remote
    assert found == pytest.approx(remote / (ranks * tokens), abs=0.01)
    assert found == pytest.approx(trace.nodes_per_token(placed, Topology(ranks, nodes, 3)).remote)


@pytest.mark.row(134)
def test_groups_at_home_reach_fewer_nodes_than_groups_anywhere() -> None:
    """8 groups on 5 nodes: they do not divide, so that the compatible policy spreads each over all nodes."""
    trace = group_limited(experts=256, groups=8, kept=4, top_k=8, layers=2, steps=2, tokens=600)
    topology, (past, future) = Topology(40, 5, 8), (trace.filter(steps=[step]) for step in range(2))
    mixed = plan(past.loads(), topology, groups=8, policy="hybrid")
    anywhere = plan(past.loads(), topology, groups=8, policy="compat")
    remote = [future.nodes_per_token(each, topology).remote for each in (mixed, anywhere)]
    assert remote[0] < 0.95 * remote[1]
    load = torch.from_numpy(future.loads())
    even = [float((slot_loads(each, load).reshape(2, 40, 8).sum(2)).max(1).mean()) for each in (mixed, anywhere)]
    assert even[0] <= even[1] * 1.05  # the busiest GPU is at most 5 % busier


@pytest.mark.row(121)
def test_groups_that_stay_whole_on_a_node_bound_the_nodes_of_a_token() -> None:
    # Two of four groups a token, one group a node: two nodes, and one of them may be its own.
    trace = group_limited(experts=64, groups=4, kept=2, top_k=4, layers=2, steps=1, tokens=500)
    topology = Topology(8, 4, 10)
    combined = trace.nodes_per_token(plan(trace.loads(), topology, groups=4, policy="compat"), topology)
    assert 1.0 < combined.remote < combined.all <= 2.0
    assert trace.nodes_per_token(plan(trace.loads(), topology, policy="flat"), topology).all > 2.0


def test_a_placement_of_other_sizes_is_refused() -> None:
    trace = by_hand()
    with pytest.raises(ShapeError, match=r"shape \(2, 6\), trace and topology need \[layers, slots\] = \(2, 8\)"):
        trace.nodes_per_token(PLACED, Topology(2, 2, 4))
    with pytest.raises(ShapeError, match="names expert 7, the trace has 4"):
        trace.nodes_per_token(plan(np.ones((2, 8)), Topology(2, 1, 4)), Topology(2, 1, 4))
    with pytest.raises(ConfigError, match=r"choice='nearest' is unknown.*near"):
        trace.nodes_per_token(PLACED, Topology(2, 2, 3), choice="nearest")  # type: ignore[arg-type]


def test_what_makes_no_sense_is_refused_with_all_reasons() -> None:
    ids = torch.tensor([[0, 4]])
    with pytest.raises(TraceError, match=r"ids_RK holds 0 to 4, outside \[-1, 4\); rank_X holds 3 to 3, outside"):
        RoutingTrace.of(TraceFacts(4, 2), [TracedForward(0, 0, 3, "prefill", ids)])
    with pytest.raises(TraceError, match=r"rows of \[\(2,\)\], the facts say top_k=3"):
        RoutingTrace.of(TraceFacts(8, 3), [TracedForward(0, 0, 0, "prefill", ids)])
    with pytest.raises(TraceError, match="top_k=5 is above num_experts=4"):
        RoutingTrace.of(TraceFacts(4, 5), [])
    with pytest.raises(TraceError, match="1 of 2 forwards have weights"):
        RoutingTrace.of(
            TraceFacts(8, 2),
            [TracedForward(0, 0, 0, "prefill", ids, torch.ones(1, 2)), TracedForward(0, 0, 0, "prefill", ids)],
        )
    with pytest.raises(TraceError, match="expert ids from 0 to 70000 do not fit torch.int16"):
        RoutingTrace.of(TraceFacts(8, 2), [TracedForward(0, 0, 0, "prefill", torch.tensor([[0, 70_000]]))])
