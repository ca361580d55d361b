"""Is a candidate faster than what is built in, or was the machine only quiet when it ran? Paired rounds decide.

Built-in choice and candidate run turn by turn, each first in every other round, so that what slows a machine down meets
both. Of each round the ratio of their times is kept. A candidate replaces the built-in choice where the upper end of an
interval for the median ratio lies below 1 - MARGIN, and does so a second time in rounds of its own: the best of many
looks better than it is, and only fresh rounds say by how much.

The interval is that of order statistics: from the k-th smallest to the k-th largest of n ratios, k as large as it may
be for the median to lie above it with a chance of at most 2.5 %. It asks of the noise only that rounds are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

from moe_mk.config.tuned import Candidate

ROUNDS = 12
MARGIN = 0.02
"""A gain below this is not worth a parameter that differs from the built-in one."""
TAIL = 0.025

Rounds = tuple[tuple[float, float], ...]
"""Microseconds of (the built-in choice, the candidate)."""
RULE = (
    f"alternating rounds beside the built-in choice, {ROUNDS} of each candidate and {ROUNDS} more of the best; one "
    f"replaces it where the upper end of the 95 % interval of the median ratio is below {1 - MARGIN:g} both times"
)


@dataclass(frozen=True)
class Ratio:
    """Time of a candidate over that of the built-in choice."""

    median: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        """Whether it is, beyond the spread and by the margin."""
        return self.high < 1.0 - MARGIN


def extremes_allowed(rounds: int) -> int:
    """k: how many ratios may lie beyond either end of the interval, the end itself among them; 0: too few rounds."""
    tail, k = 0.0, 0
    while k < rounds // 2 and (tail := tail + comb(rounds, k) / 2**rounds) <= TAIL:
        k += 1
    return k


def ratio_of(rounds: Rounds) -> Ratio:
    """The median ratio and its interval; of too few rounds the interval is everything."""
    ratios = sorted(candidate / built_in for built_in, candidate in rounds)
    k = extremes_allowed(len(ratios))
    if k == 0:
        return Ratio(median(ratios), 0.0, float("inf"))
    return Ratio(median(ratios), ratios[k - 1], ratios[-k])


def compare(built_in: Callable[[], float], candidate: Callable[[], float], *, whole: bool = False) -> Rounds:
    """Run rounds of both; each callable runs once and returns its microseconds.

    Ends as soon as so many rounds were no gain that the rest cannot make it one. whole: all rounds in any case.
    """
    rounds: list[tuple[float, float]] = []
    lost, most = 0, extremes_allowed(ROUNDS)
    while len(rounds) < ROUNDS and (whole or lost < most or most == 0):
        first = len(rounds) % 2 == 0
        before = built_in() if first else 0.0
        its = candidate()
        rounds.append((before if first else built_in(), its))
        lost += its / rounds[-1][0] >= 1.0 - MARGIN
    return tuple(rounds)


@dataclass(frozen=True)
class Trial:
    """What was measured of one candidate at one number of tokens."""

    parameters: Candidate
    rounds: Rounds
    confirmed: Rounds = ()
    """Rounds of its own for the best one."""

    @property
    def ratio(self) -> Ratio:
        """In its first rounds; a candidate whose rounds were broken off was not faster."""
        whole = len(self.rounds) >= ROUNDS
        found = ratio_of(self.rounds)
        return found if whole else Ratio(found.median, 0.0, float("inf"))

    @property
    def microseconds(self) -> float:
        """Median of all its runs."""
        return median(its for _, its in (*self.rounds, *self.confirmed))


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The candidate that asks for rounds of its own: of those that were faster the one with the least median ratio."""
    faster = [trial for trial in trials if trial.ratio.is_faster]
    return min(faster, key=lambda trial: trial.ratio.median, default=None)


def chosen(built_in: Trial, trials: Sequence[Trial]) -> Trial:
    """What shall serve: the best candidate if it was faster in its own rounds too, else the built-in choice."""
    best = best_of(trials)
    return best if best is not None and best.confirmed and ratio_of(best.confirmed).is_faster else built_in
