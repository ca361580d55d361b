"""What a transport states against a problem, from its traits alone, and what it expects to move."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_mk import ConfigError, Problem
from moe_mk.comm import LockstepWorld
from moe_mk.flight import Flight, interleave
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits, Volume
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.quant.plain import FP32
from moe_mk.tokens import LAYOUT_NAMES, ExpertOutput, OutputStage, Routing, RowTokens, Tokens
from tests.support import problems

problem = partial(problems.problem, device="h100")
CPU = torch.device("cpu")


def reported(traits: TransportTraits, asked: Problem) -> dict[str, str]:
    class Imagined(AllToAll):
        pass

    Imagined.traits = traits
    return {reason.code: str(reason) for reason in Imagined.reasons_against(asked)}


def test_every_reason_is_reported_at_once() -> None:
    traits = replace(AllToAll.traits, one_node=True, uneven=False, max_ranks=4, library="deep_ep", extra="build DeepEP")
    assert reported(traits, problem(ep=12, tokens="replicated", graphs=True)) == {
        "library": "deep_ep is not installed [build DeepEP]",
        "graphs": "cannot be captured in a CUDA graph [kernel.graphs = false]",
        "ranks": "serves up to 4 ranks, the group has 12",
        "fabric": "needs all ranks in one node, 12 ranks span 2 nodes",
        "tokens": "ranks bring the same tokens [parallel.tokens = sharded]",
        "uneven": "256 experts do not divide over 12 ranks",
    }


@pytest.mark.parametrize("ep,visited", [(8, 3.98), (32, 6.82)])
def test_the_expected_rows_are_those_of_the_ranks_that_a_token_visits(ep: int, visited: float) -> None:
    asked = problem(num_tokens=100, ep=ep)
    assert asked.ranks_per_token == pytest.approx(visited, abs=0.05)
    assert PREPARE_FINALIZE["all_to_all"].volume(asked).dispatch_rows == pytest.approx(
        100 * asked.ranks_per_token * (ep - 1) / ep
    )
    # Counts, rows, and the sums that come back.
    assert PREPARE_FINALIZE["all_gather"].volume(asked) == Volume(100 * (ep - 1), 100 * (ep - 1), 3)
    assert PREPARE_FINALIZE["replicated"].volume(asked) == Volume(0, 100 * 2 * (ep - 1) / ep, 1)
    assert PREPARE_FINALIZE["no_ep"].volume(asked) == Volume(0, 0, 0)


def test_the_most_rows_are_those_of_the_call_or_of_the_limit_where_windows_are_padded() -> None:
    asked = problem(num_tokens=100, ep=8, max_num_tokens=512)
    own = {
        name: kind
        for name, kind in PREPARE_FINALIZE.items()
        if kind.max_rows.__func__ is PrepareFinalize.max_rows.__func__
    }
    found = {name: kind.max_rows(asked) for name, kind in own.items()}
    assert found == {name: 8 * (512 if kind.pads_rows else 100) for name, kind in own.items()}
    assert {8 * 512, 8 * 100} == set(found.values()) and PREPARE_FINALIZE["replicated"].max_rows(asked) == 100


@pytest.mark.row(82)
def test_a_transport_without_its_methods_or_traits_is_refused_when_it_registers() -> None:
    class Half(PrepareFinalize):
        def prepare(self, x_TH: torch.Tensor, routing: Routing) -> Flight[Tokens]:
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"finalize\(\) is not implemented; .*`traits` is missing"):
        PREPARE_FINALIZE.register("half")(Half)
    assert "half" not in PREPARE_FINALIZE


def test_the_built_in_transports_say_what_they_are() -> None:
    for name, transport in PREPARE_FINALIZE.items():
        assert transport.__doc__ and transport.traits.summary, name
        assert transport.traits.produces in LAYOUT_NAMES, name
    assert PREPARE_FINALIZE["replicated"].traits.partial and not PREPARE_FINALIZE["all_to_all"].traits.partial


@pytest.mark.parametrize(
    "name,ranks,per_node",
    [
        *((name, 3, None) for name in ("all_to_all", "all_to_all_p2p", "all_to_all_v", "all_gather", "one_sided")),
        *(("hierarchical", ranks, per_node) for ranks, per_node in ((3, 1), (6, 2), (6, 3), (8, 2))),
    ],
)
def test_the_largest_call_reaches_every_rank(name: str, ranks: int, per_node: int | None) -> None:
    # As many tokens as the limit allows on each rank, and each of them for an expert of every rank.
    most, place = 4, ExpertMap.linear(ranks, ranks)
    made = [
        PREPARE_FINALIZE[name](
            TransportContext(
                comm, place, place.tables(CPU), FP32, FP32, 8, ranks, CPU, max_num_tokens=most, ranks_per_node=per_node
            )
        )
        for comm in LockstepWorld(ranks).communicators()
    ]
    draw = torch.Generator().manual_seed(0)
    ids_TK = torch.arange(ranks, dtype=torch.int32).expand(most, ranks).contiguous()
    for _ in range(2):
        x = [torch.randn((most, 8), generator=draw) for _ in made]
        routings = [Routing(ids_TK, torch.rand((most, ranks), generator=draw)) for _ in made]

        def flight(rank: int) -> Flight[torch.Tensor]:
            tokens = yield from made[rank].prepare(x[rank], routings[rank])  # noqa: B023
            assert isinstance(tokens, RowTokens)
            shares_R1 = tokens.weights_RK.masked_fill(tokens.ids_RK < 0, 0.0).sum(1, keepdim=True)
            y_RH = tokens.x_RH.dequantize(torch.float32) * shares_R1
            return (yield from made[rank].finalize(ExpertOutput(y_RH, OutputStage.REDUCED), tokens))

        for given, routing, y_TH in zip(x, routings, interleave([flight(rank) for rank in range(ranks)]), strict=True):
            torch.testing.assert_close(y_TH, given * routing.weights_TK.sum(1, keepdim=True))
