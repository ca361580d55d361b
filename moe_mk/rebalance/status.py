"""What live rebalancing is doing, what it has done, and everything that went wrong: never silent, always readable."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from moe_mk.errors import MoEMKWarning

State = Literal["watching", "planning", "moving", "backing off", "halted", "degraded"]
"""degraded: experts have no live copy, and nothing is being done about it."""


class RebalanceWarning(MoEMKWarning):
    """Rebalancing met a problem; the layers go on serving from the placement they have."""


@dataclass(frozen=True)
class Incident:
    """Something that went wrong, at which step, and what is done about it."""

    step: int
    what: str
    then: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}; {self.then}"


@dataclass(frozen=True)
class RebalanceStatus:
    """One look at the manager of one rank."""

    state: State
    step: int
    epochs: tuple[int, ...]
    """Placements each layer has had before the present one."""
    plan_id: int
    """The last plan that was announced; 0 before the first."""
    reason: str
    """Why the last plan is as it is, or why none was made."""
    layers_left: int
    predicted_bytes: int
    """Bytes that the announced plans send from rank to rank, all ranks together."""
    received_bytes: int
    """Bytes of experts that this rank has received from others and accepted."""
    read_bytes: int
    """Bytes of experts that this rank has read from where the layers were loaded."""
    retries: int
    resumes_at: int | None
    """The step of the next attempt while it backs off."""
    balance: Mapping[str, float] = field(default_factory=dict)
    lost_experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By layer: experts that no rank holds; `on_lost_expert` says what calls do until they are repaired."""
    on_lost_expert: str = "raise"
    dropped_assignments: int = 0
    """Assignments of this rank's tokens to lost experts that were left out, all layers together."""
    incidents: tuple[Incident, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """The status as JSON."""
        return asdict(self)


@dataclass
class IncidentLog:
    """Incidents of one rank, the last hundred of them."""

    incidents: list[Incident] = field(default_factory=list)

    def record(self, step: int, what: str, then: str) -> None:
        """Keep an incident and warn of it."""
        incident = Incident(step, what, then)
        self.incidents = [*self.incidents[-99:], incident]
        warnings.warn(f"rebalancing: {incident}", RebalanceWarning, stacklevel=2)
