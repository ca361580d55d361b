"""When to rebalance: two thresholds and a dwell time, as a pure state machine.

hot  from  value > high  until  value < low; fires while hot, and at most once per dwell time.

A load that swings faster than the dwell time so costs one rebalance per dwell time and not one per swing; a value
between the thresholds changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_mk.errors import ConfigError


@dataclass(frozen=True)
class Thresholds:
    """high, low: largest rank load over the mean one. dwell: steps from one rebalance to the next at least."""

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
