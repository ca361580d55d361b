"""Flights are waited for alone or interleaved."""

from collections.abc import Generator

import pytest

from moe_mk.flight import Flight, InFlight, interleave, wait


def flight(name: str, yields: int, log: list[str]) -> Flight[str]:
    for number in range(yields):
        log.append(f"{name}{number}")
        yield InFlight(name)
    log.append(f"{name}!")
    return name


@pytest.mark.parametrize("yields", [0, 1, 3])
def test_wait_runs_to_the_end_and_returns_the_result(yields: int) -> None:
    log: list[str] = []
    assert wait(flight("a", yields, log)) == "a" and log == [*(f"a{number}" for number in range(yields)), "a!"]


def test_none_is_a_result() -> None:
    def nothing() -> Flight[None]:
        yield InFlight("x")

    wait(nothing())


def test_interleaved_flights_take_turns_in_order() -> None:
    # a yields once, b three times, c never: c ends in the first round, a in the second, b goes on alone.
    log: list[str] = []
    results = interleave([flight("a", 1, log), flight("b", 3, log), flight("c", 0, log)])
    assert results == ["a", "b", "c"]
    assert log == ["a0", "b0", "c!", "a!", "b1", "b2", "b!"]


def test_no_flights_at_all() -> None:
    assert interleave([]) == []


@pytest.mark.parametrize("alone", [True, False])
def test_an_error_in_the_air_reaches_the_caller(alone: bool) -> None:
    def crash() -> Generator[InFlight, None, str]:
        yield InFlight("dispatch")
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        wait(crash()) if alone else interleave([flight("a", 5, []), crash()])


def test_a_flight_that_fails_ends_the_others_whoever_keeps_them() -> None:
    held = {"a", "b"}

    def holding(name: str) -> Generator[InFlight, None, str]:
        try:
            yield InFlight("dispatch")
            yield InFlight("combine")
            return name
        finally:
            held.discard(name)

    def crash() -> Generator[InFlight, None, str]:
        yield InFlight("dispatch")
        raise ValueError("lost")

    flights = [holding("a"), crash(), holding("b")]
    with pytest.raises(ValueError, match="lost"):
        interleave(flights)
    assert not held
