"""What layers of one model share of a library, and what becomes of its failures."""

import gc
import weakref
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.errors import CommError, UnsupportedError
from moe_mk.flight import interleave, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.deepep.buffers import MAX_OPEN_CALLS, LibrarySession
from moe_mk.quant import BF16
from moe_mk.tokens import ExpertOutput, OutputStage
from tests.support.library_layers import Model, batch, expect_exact, flight_of
from tests.support.tiers import slow

CPU = torch.device("cpu")
EMULATED = "moe_mk.lab.testing.emulated"
MADE = {
    "deepep_ll": "deep_ep.Buffer",
    "deepep_ht": "deep_ep.Buffer",
    "uccl_ep": "uccl.Buffer",
    "uccl_ep_ht": "uccl.Buffer",
    "nvlink_one_sided": "flashinfer.comm.MoeAlltoAll",
    "nvlink_two_sided": "flashinfer.comm.mnnvl.MnnvlMemory",
}
"""Transports, and what each of them makes of its library."""
LOW_LATENCY = ("deepep_ll", "uccl_ep")
SLOTS = ("nvlink_one_sided",)
"""Transports that take a buffer for each call in flight."""


@pytest.fixture
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whatever a transport makes of its library while the test runs."""
    return count_made(f"{EMULATED}.{MADE[request.getfixturevalue('name')]}", monkeypatch)


def count_made(path: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows with each instance of a class, which is named with its module."""
    module, _, name = path.rpartition(".")
    cls, seen = getattr(import_module(module), name), []
    build = cls.__init__

    def counted(self: object, *args: object, **named: object) -> None:
        seen.append(1)
        build(self, *args, **named)

    monkeypatch.setattr(cls, "__init__", counted)
    return seen


@pytest.mark.row(111)
@pytest.mark.parametrize("name", MADE)
def test_four_layers_of_one_group_make_one_buffer_a_rank(name: str, made: list[object]) -> None:
    model = Model(name, layers=4)
    # A two-sided transport has a workspace for ids and one for rows.
    assert len(made) == 2 * (2 if name == "nvlink_two_sided" else 1)
    assert all(buffer is mine[0] for mine in model.buffers for buffer in mine)
    assert model.buffers[0][0] is not model.buffers[1][0]
    for number in range(4):
        given = [batch(10 * number + rank) for rank in range(2)]
        layers = [mine[number] for mine in model.layers]
        outputs = model.each(lambda layer, own: wait(flight_of(layer, own)), layers, given)
        for y_TH, own in zip(outputs, given, strict=True):
            expect_exact(y_TH, own)


@pytest.mark.row(94)
@pytest.mark.parametrize("name", MADE)
def test_two_layers_and_two_micro_batches_at_once_stay_exact(name: str) -> None:
    model = Model(name, layers=2)

    def both(mine: list[FusedMoEKernel], rank: int) -> None:
        for seed in range(4):
            given = [batch(100 * seed + 10 * part + rank) for part in range(2)]
            layers = mine if seed % 2 else mine[:1] * 2
            flights = [flight_of(layer, own) for layer, own in zip(layers, given, strict=True)]
            for y_TH, own in zip(interleave(flights), given, strict=True):
                expect_exact(y_TH, own)

    model.each(both, model.layers, range(2))


@pytest.mark.row(48)
@pytest.mark.parametrize("name", LOW_LATENCY)
def test_a_third_operation_is_refused_whichever_layer_it_is_of(name: str) -> None:
    model = Model(name, layers=3)

    def three(mine: list[FusedMoEKernel], rank: int) -> None:
        given, transports = batch(rank), [layer.prepare_finalize for layer in mine]
        flights = [transport.prepare(*given) for transport in transports]
        for flight in flights[:2]:
            next(flight)
        with pytest.raises(UnsupportedError, match=r"(?s)two operations in flight already.*two micro-batches at once"):
            next(flights[2])
        flights[0].close()  # a flight that is given up leaves its buffer to others
        again, other = interleave([transports[0].prepare(*given), flights[1]])
        assert again.counts_L.tolist() == other.counts_L.tolist()  # type: ignore[union-attr]
        expect_exact(wait(flight_of(mine[2], given)), given)

    model.each(three, model.layers, range(2))


