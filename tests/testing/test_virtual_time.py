"""Transports under a simulated clock: bytes that they really send, CANN's worked example, mutations that show."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from moe_mk.comm.traffic import Nodes
from moe_mk.errors import ConfigError
from moe_mk.lab.plan.exchange import RowBytes, all_to_all_flow, hierarchical_flow
from moe_mk.lab.plan.timeline import LINKS, Message, simulate
from moe_mk.lab.testing.virtual_time import TRANSPORTS, Recorded, record, uniform_routings
from moe_mk.tokens import Routing
from tests.plan.test_timeline import check_laws

RANKS, NODES, TOKENS, EXPERTS, TOP_K, HIDDEN = 4, 2, 6, 16, 3, 64
ROW = RowBytes(row=HIDDEN * 2 + TOP_K * 8, sum=HIDDEN * 2)


def routings(seed: int = 0) -> list[Routing]:
    return uniform_routings(RANKS, TOKENS, EXPERTS, TOP_K, ranks_per_node=RANKS // NODES, seed=seed)


def recorded(transport: str, seed: int = 0, **more: object) -> Recorded:
    each = {"num_experts": EXPERTS, "ranks_per_node": RANKS // NODES, "hidden_size": HIDDEN} | more
    return record(transport, routings(seed), **each)  # type: ignore[arg-type]


def sent(messages: Sequence[Message]) -> Counter[tuple[str, int, int]]:
    """Bytes by phase and pair; flags are not counted."""
    total: Counter[tuple[str, int, int]] = Counter()
    for m in messages:
        if not m.phase.endswith("flags"):
            total[m.phase, m.source, m.peer] += m.num_bytes
    return total


@pytest.mark.row("N8")
@pytest.mark.parametrize(
    "transport",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("all_to_all_p2p", "all_to_all_v", "all_gather") else name
        for name in TRANSPORTS
    ],
)
def test_a_transport_runs_and_its_timeline_keeps_the_laws(transport: str) -> None:
    again = recorded(transport).recording
    one = recorded(transport)
    for y_TH, routing, rank in zip(one.outputs, routings(), range(RANKS), strict=True):
        draw = torch.Generator("cpu").manual_seed(rank)
        x_TH = torch.randn((TOKENS, HIDDEN), generator=draw).to(torch.bfloat16)
        torch.testing.assert_close(
            y_TH, (x_TH * routing.weights_TK.sum(1, keepdim=True)).to(torch.bfloat16), rtol=0.05, atol=0.02
        )
    for near, far in (("nvlink", "ibgda"), ("nvlink", "ibrc"), ("nvlink", "efa"), ("ascend_hccs", "ascend_rdma")):
        found = simulate(one.recording, LINKS[near], LINKS[far])
        check_laws(found)
        assert simulate(again, LINKS[near], LINKS[far]) == found, "two runs, one timeline"
        assert found.us > 0


@pytest.mark.parametrize("transport", ["all_to_all", "one_sided_network", "hierarchical"])
def test_messages_have_the_bytes_of_the_routing(transport: str) -> None:
    nodes = Nodes.of(RANKS, RANKS // NODES)
    ranks_of_W = [r.ids_TK // (EXPERTS // RANKS) for r in routings(3)]
    flow = (
        hierarchical_flow(ranks_of_W, ROW, nodes) if transport == "hierarchical" else all_to_all_flow(ranks_of_W, ROW)
    )
    found = sent(recorded(transport, seed=3).recording.messages)
    for phase in ("dispatch", "combine", *(("relay", "gather") if transport == "hierarchical" else ())):
        expected = {
            (phase, a, b): int(flow.phases[phase][a, b])
            for a in range(RANKS) for b in range(RANKS) if a != b and flow.phases[phase][a, b]
        }  # fmt: skip
        assert {key: size for key, size in found.items() if key[0] == phase} == expected


def spread(ranks: int, tokens: int) -> list[Routing]:
    """Every token to 4 of 8 nodes, two ranks each, all ranks alike: the case of CANN's worked example."""
    ids_W = [
        [
            [(t + j) % 8 * 8 + (rank + 3 * t + 4 * h + j + t // 8) % 8 for j in range(4) for h in (0, 1)]
            for t in range(tokens)
        ]
        for rank in range(ranks)
    ]  # fmt: skip
    return [Routing(torch.tensor(ids, dtype=torch.int32), torch.full((tokens, 8), 0.125)) for ids in ids_W]


@pytest.mark.slow
@pytest.mark.row(146)
def test_the_algorithms_take_the_times_of_the_worked_example() -> None:
    # 16 tokens of 7168 fp16 values, top-8, on 64 ranks of 8 servers: a full mesh takes 86.1 us over 20.98 GB/s, a relay
    # 38.3 between servers and 8.0 inside. 1/16 of the values and of the rates are the same times.
    slow = {name: dataclasses.replace(LINKS[name], gbs=LINKS[name].gbs / 16) for name in ("ascend_hccs", "ascend_rdma")}
    each = {"num_experts": 64, "hidden_size": 448}
    mesh = simulate(
        record("all_to_all", spread(64, 16), ranks_per_node=1, **each).recording,
        slow["ascend_hccs"],
        slow["ascend_rdma"],
    )
    relay = simulate(
        record("hierarchical", spread(64, 16), ranks_per_node=8, **each).recording,
        slow["ascend_hccs"],
        slow["ascend_rdma"],
    )
    took = {row["phase"]: row["ends_us"] - row["begins_us"] for row in [*mesh.table()][-1:]}
    assert took["combine"] == pytest.approx(86.1, abs=0.2)
    phases = {row["phase"]: row for row in relay.table()}
    assert phases["gather"]["ends_us"] - phases["gather"]["begins_us"] == pytest.approx(8.0, abs=0.2)
    assert phases["combine"]["ends_us"] - phases["combine"]["begins_us"] == pytest.approx(38.3, abs=0.2)
    assert phases["combine"]["ends_us"] - phases["gather"]["begins_us"] == pytest.approx(46.3, abs=0.2)


def test_a_proxy_costs_by_messages_and_a_late_rank_holds_up_all() -> None:
    one = recorded("one_sided_network")
    gpu, proxy = (simulate(one.recording, LINKS["nvlink"], LINKS[name]) for name in ("ibgda", "ibrc"))
    assert proxy.us > gpu.us
    late = simulate(recorded("hierarchical", late_us={2: 500.0}).recording, LINKS["nvlink"], LINKS["ibgda"])
    on_time = simulate(recorded("hierarchical").recording, LINKS["nvlink"], LINKS["ibgda"])
    assert late.us == pytest.approx(on_time.us + 500.0, rel=0.01)
    waits_WW = late.waits()
    assert max(waits_WW[0][2], waits_WW[3][2]) > 400, "rank 0 is of its place, rank 3 of its node"


def test_experts_have_a_time_and_unknown_transports_are_refused() -> None:
    quick, slow = (
        simulate(recorded("all_to_all", experts_us=us).recording, LINKS["nvlink"], LINKS["ibgda"]).us
        for us in (0.0, 70.0)
    )
    assert slow == pytest.approx(quick + 70.0, rel=0.02)
    with pytest.raises(ConfigError, match="'hierarchic' is not recorded; did you mean 'hierarchical'"):
        recorded("hierarchic")
