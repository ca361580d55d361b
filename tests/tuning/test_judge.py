"""Which candidate replaces the built-in choice: intervals by hand, noise that must not, a tenth that must."""

import random
from collections.abc import Callable
from statistics import median

import pytest

from moe_mk.lab.tuning.session import ROUNDS, Ratio, Trial, best_of, chosen, compare, extremes_allowed, ratio_of

Noise = Callable[[random.Random], float]


@pytest.mark.parametrize("rounds,k", [(0, 0), (1, 0), (5, 0), (6, 1), (8, 1), (9, 2), (11, 2), (12, 3)])
def test_how_many_rounds_may_lie_outside_by_hand(rounds: int, k: int) -> None:
    # Of 9 fair coins at most one shows heads with a chance of 10/512 = 2.0 %, at most two with 46/512 = 9 %.
    assert extremes_allowed(rounds) == k


def test_an_interval_by_hand() -> None:
    rounds = tuple((10.0, its) for its in (9.0, 8.0, 30.0, 8.5, 9.5, 8.2, 9.1, 8.8, 9.2))
    found = ratio_of(rounds)  # sorted: .8 .82 .85 .88 .9 .91 .92 .95 3.0, of which one at each end is left out
    assert (found.median, found.low, found.high) == (0.9, 0.82, 0.95) and found.is_faster
    assert ratio_of(rounds[:5]) == Ratio(0.9, 0.0, float("inf")) and not ratio_of(rounds[:5]).is_faster


def test_both_take_turns_in_being_first() -> None:
    ran: list[str] = []
    rounds = compare(lambda: float(ran.append("built in") or 1), lambda: float(ran.append("its") or 1), whole=True)
    assert len(rounds) == ROUNDS and rounds == ((1.0, 1.0),) * ROUNDS
    assert ran[:6] == ["built in", "its", "its", "built in", "built in", "its"]


@pytest.mark.parametrize("ratio,expected", [(1.0, 3), (0.99, 3), (0.5, ROUNDS)])
def test_rounds_end_where_no_gain_can_come_of_them(ratio: float, expected: int) -> None:
    assert len(compare(lambda: 100.0, lambda: 100.0 * ratio)) == expected


def test_a_candidate_that_was_broken_off_was_not_faster() -> None:
    trial = Trial({"x": 1}, ((10.0, 1.0),) * (ROUNDS - 1))
    assert not trial.ratio.is_faster and best_of([trial]) is None


def test_the_best_serves_only_when_its_own_rounds_say_so_too() -> None:
    built_in = Trial({}, ((10.0, 10.0),) * ROUNDS)
    one, other = Trial({"x": 1}, ((10.0, 8.0),) * ROUNDS), Trial({"x": 2}, ((10.0, 7.0),) * ROUNDS)
    assert best_of([one, other]) is other and chosen(built_in, [one, other]) is built_in
    weak = Trial({"x": 2}, other.rounds, ((10.0, 9.9),) * ROUNDS)
    assert chosen(built_in, [one, weak]) is built_in
    sure = Trial({"x": 2}, other.rounds, ((10.0, 8.0),) * ROUNDS)
    assert chosen(built_in, [one, sure]) is sure and sure.microseconds == 7.5


def steady(draw: random.Random) -> float:
    return draw.lognormvariate(0.0, 0.03)


def wild(draw: random.Random) -> float:
    """A tenth up or down, and every fourth run meets somebody else's work."""
    return draw.lognormvariate(0.0, 0.1) * (draw.uniform(1.3, 3.0) if draw.random() < 0.25 else 1.0)


def session(seed: int, noise: Noise, micros: list[float]) -> tuple[int, int]:
    """(what the rule takes, what the least median of five runs would) of candidates with these true times; 0: built in.
    The machine also becomes slower by half while it is measured, and faster again."""
    draw, runs = random.Random(seed), [0]

    def run(micro: float) -> Callable[[], float]:
        def timed() -> float:
            runs[0] += 1
            return micro * noise(draw) * (1.5 if runs[0] % 200 > 100 else 1.0)

        return timed

    least = [median(run(micro)() for _ in range(5)) for micro in micros]
    built_in = Trial({"x": 0}, compare(run(micros[0]), run(micros[0]), whole=True))
    trials = [Trial({"x": n}, compare(run(micros[0]), run(micro))) for n, micro in enumerate(micros) if n]
    best = best_of(trials)
    if best is not None:
        n = int(best.parameters["x"])
        trials[n - 1] = Trial(best.parameters, best.rounds, compare(run(micros[0]), run(micros[n])))
    return int(chosen(built_in, trials).parameters["x"]), least.index(min(least))


@pytest.mark.parametrize("noise", [steady, wild])
def test_noise_alone_keeps_what_is_built_in(noise: Noise) -> None:
    found = [session(seed, noise, [100.0] * 16) for seed in range(200)]
    assert sum(rule != 0 for rule, _ in found) <= 1
    assert sum(least != 0 for _, least in found) > 150, "the least of medians takes noise for a gain nearly always"


@pytest.mark.parametrize("noise,least,most", [(steady, 192, 0), (wild, 0, 1)])
def test_a_tenth_is_found_among_others_or_hidden_by_noise_and_no_other_takes_its_place(
    noise: Noise, least: int, most: int
) -> None:
    found = [session(seed, noise, [100.0, 100.0, 104.0, 90.0, 100.0, 99.0])[0] for seed in range(200)]
    assert found.count(3) >= least and sum(rule not in (0, 3) for rule in found) <= most