@pytest.mark.parametrize("name", SLOTS)
def test_calls_in_flight_have_slots_of_their_own_whichever_layer_they_are_of(name: str) -> None:
    model = Model(name, layers=3)

    def many(mine: list[FusedMoEKernel], rank: int) -> list[int]:
        given = [batch(10 * number + rank) for number in range(3)]
        flights = [flight_of(layer, own) for layer, own in zip(mine, given, strict=True)]
        for y_TH, own in zip(interleave(flights), given, strict=True):
            expect_exact(y_TH, own)
        transports: list[Any] = [layer.prepare_finalize for layer in mine]
        taken = [wait(transports[0].prepare(*given[0])) for _ in range(MAX_OPEN_CALLS)]
        with pytest.raises(CommError, match=f"{MAX_OPEN_CALLS} calls were prepared and not finalized"):
            next(transports[1].prepare(*given[1]))
        return [len(each._session.pool.slots) for each in transports] + [len(taken)]

    assert model.each(many, model.layers, range(2)) == [[MAX_OPEN_CALLS] * 4] * 2


@pytest.mark.parametrize("name", SLOTS)
def test_tokens_are_finalized_once_whoever_uses_their_lane_by_then(name: str) -> None:
    model = Model(name, layers=2)

    def twice(mine: list[FusedMoEKernel], rank: int) -> None:
        first, second = (layer.prepare_finalize for layer in mine)
        x_TH, routing = given = batch(rank)
        tokens = wait(first.prepare(x_TH, routing))
        output = ExpertOutput(tokens.x_RH.values, OutputStage.REDUCED)  # type: ignore[union-attr]
        wait(first.finalize(output, tokens))
        flight = flight_of(mine[1], given)
        next(flight)  # in the buffer_slot that the first has left
        with pytest.raises(CommError, match=r"phase 'combine'.*finalized before"):
            wait(first.finalize(output, tokens))
        expect_exact(wait(flight), given)
        assert len(second._session.pool.slots) == 1  # type: ignore[attr-defined]

    model.each(twice, model.layers, range(2))


@pytest.mark.parametrize("name", ["deepep_ll", *slow("uccl_ep_ht")])
def test_a_buffer_ends_with_what_its_group_keeps(name: str) -> None:
    model = Model(name, layers=2)
    ends = [weakref.ref(mine[0]) for mine in model.buffers]
    gc.collect()
    gc.disable()  # no circle may be needed to find it
    try:
        model.layers.clear()
        assert all(end() is not None for end in ends), "the group keeps it"
        for comm in model.comms:
            comm.kept.clear()
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["deepep_ht", "uccl_ep_ht"])
def test_a_layer_that_needs_more_replaces_the_buffer_and_calls_under_way_end_in_the_old_one(
    name: str, made: list[object]
) -> None:
    model = Model(name, layers=1)
    first, ended = [mine[0] for mine in model.buffers], []
    for surface in first:
        combine = surface.combine
        surface.combine = lambda needed, combine=combine: (ended.append(1), combine(needed))[1]

    def begin(mine: list[FusedMoEKernel], rank: int) -> Any:
        flight = flight_of(mine[0], batch(rank))
        next(flight)
        return flight

    under_way = model.each(begin, model.layers, range(2))
    model.add(hidden=600, max_num_tokens=12)
    assert len(made) == 4 and all(mine[0] is not old for mine, old in zip(model.buffers, first, strict=True))
    for rank, y_TH in enumerate(model.each(wait, under_way)):
        expect_exact(y_TH, batch(rank))
    assert len(ended) == 2, "in the buffer that they began in"
    model.add()  # what is there is more than enough
    assert len(made) == 4 and all(mine[0] is mine[1] is mine[2] for mine in model.buffers)
    for number, sizes in enumerate(((4, 6), (600, 12), (4, 6))):
        given = [batch(number + 20 * rank, *sizes) for rank in range(2)]
        layers = [mine[number] for mine in model.layers]
        outputs = model.each(lambda layer, own: wait(flight_of(layer, own)), layers, given)
        for y_TH, own in zip(outputs, given, strict=True):
            expect_exact(y_TH, own)


