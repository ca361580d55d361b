"""Two streams: outputs of one after the other, journeys in one order on all ranks, experts that run meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.errors import CommError
from moe_mk.flight import Flight, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.runner import run_on_two_streams
from moe_mk.testing.transports import NO_WEIGHTS
from moe_mk.tokens import Routing
from tests.runner.named_workers import NamedLanes
from tests.support.library_layers import Model, batch, expect_exact, flight_of


def on_two_streams(kernel: FusedMoEKernel, given: list[tuple[Tensor, Routing]]) -> list[Tensor]:
    return run_on_two_streams(kernel.prepare_finalize, lambda tokens: kernel.multiply(tokens, NO_WEIGHTS), given)


@pytest.mark.row(49)
@pytest.mark.parametrize("name", ["deepep_ht", "deepep_ll", "deepep_v2", "nvlink_two_sided", "mori", "all_to_all"])
def test_outputs_are_those_of_one_batch_after_the_other(name: str) -> None:
    model = Model(name, layers=1)

    def both(mine: list[FusedMoEKernel], rank: int) -> None:
        for count in (1, 2, 5):
            given = [batch(100 * count + 10 * number + rank) for number in range(count)]
            serial = [wait(flight_of(mine[0], own)) for own in given]
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


class Ordered(NamedLanes):
    """Of every stream, how many steps of each stream are known to have ended. A step is what `step` counts."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__(broken=broken)
        self.read, self.alive = list[int](), list[weakref.ref[Tensor]]()
        self.before: dict[str, Counter[str]] = {"caller": Counter(), "carry": Counter()}

    def step(self, needs: dict[str, int]) -> None:
        """Queue a step that needs so many steps of each stream to have ended."""
        known = self.before[self.stream]
        assert all(known[stream] >= steps for stream, steps in needs.items()), (self.stream, needs, known)
        known[self.stream] += 1

    def mark(self) -> Any:
        return Counter(self.before[self.stream])

    def after(self, mark: Any) -> None:
        self.before[self.stream] |= mark or Counter()

    def read_here(self, tensor: Tensor) -> Tensor:
        self.read.append(tensor.data_ptr())
        return tensor


class OnADevice(Watched):
    """A transport whose journeys are steps: a dispatch needs the caller's own, a combine what its experts made."""

    def __init__(self, transport: Any, queues: Ordered, batches: int) -> None:
        super().__init__(transport, batches)
        self.queues, self.batches = queues, batches

    def prepare(self, *given: Any) -> Flight[Any]:
        self.queues.step({"caller": 1})
        return (yield from super().prepare(*given))

    def finalize(self, output: Any, tokens: Any) -> Flight[Any]:
        self.queues.step({"caller": 2 + self.journeys.count("C"), "carry": self.batches})
        return (yield from super().finalize(output, tokens))


@pytest.mark.row(49)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_thread_has_a_stream_and_waits_for_what_the_other_hands_over(count: int) -> None:
    model, queues = Model("all_to_all", layers=1, ranks=1), Ordered()
    kernel = model.layers[0][0]
    transport = OnADevice(kernel.prepare_finalize, queues, count)
    given = [batch(number) for number in range(count)]

    def multiply(tokens: Any) -> Any:
        done = queues.before["caller"]["caller"] - 1
        queues.step({"carry": done + 1})
        assert all(output() is not None for output in queues.alive), "memory that the carrying stream still reads"
        output = kernel.multiply(tokens, NO_WEIGHTS)
        queues.alive.append(weakref.ref(output.y))
        return output

    queues.step({})  # the caller writes the inputs
    outputs = run_on_two_streams(transport, multiply, given, queues)
    for y_TH, own in zip(outputs, given, strict=True):
        expect_exact(y_TH, own)
    assert queues.before["carry"] == {"caller": 1 + count, "carry": 2 * count}
    queues.step({"carry": 2 * count})  # the caller reads the outputs, which were made on another stream
    assert queues.read == [y_TH.data_ptr() for y_TH in outputs] and not queues.broken
    del outputs
    assert not any(output() is not None for output in queues.alive), "nothing is kept beyond the call"


def test_a_journey_that_fails_is_waited_for_before_its_memory_is_free() -> None:
    model, queues = Model("all_to_all", layers=1, ranks=1), Ordered()
    kernel = model.layers[0][0]

    class Failing(OnADevice):
        def finalize(self, output: Any, tokens: Any) -> Flight[Any]:
            yield from super().finalize(output, tokens)
            raise RuntimeError("the second half is lost")

    queues.step({})
    transport = Failing(kernel.prepare_finalize, queues, 1)
    multiplied: list[None] = []

    def multiply(tokens: Any) -> Any:
        multiplied.append(queues.step({"carry": 1}))
        return kernel.multiply(tokens, NO_WEIGHTS)

    with pytest.raises(RuntimeError, match="second half is lost"):
        run_on_two_streams(transport, multiply, [batch(1)], queues)
    assert len(multiplied) == 1 and queues.before["caller"]["carry"] == 2


def test_a_device_without_another_stream_is_an_error_and_not_a_hang() -> None:
    kernel = Model("all_to_all", layers=1, ranks=1).layers[0][0]
    with pytest.raises(RuntimeError, match="no more streams"):
        run_on_two_streams(kernel.prepare_finalize, lambda tokens: None, [batch(1)], Ordered(broken=True))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("carrier")]


def test_no_batches_need_no_thread() -> None:
    kernel = Model("all_to_all", layers=1, ranks=1).layers[0][0]
    assert on_two_streams(kernel, []) == []
