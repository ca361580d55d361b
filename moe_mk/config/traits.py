"""Traits that every backend declares, and the reasons that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from moe_mk.config.problem import Problem, Reason


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of one backend. Guarantees are false unless stated; the other defaults are the most permissive."""

    summary: str
    """One line: what it is and when to choose it."""
    kinds: frozenset[str] = frozenset({"cpu", "cuda", "rocm"})
    """Kinds of device it runs on."""
    min_arch: tuple[int, int] = (0, 0)
    """Lowest CUDA compute capability; not checked on devices without one."""
    library: str = ""
    """Module name of the optional library it needs."""
    extra: str = ""
    """The pip command or recipe that installs the library."""
    graph_safe: bool = False
    """Whether a call can be captured in a CUDA graph: no host sync, no changing sizes."""
    deterministic: bool = False
    """Whether equal inputs give equal bits."""


def common_reasons(traits: Traits, problem: Problem) -> list[Reason]:
    """Reasons against a backend from the device, missing libraries and required guarantees."""
    device, kernel, reasons = problem.device, problem.config.kernel, []
    # An emulation runs on the host.
    kinds = traits.kinds | {"cpu"} if runs_emulated(traits, problem) else traits.kinds
    if device.kind not in kinds:
        reasons.append(Reason("device", f"runs on {', '.join(sorted(kinds))}, this device is {device.kind}"))
    if device.kind == "cuda" and device.arch is not None and device.arch < traits.min_arch:
        need, have = ("".join(map(str, arch)) for arch in (traits.min_arch, device.arch))
        reasons.append(Reason("arch", f"needs sm_{need}, this device is sm_{have}"))
    if traits.library and traits.library not in problem.installed:
        reasons += _library_reasons(traits, problem)
    if kernel.graphs and not traits.graph_safe:
        reasons.append(Reason("graphs", "cannot be captured in a CUDA graph", "kernel.graphs = false"))
    if (kernel.deterministic or kernel.invariant) and not traits.deterministic:
        asked = "deterministic" if kernel.deterministic else "invariant"
        reasons.append(Reason("deterministic", "is not deterministic", f"kernel.{asked} = false"))
    return reasons


def runs_emulated(traits: Traits, problem: Problem) -> bool:
    """Whether a backend would use the emulation of its library: present, allowed, and the real library is absent."""
    stands_in = traits.library in problem.emulated and traits.library not in problem.installed
    return bool(traits.library) and stands_in and problem.config.kernel.allow_emulated


def _library_reasons(traits: Traits, problem: Problem) -> list[Reason]:
    emulated = traits.library in problem.emulated
    if emulated and problem.config.kernel.allow_emulated:
        return []
    fix = traits.extra or f"pip install {traits.library}"
    if emulated and problem.device.kind == "cpu":  # an emulation runs on the host
        fix += ", or kernel.allow_emulated = true"
    return [Reason("library", f"{traits.library} is not installed", fix)]
