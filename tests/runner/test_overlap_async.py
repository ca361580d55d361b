"""Dispatch and combine as halves under way: a hook that may be called by anybody, a receiver that answers once."""

import pytest
import torch
from torch import Tensor

from moe_mk import CommError
from moe_mk.flight import Flight, InFlight, interleave
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.runner import AsyncResult, finalize_async, prepare_async
from moe_mk.runner.overlap import ReceivedTwice
from moe_mk.weights.expert_weights import Weights
from tests.support.formats import EXPERTS, FORMATS, HIDDEN, TOP_K, kernels_of

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


def test_the_receiver_waits_if_nobody_called_the_hook() -> None:
    events: list[str] = []
    assert AsyncResult(counting(events)).receive() == "tokens"
    assert events[-1] == "rows here"


@pytest.mark.row(92)
def test_receiving_twice_is_an_error_of_its_own() -> None:
    result = AsyncResult(counting([]))
    result.receive()
    with pytest.raises(ReceivedTwice, match="already received; keep the result of the first call"):
        result.receive()
    result.hook()


def test_a_flight_that_lands_at_once_is_a_half_as_well() -> None:
    def nothing_to_wait_for() -> Flight[int]:
        return 7
        yield

    result = AsyncResult(nothing_to_wait_for())
    result.hook()
    assert result.receive() == 7


def test_what_goes_wrong_on_the_wire_is_raised_by_the_hook() -> None:
    def lost() -> Flight[None]:
        yield InFlight("dispatch")
        raise CommError("is dead", rank=0, phase="dispatch", peer=1)

    result = AsyncResult(lost())
    with pytest.raises(CommError, match=r"rank 0, phase 'dispatch', peer 1: is dead"):
        result.hook()


def kernels(case: RoutingCase, transport: str) -> list[tuple[FusedMoEKernel, Weights, Tensor]]:
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


@pytest.mark.row(92)
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_halves_on_several_ranks_equal_the_whole_forward_bit_for_bit(transport: str) -> None:
    # Two ranks in one thread: each result is advanced in turn, one yield point at a time, as in two processes.
    case = next(c for c in hostile_routings(2, num_experts=EXPERTS, top_k=TOP_K) if c.name == "replicas")
    ranks = kernels(case, transport)
    expected = interleave([k.steps(x, r, w) for (k, w, x), r in zip(ranks, case.routings, strict=True)])
    out = [prepare_async(k.prepare_finalize, x, r) for (k, _, x), r in zip(ranks, case.routings, strict=True)]
    hook_in_turn(out)
    tokens = [result.receive() for result in out]
    combined = [
        finalize_async(k.prepare_finalize, k.multiply(t, w), t) for (k, w, _), t in zip(ranks, tokens, strict=True)
    ]
    hook_in_turn(combined)
    for result, y_TH in zip(combined, expected, strict=True):
        assert torch.equal(result.receive(), y_TH)


def hook_in_turn(results: list[AsyncResult]) -> None:  # type: ignore[type-arg]
    while not all(result._done for result in results):
        for result in results:
            if not result._done:
                result._advance()
