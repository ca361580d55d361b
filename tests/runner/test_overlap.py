"""Overlap of one flight with other work: computations, other flights, and whatever runs between hook and receive."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from moe_mk import CommError
from moe_mk.flight import Flight, InFlight, interleave
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.runner import AsyncResult, finalize_async, prepare_async, run_alone, run_dual, run_with
from moe_mk.runner.overlap import ReceivedTwice
from moe_mk.tokens import Tokens
from moe_mk.weights.expert_weights import Weights
from tests.support import layers as build
from tests.support.formats import EXPERTS, FORMATS, HIDDEN, TOP_K, kernels_of


def journey(name: str, events: list[str]) -> Flight[str]:
    """Dispatch, work, combine: one yield point each way, and a second dispatch."""
    events.append(f"{name} out")
    yield InFlight("dispatch")
    events.append(f"{name} experts")
    yield InFlight("combine")
    events.append(f"{name} combined")
    yield InFlight("dispatch")
    return name


@pytest.mark.parametrize(
    "during,expected",
    [
        ("dispatch", ["a out", "shared", "a experts", "a combined"]),
        ("combine", ["a out", "a experts", "shared", "a combined"]),
        ("nothing of that name", ["a out", "a experts", "a combined", "shared"]),
    ],
)
def test_other_work_is_done_once_while_the_named_hop_is_in_flight(during: str, expected: list[str]) -> None:
    events: list[str] = []
    assert run_with(journey("a", events), lambda: events.append("shared"), during) == ("a", None)
    assert events == expected


@pytest.mark.row(94)
def test_micro_batches_compute_while_the_others_travel() -> None:
    events: list[str] = []
    assert run_dual([journey("a", events), journey("b", events)]) == ["a", "b"]
    # b goes out before a computes, and a returns while b's result is on its way.
    assert events == ["a out", "b out", "a experts", "b experts", "a combined", "b combined"]


def test_what_fails_in_a_flight_reaches_the_caller() -> None:
    def lost() -> Flight[None]:
        yield InFlight("dispatch")
        raise ValueError("lost")

    for run in (lambda: run_alone(lost()), lambda: run_dual([lost()]), lambda: run_with(lost(), list)):
        with pytest.raises(ValueError, match="lost"):
            run()


@pytest.fixture
def x_TH() -> Tensor:
    return torch.randn(11, build.HIDDEN)


@pytest.mark.row(93)
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("transport", ["auto", "inside"])
def test_shared_experts_run_while_the_dispatch_is_in_flight(x_TH: Tensor, ep: int, transport: str) -> None:
    events: list[str] = []
    layers = [
        build.layer(8, 2, groups, num_shared_experts=1, prepare_finalize=transport) for groups in virtual_groups(ep)
    ]
    first = layers[0]
    assert first.state.backends.shared is not None
    first.state.backends.shared.experts.run = noted(first.state.backends.shared.experts.run, "shared", events)  # type: ignore[method-assign]
    inner = first.kernel.experts.run
    first.kernel.experts.run = noted(inner, "experts", events)  # type: ignore[method-assign]

    def noting() -> Flight[Tensor]:
        flight = first.steps(x_TH)
        while True:
            try:
                point = next(flight)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            events.append(f"{point.what}...")
            yield point

    got = interleave([noting(), *(one.steps(x_TH) for one in layers[1:])])[0]
    start = events.index("shared")
    assert events[start : start + 2] == ["shared", "dispatch..."], "before the flight yields, so no rank waits for it"
    assert events.index("experts") > start and events.count("shared") == 1
    torch.testing.assert_close(got, build.layer(8, 2, num_shared_experts=1)(x_TH), atol=1e-6, rtol=1e-6)


def noted(call: object, name: str, events: list[str]) -> object:
    def run(*args: object) -> object:
        events.append(name)
        return call(*args)  # type: ignore[operator]

    return run


FP8 = next(form for form in FORMATS if form.activations == "checkpoint")


def counting(events: list[str]) -> Flight[str]:
    events.append("posted")
    yield InFlight("dispatch counts")
    events.append("counts here")
    yield InFlight("dispatch")
    events.append("rows here")
    return "tokens"


def test_posting_happens_at_the_call_and_waiting_in_the_hook() -> None:
    events: list[str] = []
    result = AsyncResult(counting(events))
    assert events == ["posted"]
    result.hook()
    assert events == ["posted", "counts here", "rows here"]
    result.hook()
    result.hook()
    assert events == ["posted", "counts here", "rows here"], "a second hook is harmless"
    assert result.receive() == "tokens"


def at_once(events: list[str]) -> Flight[str]:
    return "tokens"
    yield


@pytest.mark.row(92)
@pytest.mark.parametrize("flight", [counting, at_once])
def test_receiving_twice_is_an_error_of_its_own(flight: Callable[[list[str]], Flight[str]]) -> None:
    result = AsyncResult(flight([]))
    assert result.receive() == "tokens"
    with pytest.raises(ReceivedTwice, match="already received; keep the result of the first call"):
        result.receive()
    result.hook()


X = TypeVar("X")
Ranks = list[tuple[FusedMoEKernel, Weights, Tensor]]


def kernels(case: RoutingCase, transport: str) -> Ranks:
    x = [torch.randn(count, HIDDEN).to(torch.bfloat16) for count in case.num_tokens]
    made = kernels_of(FP8, transport, case.expert_map)
    return [(kernel, weights, x_TH) for (kernel, weights), x_TH in zip(made, x, strict=True)]


@pytest.mark.row(86, 92)
@pytest.mark.parametrize("ranks,transport", [(1, "no_ep")])
@pytest.mark.parametrize("number", range(13))
def test_halves_and_stages_by_hand_equal_the_whole_forward_bit_for_bit(ranks: int, transport: str, number: int) -> None:
    case = hostile_routings(ranks, num_experts=EXPERTS, top_k=TOP_K)[number]
    ((kernel, weights, x_TH),) = kernels(case, transport)
    (expected,) = interleave([kernel.steps(x_TH, case.routings[0], weights)])
    out = prepare_async(kernel.prepare_finalize, x_TH, case.routings[0])
    out.hook()
    tokens = out.receive()
    combined = finalize_async(kernel.prepare_finalize, kernel.multiply(tokens, weights), tokens)
    assert torch.equal(combined.receive(), expected)


def dispatched(ranks: Ranks, case: RoutingCase) -> list[AsyncResult[Tokens]]:
    return [prepare_async(k.prepare_finalize, x, r) for (k, _, x), r in zip(ranks, case.routings, strict=True)]


def combined(ranks: Ranks, tokens: list[Tokens]) -> list[AsyncResult[Tensor]]:
    return [finalize_async(k.prepare_finalize, k.multiply(t, w), t) for (k, w, _), t in zip(ranks, tokens, strict=True)]


@pytest.mark.row(92)
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_halves_on_several_ranks_equal_the_whole_forward_bit_for_bit(transport: str) -> None:
    # Two ranks in one thread: each result is advanced in turn, one yield point at a time, as in two processes.
    case = next(c for c in hostile_routings(2, num_experts=EXPERTS, top_k=TOP_K) if c.name == "replicas")
    ranks = kernels(case, transport)
    expected = interleave([k.steps(x, r, w) for (k, w, x), r in zip(ranks, case.routings, strict=True)])
    tokens = received_in_turn(dispatched(ranks, case))
    assert all(map(torch.equal, received_in_turn(combined(ranks, tokens)), expected))


def test_a_half_that_is_dropped_ends_the_call_of_its_peers() -> None:
    case = hostile_routings(2, num_experts=EXPERTS, top_k=TOP_K)[0]
    ranks, others = kernels(case, "all_to_all"), kernels(case, "all_to_all")
    for started in (dispatched(ranks, case), combined(others, received_in_turn(dispatched(others, case)))):
        del started[0]
        with pytest.raises(CommError, match="rank 1, phase '.*', peer 0: "):
            started[0].hook()  # type: ignore[attr-defined]


def received_in_turn(results: list[AsyncResult[X]]) -> list[X]:
    while not all(result._done for result in results):
        for result in results:
            if not result._done:
                result._advance()
    return [result.receive() for result in results]
