"""Tile by tile through every transport: outputs of a serial run, plans kept, overlap read from the order of events."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_mk.errors import CommError
from moe_mk.flight import Flight, InFlight, wait
from moe_mk.lab.testing.bits import equal_bits
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.runner import MicroBatch, TilePlan, TileRecord, TileWork, cut, in_turns, plan_for, tile_sizes
from moe_mk.runner.tiled_kernel import on_workers
from moe_mk.tokens import Routing, Tokens
from tests.runner.tile_ranks import Meeting, MeetingExperts, Ranks, Rendezvous, both_ways, in_tiles, no_thread_is_left
from tests.support.formats import FORMATS
from tests.support.tiers import quick_where


def can_run(name: str, ranks: int) -> bool:
    """Whether a transport may serve virtual ranks here, an emulated library included."""
    traits = PREPARE_FINALIZE[name].traits
    asked = FORMATS[1].problem(ep=ranks, tokens=next(iter(traits.tokens)), allow_emulated=True)
    codes = {reason.code for reason in PREPARE_FINALIZE[name].reasons_against(asked)}
    return not codes & {"device", "library", "ranks"}


def counts(name: str) -> tuple[int, ...]:
    """Four ranks in threads contain what two do."""
    return (1, 4) if PREPARE_FINALIZE[name].traits.blocking else (1, 2, 4)


NAMES = [(name, ranks) for name, _ in PREPARE_FINALIZE.items() for ranks in counts(name) if can_run(name, ranks)]


def is_quick(name: str, ranks: int) -> bool:
    """Two ranks that take turns in one thread."""
    return ranks == 2 and not PREPARE_FINALIZE[name].traits.blocking


def cases_of(name: str, ranks: int) -> list[RoutingCase]:
    """Every hostile case that a transport carries."""
    traits, cases = PREPARE_FINALIZE[name].traits, hostile_routings(ranks)
    if not traits.uneven:
        cases = [case for case in cases if len(set(map(len, case.expert_map.experts_of_rank))) == 1]
    return cases if "sharded" in traits.tokens else [case.replicated() for case in cases]


def kept_the_plan(record: TileRecord, plan: TilePlan) -> None:
    """Every step was taken once, after all that it needs, in its lane's order."""
    reported = {(str(event.step), event.what): place for place, event in enumerate(record.events)}
    assert len(reported) == len(record.events) == 2 * len(plan.order)
    for step in plan.order:
        assert reported[str(step), "begins"] < reported[str(step), "ends"]
        assert all(reported[str(need), "ends"] < reported[str(step), "begins"] for need in plan.needs(step)), str(step)
    for steps in plan.workers.values():
        assert [reported[str(step), "begins"] for step in steps] == sorted(
            reported[str(step), "begins"] for step in steps
        )


@pytest.mark.row(42)
@pytest.mark.parametrize("name,ranks", quick_where(is_quick, NAMES))
def test_every_transport_carries_every_hostile_case_in_tiles(name: str, ranks: int) -> None:
    traits = PREPARE_FINALIZE[name].traits
    for number, case in enumerate(cases_of(name, ranks)):
        # A comm thread needs ranks that wait; the other way, all ranks in one thread where that is possible.
        # Windows of one process do not wait: test_tile_workers.py has one_sided with a thread.
        waits = number < 5 and (name != "one_sided" or ranks == 1)
        for executor in ("turns", "thread") if waits else ("turns",):
            made = Ranks(name, case, threads=traits.blocking or executor == "thread")
            serial, tiles = made.forward(made.kernels), (2, 3, 5)[number % 3]
            kernels = [in_tiles(kernel, tiles, executor=executor) for kernel in made.kernels]
            got = made.forward(kernels)
            if traits.deterministic:
                assert equal_bits(serial, got), f"{case.name}, {executor}"
            else:
                torch.testing.assert_close(got, serial, msg=lambda text: f"{case.name}: {text}")  # noqa: B023
            for kernel in kernels:
                kept_the_plan(kernel.record, plan_for(kernel.prepare_finalize, tiles))
    assert no_thread_is_left()


