"""The results of a run, for the terminal and for --json.

`--plot` draws the expert load.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from moe_mk.errors import ConfigError
from moe_mk.files import write_text
from moe_mk.lab.cli.measure import StageTimes
from moe_mk.lab.cli.outputs import new_figure, save_picture
from moe_mk.lab.cli.plan import RunPlan
from moe_mk.lab.cli.version import own_version

NEWEST_TORCH = "2.15"
"""The newest torch with which `make matrix` has run."""


def save_load_plot(load_E: Sequence[int], experts_of_rank: Sequence[Sequence[int]], file: Path) -> None:
    """Draw tokens per expert as bars, one colour per rank, with the mean. Raises LibraryMissing without matplotlib."""
    figure = new_figure((10, 3.2))
    axes = figure.subplots()
    for rank, experts in enumerate(experts_of_rank):
        axes.bar(list(experts), [load_E[expert] for expert in experts], width=0.9, label=f"rank {rank}")
    mean = sum(load_E) / max(len(load_E), 1)
    axes.axhline(mean, color="black", linewidth=0.8, linestyle="--", label=f"mean {mean:.1f}")
    axes.set_xlabel("expert")
    axes.set_ylabel("tokens")
    axes.set_title(f"expert load, max/mean {max(load_E, default=0) / max(mean, 1e-9):.2f}")
    axes.legend(ncols=4, fontsize="small")
    save_picture(figure, file)


@dataclass(frozen=True)
class RankReport:
    """One rank after loading."""

    rank: int
    experts: tuple[int, ...]
    bytes: int
    """Of weights it read."""
    peak_bytes: int
    """The most that was resident, including mapped files, until the timed forwards were done."""


@dataclass
class Report:
    """Filled in during the run; equal on every rank, except for fields of rank 0."""

    plan: RunPlan
    device: str
    decision: dict[str, Any] = field(default_factory=dict)
    ranks: list[RankReport] = field(default_factory=list)
    read_seconds: float = 0.0
    """Until everything was read and checked, on the slowest rank."""
    load_seconds: float = 0.0
    """Until the experts were in the layout of their backend, likewise."""
    prefill: StageTimes | None = None
    decode: StageTimes | None = None
    traffic: dict[str, int] = field(default_factory=dict)
    """Bytes that rank 0 sends in one prefill, by phase."""
    links: dict[str, int] = field(default_factory=dict)
    """The same bytes by kind of link, one of `comm.traffic.LINKS`."""
    expert_load: list[int] = field(default_factory=list)
    """Tokens of the prefill that chose each expert."""
    residency: dict[str, Any] | None = None
    """With a budget: measured and predicted reads of steps of one token."""
    verification: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        settings, plan = self.plan.settings, self.plan
        return {
            "command": list(plan.command),
            "versions": versions(),
            "device": self.device,
            "seed": settings.seed,
            "dtype": settings.dtype,
            "layer": settings.layer,
            "threads": settings.threads,
            "tokens": list(plan.counts),
            "injected": settings.inject,
            "config": settings.config.model_dump(mode="json"),
            "checkpoint": plan.facts.as_dict(),
            "memory": [memory.as_dict() for memory in plan.memory],
            "decision": self.decision,
            "ranks": [asdict(rank) for rank in self.ranks],
            "read_seconds": self.read_seconds,
            "load_seconds": self.load_seconds,
            "prefill": None if self.prefill is None else asdict(self.prefill),
            "decode": None if self.decode is None else asdict(self.decode),
            "nodes": plan.decision.problem.nodes,
            "sent_bytes": self.traffic,
            "sent_bytes_by_link": self.links,
            "expert_load": self.expert_load,
            "residency": self.residency,
            "verification": self.verification,
        }

    def save(self) -> list[tuple[str, str]]:
        """Write the files of --out and --plot; returns (option, file) of each. Raises ConfigError if that fails."""
        settings, saved = self.plan.settings, []
        try:
            if settings.out is not None:
                write_text(settings.out, json.dumps(self.as_dict(), indent=2) + "\n")
                saved.append(("json", str(settings.out)))
            if settings.plot is not None:
                save_load_plot(self.expert_load, self.plan.experts, settings.plot)
                saved.append(("plot", str(settings.plot)))
        except (OSError, ValueError) as problem:
            raise ConfigError(f"the report cannot be written: {problem}; name another file") from problem
        return saved


def versions() -> dict[str, str]:
    """Versions of the software; of torch, whether it is newer than what this library was tested with."""
    here = {"python": platform.python_version(), "torch": str(torch.__version__), "platform": platform.platform()}
    if TorchVersion(torch.__version__) >= TorchVersion(f"{NEWEST_TORCH}.999"):
        here["torch"] += f", newer than {NEWEST_TORCH}, the newest that is tested"
    return {"moe_mk": own_version(), **here}
