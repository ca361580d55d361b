"""NCCL EP over its emulation: what is kept between the halves of a call, limits, bytes."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_mk_contrib.emulated.nccl.ep import Group, Handle
from moe_mk_contrib.nccl_ep import NcclHighThroughput, NcclLowLatency
from moe_mk_contrib.nccl_ep_limits import high_throughput_bytes, low_latency_bytes

from moe_mk.external import library
from moe_mk.flight import wait
from moe_mk.lab.testing.conformance import check_transport
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant import BF16, FP16
from moe_mk.tokens import ExpertOutput, OutputStage, Routing
from tests.support.library_ranks import ROUTINGS, Ranks, X, problem, reported, small
from tests.support.tiers import slow

LL, HT = "nccl_ep", "nccl_ep_ht"


@pytest.mark.slow
@pytest.mark.row(75)
@pytest.mark.parametrize("name", [LL, *slow(HT)])
def test_calls_survive_a_collection_of_garbage_between_their_halves(name: str) -> None:
    """The library keeps addresses of ids, weights and rooms, not the tensors."""
    ranks = Ranks(name, dtype=BF16, wire=BF16)

    def slowly(transport: Any, x_TH: Any, routing: Routing) -> torch.Tensor:
        flight = transport.prepare(x_TH, replace(routing, weights_TK=routing.weights_TK.double()))
        next(flight)
        gc.collect()
        tokens = wait(flight)
        y = tokens.x_LSH.values if name == LL else tokens.x_RH.values
        stage = OutputStage.RAW if name == LL else OutputStage.REDUCED
        back = transport.finalize(ExpertOutput(y.nan_to_num(), stage), tokens)
        next(back)
        gc.collect()
        y_TH: torch.Tensor = wait(back)
        return y_TH

    first, second = ranks.each(slowly, ranks.transports, [x.bfloat16() for x in X], ROUTINGS)
    # Identity experts: a: (0.5 + 0.25) a, b: b, c: (0.75 + 0.125) c; without weights a is summed of two ranks.
    wanted = [[0.75, 1.5], [3.0, 4.0], [0.0, 0.0]] if name == LL else [[2.0, 4.0], [3.0, 4.0], [0.0, 0.0]]
    assert first.tolist() == wanted
    assert second.tolist() == ([[4.375, 5.25]] if name == LL else [[5.0, 6.0]])


def test_every_staged_operation_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for call in ("dispatch", "combine", "complete"):
        whole = getattr(Handle, call)

        def counted(self: Handle, *args: Any, call: str = call, whole: Any = whole, **named: Any) -> None:
            seen.append(call + str(getattr(named.get("config"), "send_only", "")))
            whole(self, *args, **named)

        monkeypatch.setattr(Handle, call, counted)
    check_transport(LL, num_ranks=2, cases=None)
    staged = seen.count("dispatch1") + seen.count("combine1")
    assert staged == seen.count("complete") and seen.count("dispatch0") == seen.count("combine0") == 0


def test_a_group_is_made_for_each_call_in_flight_with_the_sizes_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    create = Group.create.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Group, "create", classmethod(lambda cls, comm, config: (made.append(config), create(cls, comm, config))[1])
    )
    ranks = Ranks(HT, ExpertMap.linear(6, 2), hidden=40, comm_units=12, max_num_tokens=4)
    assert [c.max_num_sms for c in made] == [12, 12] and {c.num_experts for c in made} == {6}
    assert {(c.max_dispatch_tokens_per_rank, c.max_recv_tokens_per_rank, c.max_token_bytes) for c in made} == {
        (4, 8, 160)
    }
    ranks.each(lambda t, x, r: [wait(t.prepare(x, r)) for _ in range(3)], ranks.transports, *_some(ranks))
    assert len(made) == 6


def _some(ranks: Ranks) -> tuple[list[torch.Tensor], list[Routing]]:
    routing = Routing(torch.tensor([[0, 5]], dtype=torch.int32), torch.ones(1, 2))
    return [torch.ones(1, ranks.hidden)] * 2, [routing] * 2


def test_planned_bytes_are_those_of_the_librarys_formulas() -> None:
    # H200, EP8, 128 tokens of 7168 bf16, top-8 of 256. Low latency, each of two banks:
    #   dispatch   14336 + 32 of header, of this rank and 8 received     128 x 14368 x 9       16,551,936
    #   combine    14336 + 224, 256 experts to send and 8 received       128 x 14560 x 264    492,011,520
    #   flags      256 x 4                                                                          1,024
    assert low_latency_bytes(128, 14336, 8, 256, 8) == 2 * (492_011_520 + 1024)
    assert NcclLowLatency.plan(problem()).buffer_bytes == 984_025_088
    # High throughput: a workspace of 32 MiB; rows in, rows out and scales, 1024 of 14336 each; weights for 256 experts
    # of 1024 rows, in and out; a bit for each expert and token of all ranks.
    assert high_throughput_bytes(128, 14336, 8, 1, 256) == 33_554_432 + 3 * 14_680_064 + 2 * 1_048_576 + 32_768
    assert NcclHighThroughput.plan(problem()).buffer_bytes == 79_724_544
    # Four nodes: regions for what crosses come on top.
    assert NcclHighThroughput.plan(problem(ep=32)).buffer_bytes > 4 * 44_040_192 + 33_554_432


def test_every_limit_is_reported() -> None:
    for name in (LL, HT):
        assert reported(name, problem()) == {} and reported(name, problem(ep=32)) == {}
        assert reported(name, problem(graphs=True)) == {}
        assert set(reported(name, problem(dtype=FP16))) == {"dtype"}
        assert set(reported(name, problem(device="mi300x"))) == {"device"}
        assert reported(name, problem(deterministic=True))["deterministic"]
        assert reported(name, problem(comm_units=133))["comm_units"].startswith("asks for 133 SMs, the device has 132")
        assert "pip install 'nccl-extensions[cu13]'" in reported(name, problem(installed=()))["library"]
    assert reported(LL, small(top_k=31)) == {}
    assert reported(LL, small(top_k=32))["top_k"] == "forwards to 31 experts a token on 132 SMs, the router has 32"
    text = "needs 19 SMs for 256 physical experts, 18 may be used [kernel.comm_units = 19]"
    assert reported(LL, problem(comm_units=18)) == {"comm_units": text} and reported(HT, problem(comm_units=18)) == {}
    assert "8192 tokens a rank, 8196 are asked for" in reported(HT, problem(num_tokens=8196))["tokens"]
    assert reported(LL, problem(num_tokens=8196)) == {}


def test_the_library_is_there_only_with_its_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl4py alone has `nccl.core`, and no `nccl.ep`."""
    there = {"nccl"}
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: name in there or None)
    assert "nccl" not in library.installed()
    there.add("nccl.ep")
    assert "nccl" in library.installed()