@pytest.mark.row(42)
@pytest.mark.parametrize("name", ["all_to_all", "one_sided", "deepep_ll", "deepep_ht"])
def test_each_tile_travels_while_the_one_before_is_multiplied(name: str) -> None:
    """In one thread the order is fixed: M1 begins when D2 and C0 are issued and ends before they are received."""
    case = hostile_routings(2)[0]
    made = Ranks(name, case, threads=PREPARE_FINALIZE[name].traits.blocking)
    kernels = [in_tiles(kernel, 4) for kernel in made.kernels]
    made.forward(kernels)
    for kernel in kernels:
        found = set(kernel.record.overlaps())
        expected = {("D1", "M0"), ("D2", "M1"), ("C0", "M1"), ("C0", "D2"), ("D3", "M2"), ("C1", "M2"), ("C1", "D3")}
        assert expected <= found and not {("D0", "M1"), ("D0", "D1"), ("C0", "C1"), ("D0", "M0")} & found
        assert 0.0 < kernel.record.hidden_share() <= 1.0


@pytest.mark.row(42)
@pytest.mark.parametrize("name,ranks", [("all_to_all", 2), ("deepep_ht", 2), ("deepep_ll", 2), ("no_ep", 1)])
def test_with_a_thread_that_carries_experts_and_journeys_are_under_way_at_once(name: str, ranks: int) -> None:
    """M0 ends only with D1, M1 only with D2, M2 only with C1: on one thread none ever would."""
    made, kernels = Ranks(name, hostile_routings(ranks)[0], threads=True), []
    for kernel in made.kernels:
        first, second, third = Meeting(2), Meeting(2), Meeting(2)
        journeys = {"D1": first, "D2": second, "C1": third}
        experts = MeetingExperts(kernel.experts, {"M0": first, "M1": second, "M2": third})
        transport = Rendezvous(kernel.prepare_finalize, journeys)
        kernels.append(in_tiles(kernel, 4, executor="thread", prepare_finalize=transport, experts=experts))
    assert_same_as_serial(made, kernels)
    for kernel in kernels:
        assert {("D1", "M0"), ("M1", "D2"), ("C1", "M2")} <= both_ways(kernel.record)
    assert no_thread_is_left()


def assert_same_as_serial(made: Ranks, kernels: list[Any]) -> None:
    serial, got = made.forward(made.kernels), made.forward(kernels)
    limits = {"rtol": 0.0, "atol": 0.0} if made.traits.deterministic else {}
    torch.testing.assert_close(got, serial, **limits)  # type: ignore[arg-type]


@pytest.mark.row(42)
@pytest.mark.parametrize("executor", ["turns", "thread"])
def test_a_transport_that_keeps_less_open_gets_a_shallower_plan(executor: str) -> None:
    made = Ranks("all_to_all", hostile_routings(2)[0], threads=True)
    for open_calls, in_flight, forbidden in ((2, None, ("C0", "D2")), (None, 1, ("C0", "D2")), (1, None, ("D1", "M0"))):
        kernels = []
        for kernel in made.kernels:
            narrow = Rendezvous(kernel.prepare_finalize, {})
            narrow.traits = replace(narrow.traits, open_calls=open_calls, in_flight=in_flight)
            kernels.append(in_tiles(kernel, 4, executor=executor, prepare_finalize=narrow))
        assert_same_as_serial(made, kernels)
        assert all(forbidden not in both_ways(kernel.record) for kernel in kernels)


def test_tiles_are_even_and_in_token_order() -> None:
    # 6 tokens in 4 tiles are 2, 2, 1, 1; 1 token in 3 tiles is 1, 0, 0.
    for count, sizes in ((6, [2, 2, 1, 1]), (1, [1, 0, 0]), (0, [0, 0])):
        x_TH, ids_TK = torch.arange(count * 2.0).view(count, 2), torch.arange(count, dtype=torch.int32).view(count, 1)
        parts = cut(MicroBatch(x_TH, Routing(ids_TK, ids_TK.float())), len(sizes))
        assert [len(part.x_TH) for part in parts] == sizes == list(tile_sizes(count, len(sizes)))
        assert torch.equal(torch.cat([part.x_TH for part in parts]), x_TH)
        assert torch.equal(torch.cat([part.routing.ids_TK for part in parts]), ids_TK)