def test_low_latency_layers_of_another_geometry_have_a_buffer_of_their_own() -> None:
    model = Model("deepep_ll", layers=2)
    model.add(hidden=2049)  # travels as 2560, the others as 2048
    model.add(max_num_tokens=8)
    first, twin, wider, longer = model.buffers[0]
    assert first is twin and len({id(first), id(wider), id(longer)}) == 3
    assert first.buffer.num_rdma_bytes < wider.buffer.num_rdma_bytes


def test_a_failure_ends_the_calls_of_every_layer_and_a_layer_built_anew_works() -> None:
    model = Model("deepep_ll", layers=2)
    model.world.timeout_s = 0.2
    with pytest.raises(CommError, match=r"rank 0, .*peer 1: is later than 0.2 s"):
        wait(flight_of(model.layers[0][0], batch(2)))
    for layer in model.layers[0]:
        with pytest.raises(CommError, match=r"phase 'dispatch': an earlier call failed.*build the layer anew"):
            wait(flight_of(layer, batch(2)))
    fresh = Model("deepep_ll", layers=1)
    for own in fresh.layers:
        own[0].prepare_finalize._session.pool.failure = "a peer is dead"  # type: ignore[attr-defined]
    before = [mine[0] for mine in fresh.buffers]
    fresh.add()
    assert [mine[1] is old for mine, old in zip(fresh.buffers, before, strict=True)] == [False, False]


@settings(max_examples=30)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=6))
def test_a_buffer_has_room_for_every_layer_so_far_in_every_respect(sizes: list[tuple[int, ...]]) -> None:
    session: LibrarySession[object] = LibrarySession(context(), "a_library")
    made: list[tuple[int, ...]] = []
    for number, size in enumerate(sizes, 1):
        session.open(size, lambda most: made.append(most) or object())  # type: ignore[func-returns-value]
        assert made[-1] == session.pool.size == tuple(map(max, zip(*sizes[:number], strict=True)))
    assert len(made) == len(set(made)), "and is made anew only for more"


def context() -> TransportContext:
    place = ExpertMap.linear(4, 2)
    comm = LockstepWorld(2).communicators()[1]
    return TransportContext(comm, place, place.tables(CPU), BF16, BF16, 2, 2, CPU, max_num_tokens=4)


@pytest.mark.parametrize("problem", [RuntimeError("peer 0 closed\nstack"), ConnectionError("reset")])
def test_a_failure_names_rank_and_phase_and_ends_the_session(problem: Exception) -> None:
    session = LibrarySession(context(), "flashinfer")
    dead = pytest.raises(CommError, match=r"rank 1, phase 'combine': flashinfer failed, .*dead or late")
    with dead as raised, session.call("combine"):
        raise problem
    assert raised.value.phase == "combine" and "stack" not in str(raised.value)
    later = pytest.raises(CommError, match=r"phase 'dispatch': an earlier call failed.*build the layer anew")
    with later, session.call("dispatch"):
        raise AssertionError("never reached")


class LibraryError(Exception):
    """Libraries raise exceptions of their own, derived from ValueError or from Exception."""


@pytest.mark.parametrize(
    "problem,text",
    [(AssertionError("top-k 10"), "top-k 10"), (LibraryError("error code 4"), "LibraryError: error code 4")],
)
def test_what_the_library_asserts_or_raises_is_a_refusal_and_ends_the_session(problem: Exception, text: str) -> None:
    session = LibrarySession(context(), "a_library")
    refused = pytest.raises(UnsupportedError, match=rf"(?s)a_library refuses open.*{text}")
    with refused, session.call("open"):
        raise problem
    with pytest.raises(CommError, match="an earlier call failed"), session.call("dispatch"):
        raise AssertionError("never reached")


def test_our_own_errors_stay_as_they_are() -> None:
    with pytest.raises(CommError, match="peer 3"), LibrarySession(context(), "a_library").call("open"):
        raise CommError("late", rank=1, phase="open", peer=3)
