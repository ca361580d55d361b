"""Two streams: outputs of one after the other, journeys in one order on all ranks, experts that run meanwhile."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.errors import CommError
from moe_mk.flight import Flight, land
from moe_mk.kernel import FusedMoEKernel
from moe_mk.runner import run_on_two_streams
from moe_mk.testing.transports import NO_WEIGHTS
from moe_mk.tokens import Routing
from tests.prepare_finalize.library_layers import Model, batch, expect_exact, flight_of


def on_two_streams(kernel: FusedMoEKernel, given: list[tuple[Tensor, Routing]]) -> list[Tensor]:
    return run_on_two_streams(kernel.prepare_finalize, lambda tokens: kernel.multiply(tokens, NO_WEIGHTS), given)


@pytest.mark.row(49)
@pytest.mark.parametrize("name", ["deepep_ht", "deepep_ll", "deepep_v2", "nvlink_two_sided", "mori", "all_to_all"])
def test_outputs_are_those_of_one_batch_after_the_other(name: str) -> None:
    model = Model(name, layers=1)

    def both(mine: list[FusedMoEKernel], rank: int) -> None:
        for count in (1, 2, 5):
            given = [batch(100 * count + 10 * number + rank) for number in range(count)]
            serial = [land(flight_of(mine[0], own)) for own in given]
            outputs = on_two_streams(mine[0], given)
            for y_TH, one_TH, own in zip(outputs, serial, given, strict=True):
                expect_exact(y_TH, own)
                assert torch.equal(y_TH, one_TH)

    model.each(both, model.layers, range(2))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("carrier")]


class Watched:
    """A transport that notes its journeys, and says when so many dispatches have landed."""

    def __init__(self, transport: Any, enough: int) -> None:
        self.transport, self.traits, self.enough = transport, transport.traits, enough
        self.journeys: list[str] = []
        self.landed = threading.Event()

    def prepare(self, *given: Any) -> Flight[Any]:
        tokens = yield from self.transport.prepare(*given)
        self.journeys.append("D")
        if self.journeys.count("D") == self.enough:
            self.landed.set()
        return tokens

    def finalize(self, *given: Any) -> Flight[Any]:
        y_TH = yield from self.transport.finalize(*given)
        self.journeys.append("C")
        return y_TH


class Patient:
    """Experts that begin once the transport has landed as many dispatches as it was to wait for."""

    def __init__(self, experts: Any, landed: threading.Event) -> None:
        self.experts, self.traits, self.landed = experts, experts.traits, landed

    def run(self, *given: Any) -> Any:
        assert self.landed.wait(5.0), "the second batch does not travel while the first is multiplied"
        return self.experts.run(*given)


@pytest.mark.row(49)
def test_the_second_batch_travels_while_the_first_is_multiplied() -> None:
    model = Model("deepep_ht", layers=1)

    def three(mine: list[FusedMoEKernel], rank: int) -> str:
        watched = Watched(mine[0].prepare_finalize, enough=2)
        kernel = replace(mine[0], prepare_finalize=watched, experts=Patient(mine[0].experts, watched.landed))
        given = [batch(10 * number + rank) for number in range(3)]
        for y_TH, own in zip(on_two_streams(kernel, given), given, strict=True):
            expect_exact(y_TH, own)
        return "".join(watched.journeys)

    assert model.each(three, model.layers, range(2)) == ["DDDCCC"] * 2


def test_a_failure_of_either_thread_ends_both() -> None:
    model = Model("deepep_ht", layers=1)
    model.world.timeout_s = 0.2
    with pytest.raises(CommError, match=r"peer 1: is later than 0.2 s"):
        on_two_streams(model.layers[0][0], [batch(1), batch(2)])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("carrier")]


def test_autograd_is_switched_in_the_thread_that_carries_as_in_this_one() -> None:
    model, seen = Model("all_to_all", layers=1, ranks=1), []

    class Seeing(Watched):
        def prepare(self, *given: Any) -> Flight[Any]:
            seen.append(torch.is_grad_enabled())
            return (yield from super().prepare(*given))

    kernel = replace(model.layers[0][0], prepare_finalize=Seeing(model.layers[0][0].prepare_finalize, 1))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            on_two_streams(kernel, [batch(1)])
    assert seen == [True, False]
