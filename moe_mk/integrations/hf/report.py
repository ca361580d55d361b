"""What `prepare` and `explain` tell: every experts module of a model, its backend, why, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_mk.integrations.hf.plan import ModulePlan
from moe_mk.oracle.verdict import Verdict, group_refusals
from moe_mk.weights.expert_weights import CANONICAL, MAPPED


@dataclass(frozen=True)
class ModuleReport:
    """One experts module."""

    path: str
    cls: str
    backend: str
    because: str
    scheme: str
    num_bytes: int
    """Of the weights in the layout of the backend."""
    copied: bool
    """Whether these bytes lie beside the module's own parameters."""
    others: tuple[Verdict, ...]
    """Of the other experts backends, for a module as other backends could read it."""

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        plain = {key: value for key, value in vars(self).items() if key != "others"}
        return plain | {"others": [verdict.as_dict() for verdict in self.others]}


@dataclass(frozen=True)
class ModelReport:
    """All experts modules of a model."""

    model: str
    modules: tuple[ModuleReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {"model": self.model, "modules": [module.as_dict() for module in self.modules]}

    def __str__(self) -> str:
        """One line a module, and under the first module of each class why the others were refused."""
        lines, seen = [f"{self.model}: {len(self.modules)} experts modules by moe_mk"], set()
        for module in self.modules:
            copied = ", a copy beside the module's own" if module.copied else ""
            lines.append(f"{module.path} ({module.cls}): {module.backend}, {module.because}")
            lines.append(f"    {module.scheme}, {module.num_bytes:,} B{copied}")
            if (module.cls, module.backend) not in seen:
                lines += [f"    {verdict.line()}" for verdict in module.others if verdict.cost_us is not None]
                lines += [f"    {refusal.line()}" for refusal in group_refusals(module.others)]
            seen.add((module.cls, module.backend))
        return "\n".join(lines)


def report_of(path: str, plan: ModulePlan, held_bytes: int) -> ModuleReport:
    """What there is to tell about one plan. held_bytes: of the module's own parameters, 0 if they were given up."""
    transport = plan.decision.chosen.prepare_finalize
    others = tuple(
        verdict
        for verdict in plan.decision.verdicts
        if verdict.prepare_finalize == transport and (not plan.facts.canonical or not verdict.chosen)
    )
    return ModuleReport(
        path=path,
        cls=plan.facts.name,
        backend=plan.experts,
        because=plan.because,
        scheme=plan.facts.scheme.name,
        num_bytes=plan.weights.num_bytes,
        copied=plan.weights.layout not in (CANONICAL, MAPPED) and held_bytes > 0,
        others=others,
    )
