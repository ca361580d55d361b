"""The settings of live rebalancing, and when it plans: two thresholds and a dwell time, as a pure state machine.

hot  from  value > high  until  value < low; fires while hot, and at most once per dwell time.

A load that swings faster than the dwell time so costs one rebalance per dwell time and not one per swing; a value
between the thresholds changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moe_mk.errors import ConfigError
from moe_mk.placement.eplb import EPLB_POLICIES, Policy
from moe_mk.rebalance.load import Phase


@dataclass(frozen=True)
class Thresholds:
    """high, low: time of a step over that with even ranks. dwell: steps from one rebalance to the next at least."""

    high: float = 1.15
    low: float = 1.05
    dwell: int = 1000

    def __post_init__(self) -> None:
        wrong = []
        if not 1.0 <= self.low <= self.high:
            wrong.append(f"1 <= low <= high does not hold for low={self.low}, high={self.high}")
        if self.dwell < 1:
            wrong.append(f"dwell={self.dwell} must be at least 1 step")
        if wrong:
            raise ConfigError("; ".join(wrong))


@dataclass(frozen=True)
class Hysteresis:
    """Whether the load is uneven by now, and when it last led to a rebalance."""

    hot: bool = False
    fired_at: int | None = None

    def observe(self, value: float, step: int, limits: Thresholds) -> tuple[Hysteresis, bool]:
        """The next state, and whether to rebalance now. NaN, which no load gives, changes nothing."""
        hot = (self.hot and not value < limits.low) or value > limits.high
        rested = self.fired_at is None or step - self.fired_at >= limits.dwell
        fires = hot and rested
        return Hysteresis(hot, step if fires else self.fired_at), fires


@dataclass(frozen=True)
class RebalanceSettings:
    """When to plan, how to plan, and how gently to move. Steps are calls of `RebalanceManager.step`.

    sync_every: steps from one sum of loads over all ranks to the next, the only collective while nothing changes.
    decay: how much of the smoothed load stays when a window is added. phase: the load to place for.
    resplit_gain: part of the step time that new shares alone must save to be announced.
    bytes_per_step: the most bytes of experts one rank sends in a step. patience: steps to wait for a slow read.
    backoff: steps until the first retry, doubled each time; max_retries: then the plan is dropped.
    plan_limit_s: a plan that takes longer is given up. inline: plan where it is asked for, for repeatable runs.
    The others go to `plan`; speeds of ranks are relative.
    """

    sync_every: int = 100
    decay: float = 0.5
    phase: Phase | Literal["all"] = "all"
    thresholds: Thresholds = field(default_factory=Thresholds)
    resplit_gain: float = 0.01
    bytes_per_step: int = 16 << 20
    patience: int = 1000
    backoff: int = 100
    max_retries: int = 5
    plan_limit_s: float = 60.0
    inline: bool = False
    nodes: int = 1
    groups: int = 1
    speeds: tuple[float, ...] | None = None
    policy: Policy = "auto"
    min_gain: float = 0.025
    max_moves: int | None = None
    move_cost: float = 5e-4
    min_copies: int = 1

    def __post_init__(self) -> None:
        least = {"sync_every": 1, "bytes_per_step": 1, "patience": 0, "backoff": 1, "max_retries": 0}
        wrong = [
            f"{name}={getattr(self, name)} must be at least {low}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        if self.plan_limit_s <= 0:
            wrong.append(f"plan_limit_s={self.plan_limit_s} must be positive")
        try:
            EPLB_POLICIES[self.policy]
        except ConfigError as problem:
            wrong.append(str(problem))
        if wrong:
            raise ConfigError("rebalance settings: " + "; ".join(wrong))
