"""Two-level dispatch and combine: by hand, on hostile routings, byte for byte against the model, and in processes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import Communicator, DistributedCommunicator, LockstepWorld, Nodes
from moe_mk.config import load_config
from moe_mk.config.problem import Problem
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.flight import interleave, wait
from moe_mk.lab.plan.exchange import Flow, RowBytes, all_gather_flow, all_to_all_flow, hierarchical_flow, one_sided_flow
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.lab.testing.conformance import check_transport
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.oracle import cost
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.prepare_finalize.hierarchical import Hierarchical
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant import BF16, FP32
from moe_mk.quant.fp8 import FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import row_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens
from tests.support import problems
from tests.support.layers import HIDDEN as LAYER_HIDDEN
from tests.support.layers import layer
from tests.support.one_sided_ranks import there_and_back
from tests.support.worlds import world_of

CPU, HIDDEN, EXPERTS, TOP_K = torch.device("cpu"), 256, 16, 3
COMPARED = ("all_to_all", "all_gather", "one_sided", "hierarchical")


def context(
    comm: Communicator, expert_map: ExpertMap, per_node: int | None, wire: QuantScheme = FP32, dtype: Plain = FP32,
    hidden: int = HIDDEN, top_k: int = TOP_K,
) -> TransportContext:  # fmt: skip
    return TransportContext(
        comm, expert_map, expert_map.tables(CPU), wire, dtype, hidden, top_k, CPU, ranks_per_node=per_node
    )


def test_rows_relays_and_sums_by_hand() -> None:
    # Four ranks of one expert, two nodes of two. Rank 0 has tokens a -> 0, 2, 3 (weights 1, 2, 4) and b -> 1 (weight
    # 8); rank 3 has c -> 1 (weight 16). Rank 2 relays a inside node 1, rank 1 relays c inside node 0.
    expert_map = ExpertMap.linear(4, 4)
    made = [Hierarchical(context(c, expert_map, 2, hidden=1)) for c in LockstepWorld(4).communicators()]
    a_b = Routing(
        torch.tensor([[0, 2, 3], [1, -1, -1]], dtype=torch.int32), torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, 0.0]])
    )
    c_ = Routing(torch.tensor([[1, -1, -1]], dtype=torch.int32), torch.tensor([[16.0, 0.0, 0.0]]))
    none = Routing(a_b.ids_TK[:0], a_b.weights_TK[:0])
    x = [torch.tensor([[1.0], [10.0]]), torch.empty(0, 1), torch.empty(0, 1), torch.tensor([[100.0]])]
    routings = [a_b, none, none, c_]
    tokens = interleave([m.prepare(*given) for m, *given in zip(made, x, routings, strict=True)])
    rows = [each for each in tokens if isinstance(each, RowTokens)]
    assert [each.x_RH.values.flatten().tolist() for each in rows] == [[1.0], [10.0, 100.0], [1.0], [1.0]]
    assert [each.weights_RK.sum(dim=1).tolist() for each in rows] == [[1.0], [8.0, 16.0], [2.0], [4.0]]
    outputs = [
        ExpertOutput(each.x_RH.values * each.weights_RK.sum(dim=1)[:, None], OutputStage.REDUCED) for each in rows
    ]
    combined = interleave([m.finalize(o, t) for m, o, t in zip(made, outputs, rows, strict=True)])
    assert [y.flatten().tolist() for y in combined] == [[7.0, 80.0], [], [], [1600.0]]
    # Token a crossed once (4 B of value, 3 ids and 3 weights) where the flat way crosses twice; one sum came back.
    nodes, traffic = Nodes.of(4, 2), made[0].context.comm.traffic
    assert traffic.by_link(nodes, 0, ["dispatch"]) == {"self": 0, "intra_node": 0, "inter_node": 28}
    assert traffic.by_link(nodes, 0, ["relay"]) == {"self": 28, "intra_node": 28, "inter_node": 0}
    assert made[2].context.comm.traffic.by_link(nodes, 2, ["combine"])["inter_node"] == 4


@pytest.mark.parametrize(
    "ranks,per_node,wire,dtype", [(4, 2, FP32, FP32), (4, 2, FP8_1x128_UE8M0, BF16), (4, 1, FP32, FP32)]
)
def test_every_hostile_routing_returns(ranks: int, per_node: int, wire: QuantScheme, dtype: Plain) -> None:
    options = {"ranks_per_node": per_node, "num_experts": 12, "hidden_size": 128}
    ran = check_transport("hierarchical", num_ranks=ranks, wire=wire, dtype=dtype, **options)  # type: ignore[arg-type]
    assert ran >= 13


def exact(case: RoutingCase) -> tuple[list[Tensor], list[Routing]]:
    """Whole numbers so small that no order of adding them rounds."""
    draw = torch.Generator().manual_seed(5)
    x = [torch.randint(-8, 9, (count, HIDDEN), generator=draw).to(torch.float32) for count in case.num_tokens]
    weights = [torch.randint(1, 4, r.weights_TK.shape, generator=draw).float() for r in case.routings]
    masked = [w.masked_fill(r.ids_TK < 0, 0.0) for w, r in zip(weights, case.routings, strict=True)]
    return x, [Routing(r.ids_TK, w) for r, w in zip(case.routings, masked, strict=True)]


def flow_of(name: str, case: RoutingCase, size: RowBytes, nodes: Nodes) -> Flow:
    rank_of_P = case.expert_map.tables(CPU).rank_of_P
    routed = [torch.where(r.ids_TK >= 0, rank_of_P[r.ids_TK.clamp_min(0).long()], -1) for r in case.routings]
    if name == "hierarchical":
        return hierarchical_flow(routed, size, nodes)
    models = {"all_to_all": all_to_all_flow, "all_gather": all_gather_flow, "one_sided": one_sided_flow}
    return models[name](routed, size)


@pytest.mark.row(37, 39, 44, 144)
@pytest.mark.parametrize("ranks,per_node", [(4, 2), (8, 4), (4, 1)])
def test_output_is_that_of_the_flat_way_and_bytes_are_those_of_the_model(ranks: int, per_node: int) -> None:
    nodes, size = Nodes.of(ranks, per_node), RowBytes(packed_row_bytes(FP32, HIDDEN, TOP_K), row_bytes(FP32, HIDDEN))
    crossed = dict.fromkeys(COMPARED, 0)
    for case in hostile_routings(ranks, num_experts=EXPERTS, top_k=TOP_K):
        x, routings = exact(case)
        combined = {}
        for name in COMPARED:
            comms = LockstepWorld(ranks).communicators()
            made = [PREPARE_FINALIZE[name](context(comm, case.expert_map, per_node)) for comm in comms]
            combined[name] = interleave([there_and_back(*given) for given in zip(made, x, routings, strict=True)])
            flow = flow_of(name, case, size, nodes)
            for rank, comm in enumerate(comms):
                counted = comm.traffic.bytes_by_peer
                assert set(counted) == set(flow.phases)
                for phase, sent_WW in flow.phases.items():
                    assert [counted[phase][peer] for peer in range(ranks)] == sent_WW[rank].tolist(), (name, phase)
                assert comm.traffic.by_link(nodes, rank) == flow.by_link(nodes, rank)
                crossed[name] += comm.traffic.by_link(nodes, rank, ["dispatch", "combine"])["inter_node"]
        for name in COMPARED[1:]:
            assert all(torch.equal(a, b) for a, b in zip(combined[name], combined["all_to_all"], strict=True)), (
                case.name
            )
    assert 0 < crossed["hierarchical"] <= crossed["all_to_all"] < crossed["all_gather"]
    assert (crossed["hierarchical"] == crossed["all_to_all"]) is (per_node == 1), "a node of one rank saves nothing"


def test_nodes_are_added_in_their_order_and_rounded_once_on_the_way() -> None:
    # Each rank's sum is rounded to bf16, a node's f32 sum of them is rounded again where it crosses, the rest never is.
    expert_map, draw = ExpertMap.linear(4, 4), torch.Generator().manual_seed(0)
    made = [Hierarchical(context(c, expert_map, 2, BF16, BF16, top_k=4)) for c in LockstepWorld(4).communicators()]
    ids_TK = torch.arange(4, dtype=torch.int32).expand(5, 4)
    x = [torch.randn((5, HIDDEN), generator=draw).to(torch.bfloat16) for _ in range(4)]
    weights = [torch.rand((5, 4), generator=draw) for _ in range(4)]
    routings = [Routing(ids_TK, w) for w in weights]
    combined = interleave([there_and_back(*given) for given in zip(made, x, routings, strict=True)])
    for rank in range(4):
        parts = [(x[rank].float() * weights[rank][:, e, None]).bfloat16().float() for e in range(4)]
        node = [parts[0] + parts[1], parts[2] + parts[3]]
        node[1 - rank // 2] = node[1 - rank // 2].bfloat16().float()
        assert torch.equal(combined[rank], (node[0] + node[1]).bfloat16())


@pytest.mark.parametrize("per_node", [1, 2])
def test_the_order_of_nodes_is_that_of_their_numbers_on_every_rank(per_node: int) -> None:
    # Four nodes of ranks with equal parts: 1e8 + 1 - 1e8 + 1 is 1 in f32 in this order, and 0 or 2 in others.
    ranks = 4 * per_node
    comms, expert_map = LockstepWorld(ranks).communicators(), ExpertMap.linear(ranks, ranks)
    made = [Hierarchical(context(comm, expert_map, per_node, top_k=ranks)) for comm in comms]
    weights_TK = torch.tensor([[1e8, 1.0, -1e8, 1.0]]).repeat_interleave(per_node, 1) / per_node
    routing = Routing(torch.arange(ranks, dtype=torch.int32)[None], weights_TK)
    combined = interleave([there_and_back(transport, torch.ones(1, HIDDEN), routing) for transport in made])
    assert all(torch.equal(y_TH, torch.ones(1, HIDDEN)) for y_TH in combined)


problem = partial(problems.problem, device="h200", num_tokens=128)


def reasons(asked: Problem) -> list[str]:
    return [reason.text for reason in Hierarchical.reasons_against(asked)]


def test_one_node_and_nodes_of_different_sizes_are_refused_with_the_way_out() -> None:
    assert reasons(problem(ep=8)) == ["relays between nodes, all 8 ranks share one"]
    assert reasons(problem(ep=16)) == []
    assert reasons(problem(ep=12)) == ["needs nodes of equal size, these have 8, 4 ranks"]
    assert reasons(problem(ep=8, tp=2)) == [], "TP neighbours share a node, so EP ranks of one node are half as many"
    with pytest.raises(UnsupportedError, match="nodes of equal size, these have 3, 1 ranks .parallel.ranks_per_node"):
        Hierarchical(context(LockstepWorld(4).communicators()[0], ExpertMap.linear(4, 4), 3))


@pytest.mark.row(39, 144)
def test_the_plan_knows_what_crosses_nodes() -> None:
    # 256 experts, top-8 of 4 of 8 groups, 32 ranks on 4 nodes: 3.133 distinct nodes a token, of them 3/4 remote; 6.820
    # distinct ranks.
    asked = problem(ep=32)
    volume, flat = Hierarchical.volume(asked), PREPARE_FINALIZE["all_to_all"].volume(asked)
    assert volume.far_rows == pytest.approx(128 * 3.1331 * 3 / 4, rel=1e-3)
    assert volume.dispatch_rows == pytest.approx(128 * (3.1331 * 3 / 4 + 6.8196 * 7 / 8), rel=1e-3)
    # A rank relays the tokens of one rank of each node: 7168 bf16 values with 8 ids and weights twice, and f32 sums.
    assert Hierarchical.buffer_bytes(asked) == 4 * 128 * (2 * (7168 * 2 + 8 * 8) + 7168 * 4)
    assert flat.far_rows is None and flat.dispatch_rows == pytest.approx(128 * 6.8196 * 31 / 32, rel=1e-3)
    # Where links between nodes are so much slower, it is cheaper for large batches; small ones pay for collectives.
    for tokens, is_cheaper in ((4096, True), (1, False)):
        batch = replace(asked, num_tokens=tokens)
        price = {
            name: cost.transport_us(batch, PREPARE_FINALIZE[name].volume(batch), BF16)
            for name in ("hierarchical", "all_to_all")
        }
        assert (price["hierarchical"] < price["all_to_all"]) is is_cheaper


@pytest.mark.row(39)
def test_a_layer_over_two_nodes_computes_what_it_does_over_one() -> None:
    draw = torch.Generator().manual_seed(0)
    x = [torch.randn((count, LAYER_HIDDEN), generator=draw) for count in (5, 0, 1, 9)]
    combined = {}
    for name, pieces in (("hierarchical", None), ("hierarchical", 3), ("all_to_all", None)):
        settings = {"prepare_finalize": name, "ranks_per_node": 2, "experts": "reference", "num_shared_experts": 1}
        settings |= {"relay_tokens": pieces, "max_num_tokens": 9}
        layers = [layer(8, 2, groups, **settings) for groups in virtual_groups(4)]
        assert layers[0].decision.chosen.prepare_finalize == name
        assert layers[0].kernel.prepare_finalize.context.relay_tokens == pieces  # type: ignore[union-attr]
        combined[name, pieces] = interleave([one.steps(own) for one, own in zip(layers, x, strict=True)])
    for outputs in zip(*combined.values(), strict=True):
        for y_TH in outputs[1:]:
            torch.testing.assert_close(y_TH, outputs[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="kernel.relay_tokens"):
        load_config("deepseek_v3").with_(relay_tokens=0)


# Processes.


world = world_of(4)


def against_the_model(rank: int, ranks: int, per_node: int) -> list[str]:
    """Every compared transport on every wire: outputs of the flat way, and the bytes of the model over each link."""
    assert dist.group.WORLD is not None
    found, nodes = [], Nodes.of(ranks, per_node)
    for wire, dtype in ((FP32, FP32), (FP8_1x128, FP32)):
        size = RowBytes(packed_row_bytes(wire, HIDDEN, TOP_K), row_bytes(dtype, HIDDEN))
        comm = DistributedCommunicator(dist.group.WORLD, timeout_s=30.0)
        for case in hostile_routings(ranks, num_experts=EXPERTS, top_k=TOP_K):
            (x, routings), combined = exact(case), {}
            for name in COMPARED:
                comm.traffic.reset()
                transport = PREPARE_FINALIZE[name](context(comm, case.expert_map, per_node, wire, dtype))
                combined[name] = wait(there_and_back(transport, x[rank], routings[rank]))
                # Opening windows is no part of a call.
                counted = comm.traffic.by_link(nodes, rank, set(comm.traffic.bytes_by_peer) - {"window set-up"})
                modelled = flow_of(name, case, size, nodes).by_link(nodes, rank)
                if counted != modelled:
                    found.append(f"{name}, {wire.name}, {case.name}: {counted}, not {modelled}")
                if wire is FP32 and not torch.equal(combined[name], combined["all_to_all"]):
                    found.append(f"{name}, {wire.name}, {case.name}: another output than all_to_all")
    return found


@pytest.mark.slow
@pytest.mark.row(39, 44)
def test_processes_of_two_nodes_of_two_send_what_the_model_states(world: RankWorld) -> None:
    assert world.call(against_the_model, 4, 2) == [[]] * 4


@pytest.mark.stress
@pytest.mark.row(144)
def test_processes_of_two_nodes_of_four_send_what_the_model_states() -> None:
    with RankWorld(8) as eight:
        assert eight.call(against_the_model, 8, 4, timeout_s=100.0) == [[]] * 8
