"""Status of online rebalancing: current state, counters, and incidents."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from moe_mk.errors import MoEMKWarning
from moe_mk.layer.moe_layer import MoELayer

State = Literal["watching", "planning", "moving", "backing off", "halted", "degraded", "closed"]
"""degraded: experts have no live copy, and no repair is in progress."""


class RebalanceWarning(MoEMKWarning):
    """Rebalancing failed; the layers continue to serve with the current placement."""


@dataclass(frozen=True)
class Incident:
    """A failure, its step, and the reaction to it."""

    step: int
    what: str
    then: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}; {self.then}"


@dataclass(frozen=True)
class RebalanceStatus:
    """A snapshot of the manager of one rank."""

    state: State
    step: int
    epochs: tuple[int, ...]
    """Placements each layer has had before the present one."""
    plan_id: int
    """The last plan that was announced; 0 before the first."""
    reason: str
    """The reason of the last plan, or why none was made."""
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
    """By layer: experts that no rank holds; `on_lost_expert` is the behaviour of calls until they are repaired."""
    on_lost_expert: str = "raise"
    dropped_assignments: int = 0
    """Assignments of this rank's tokens to lost experts that were left out, all layers together."""
    incidents: tuple[Incident, ...] = ()

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class IncidentLog:
    """The last hundred incidents of one rank."""

    incidents: list[Incident] = field(default_factory=list)
    _unwarned: list[Incident] = field(default_factory=list)

    def record(self, step: int, what: str, then: str) -> None:
        """Record an incident, of which `warn` warns."""
        incident = Incident(step, what, then)
        self.incidents = [*self.incidents[-99:], incident]
        self._unwarned.append(incident)

    def warn(self) -> None:
        """Issue a RebalanceWarning for each new incident, at the end of a step: some are turned into errors."""
        while self._unwarned:
            warnings.warn(f"rebalancing: {self._unwarned.pop(0)}", RebalanceWarning, stacklevel=3)


def warn_of_fatal_ranks(layers: Sequence[MoELayer]) -> None:
    """Warn of ranks that cannot be lost: they hold the only copy of an expert that cannot be read again."""
    fatal = {layer.name: ranks for layer in layers if (ranks := _fatal_ranks(layer))}
    if fatal:
        name, ranks = next(iter(fatal.items()))
        more = f" and {len(fatal) - 1} more layers" if len(fatal) > 1 else ""
        warnings.warn(
            f"the loss of ranks {ranks} cannot be repaired: they hold the only copy of experts of layer {name!r}"
            f"{more}, which have nothing to read weights from; call layer.read_from(source, number), or place a "
            "copy of every expert on a second rank (parallel.placement, min_copies=2)",
            RebalanceWarning,
            stacklevel=3,
        )


def _fatal_ranks(layer: MoELayer) -> list[int]:
    placed = layer.expert_map
    if layer.source is not None or placed.num_ranks == 1:
        return []
    ranks_E = ({placed.rank_of_physical[p] for p in replicas} for replicas in placed.physical_of_logical)
    return sorted({min(ranks) for ranks in ranks_E if len(ranks) == 1})
