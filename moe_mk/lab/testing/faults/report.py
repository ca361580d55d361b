"""Reports of worlds with faults: outcomes by rank and call, tables of them, and JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from moe_mk.lab.testing.certificate import environment
from moe_mk.lab.testing.faults.plans import World

OUTCOMES = (
    "right", "typed error", "own", "late", "false alarm", "not recovered", "not injected", "untyped error", "abort",
    "hang", "WRONG",
)  # fmt: skip
"""What a rank may see in a call; docs/fault-tests.md states what each means."""
ACCEPTED = frozenset({"right", "typed error", "own"})


@dataclass(frozen=True)
class Row:
    """The outcome of one call on one rank, or of its end."""

    rank: int
    stage: str
    """build, serve, after (the call after a failure), recover, again (calls after it), tear-down, or end."""
    call: int
    outcome: str
    """One of OUTCOMES."""
    error: str = ""
    text: str = ""
    delay_s: float | None = None
    """From the fault, or from the beginning of the call where that came later, to the error."""
    named: bool | None = None
    """Whether an error of another rank than the victim names the victim, as its `peer` or in its text."""
    cause: bool | None = None
    """Whether the error of the call after a failure carries what the first error stated."""
    digest: str = ""
    """Over the bits of outputs that are right."""
    thread: int = 0


@dataclass(frozen=True)
class WorldResult:
    """One world: its plan, and a row for every call of every rank."""

    plan: World
    rows: tuple[Row, ...]
    fired: bool
    """Whether the fault was reached."""
    seconds: float
    shared_memory_left: int = 0
    """Files that ranks left in shared memory; they were removed."""

    @property
    def bad(self) -> tuple[Row, ...]:
        """The rows that no fault may lead to."""
        return tuple(row for row in self.rows if row.outcome not in ACCEPTED)

    def as_dict(self) -> dict[str, Any]:
        """The world as JSON."""
        plan = asdict(self.plan)
        rows = [
            {k: v for k, v in asdict(row).items() if v not in (None, "", 0) or k in ("rank", "call")}
            for row in self.rows
        ]
        return {
            "number": self.plan.number,
            "transport": self.plan.transport,
            "ranks": self.plan.ranks,
            "fault": plan["fault"],
            "what": self.plan.describe(),
            "fired": self.fired,
            "passed": not self.bad,
            "seconds": round(self.seconds, 2),
            "shared_memory_left": self.shared_memory_left,
            "rows": rows,
        }


@dataclass(frozen=True)
class Report:
    """Outcomes of all worlds of a run."""

    worlds: tuple[WorldResult, ...]
    seconds: float
    seed: int = 0
    command: str = ""
    environment: Mapping[str, str] = field(default_factory=environment)

    @property
    def passed(self) -> bool:
        """Whether no rank of any world saw anything else than right outputs and errors in time."""
        return bool(self.worlds) and not any(world.bad for world in self.worlds)

    def counts(self, by: Callable[[World], str] = lambda plan: plan.transport) -> dict[str, Counter[str]]:
        """How often each outcome was seen, by transport or by what `by` returns of a plan."""
        table: dict[str, Counter[str]] = defaultdict(Counter)
        for world in self.worlds:
            table[by(world.plan)].update(row.outcome for row in world.rows)
        return dict(table)

    def delays(self, by: Callable[[World], str] = lambda plan: plan.transport) -> dict[str, list[float]]:
        """Seconds from fault to typed error on the ranks that are not the victim, calls after a failure left out."""
        found: dict[str, list[float]] = defaultdict(list)
        for world in self.worlds:
            for row in world.rows:
                if row.named is not None and row.stage == "serve" and row.delay_s is not None:
                    found[by(world.plan)].append(row.delay_s)
        return dict(found)

    def share(self, fact: str, by: Callable[[World], str] = lambda plan: plan.transport) -> dict[str, tuple[int, int]]:
        """How many rows have a fact, "named" or "cause", and of how many it was asked."""
        asked: dict[str, list[bool]] = defaultdict(list)
        for world in self.worlds:
            asked[by(world.plan)] += [getattr(row, fact) for row in world.rows if getattr(row, fact) is not None]
        return {key: (sum(facts), len(facts)) for key, facts in asked.items()}

    def table(self, by: Callable[[World], str] = lambda plan: plan.transport) -> list[dict[str, Any]]:
        """A line of numbers for each transport, or each value of `by`."""
        counts, delays = self.counts(by), self.delays(by)
        named, cause = self.share("named", by), self.share("cause", by)
        lines = []
        for key in dict.fromkeys(by(world.plan) for world in self.worlds):
            worlds = [world for world in self.worlds if by(world.plan) == key]
            seen = delays.get(key, [])
            lines.append(
                {
                    "key": key,
                    "worlds": len(worlds),
                    "not_fired": sum(world.plan.fault is not None and not world.fired for world in worlds),
                    "failed_worlds": sum(bool(world.bad) for world in worlds),
                    "outcomes": {outcome: counts[key][outcome] for outcome in OUTCOMES},
                    "named": list(named.get(key, (0, 0))),
                    "cause": list(cause.get(key, (0, 0))),
                    "delay_median_s": round(median(seen), 4) if seen else None,
                    "delay_max_s": round(max(seen), 4) if seen else None,
                }
            )
        return lines

    def summary(self) -> dict[str, Any]:
        """The report without the rows of worlds in which nothing was wrong."""
        return {
            "what": "moe-mk chaos",
            "command": self.command,
            "seed": self.seed,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "environment": dict(self.environment),
            "by_transport": self.table(),
            "by_fault": self.table(lambda plan: plan.kind),
            "shared_memory_left": sum(world.shared_memory_left for world in self.worlds),
            "failed": [world.plan.number for world in self.worlds if world.bad],
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return self.summary() | {"worlds": [world.as_dict() for world in self.worlds]}