class Holding:
    """A transport that knows which of its journeys are under way."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.traits, self.held = transport, transport.traits, set[int]()
        self.context = transport.context

    def prepare(self, *given: Any) -> Flight[Any]:
        return self.watched(self.transport.prepare(*given))

    def finalize(self, *given: Any) -> Flight[Any]:
        return self.watched(self.transport.finalize(*given))

    def watched(self, flight: Flight[Any]) -> Flight[Any]:
        try:
            self.held.add(id(flight))
            yield InFlight("travel")
            return (yield from flight)
        finally:
            self.held.discard(id(flight))


@pytest.mark.row(42)
@pytest.mark.parametrize("executor", ["turns", "thread"])
def test_experts_that_fail_end_the_call_and_its_threads(executor: str) -> None:
    """No transfer stays under way, whoever keeps the error."""
    made = Ranks("no_ep", hostile_routings(1)[0], threads=False)
    kernel, batch = made.kernels[0], MicroBatch(made.tokens()[0], made.case.routings[0])
    transport, seen = Holding(kernel.prepare_finalize), list[int]()

    def multiply(tokens: Tokens) -> Any:
        seen.append(len(transport.held))
        if len(seen) == 2:
            raise ValueError("no second tile")
        return kernel.multiply(tokens, NO_WEIGHTS)

    tiles, plan = cut(batch, 4), TilePlan(4, 3)
    work = TileWork(transport, multiply, tiles)  # type: ignore[arg-type]
    flights: dict[str, Callable[[], Flight[Any]]] = {
        "turns": lambda: in_turns(work, plan, TileRecord()),
        "thread": lambda: on_workers(work, plan, TileRecord()),
    }
    with pytest.raises(ValueError, match="no second tile") as reported:
        wait(flights[executor]())
    assert transport.held == set() and no_thread_is_left() and reported.value.__traceback__ is not None
    assert executor == "thread" or max(seen) > 0, "something was under way"


@pytest.mark.row(42)
def test_a_peer_that_never_comes_ends_in_an_error_within_its_time() -> None:
    made = Ranks("all_to_all", hostile_routings(2)[0], threads=True)
    made.world.timeout_s = 0.3  # type: ignore[attr-defined]
    kernel, x_TH, routing = in_tiles(made.kernels[0], 4, executor="thread"), made.tokens()[0], made.case.routings[0]
    with pytest.raises(CommError, match=r"peer 1: is later than 0.3 s"):
        wait(kernel.steps(x_TH, routing, NO_WEIGHTS))
    assert no_thread_is_left() and str(kernel.record.events[-1]) == "D0r begins", "nothing went on after it"


@pytest.mark.row(42)
def test_a_call_that_is_given_up_leaves_no_thread() -> None:
    made = Ranks("no_ep", hostile_routings(1)[0], threads=True)
    flight = in_tiles(made.kernels[0], 4, executor="thread").steps(made.tokens()[0], made.case.routings[0], NO_WEIGHTS)
    assert next(flight).what == "dispatch"
    flight.close()
    assert no_thread_is_left()


def test_threads_find_the_switches_of_autograd_as_the_caller_has_them() -> None:
    seen: list[tuple[bool, bool]] = []

    class Seeing(Rendezvous):
        def prepare(self, *given: Any) -> Flight[Any]:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().prepare(*given)

    made = Ranks("no_ep", hostile_routings(1)[0], threads=True)
    kernel = in_tiles(
        made.kernels[0], 1, executor="thread", prepare_finalize=Seeing(made.kernels[0].prepare_finalize, {})
    )
    for modes in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with modes:
            wait(kernel.steps(made.tokens()[0], made.case.routings[0], NO_WEIGHTS))
    assert seen == [(True, False), (False, False), (False, True)]
