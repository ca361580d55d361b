"""What every backend declares about itself, and the reasons that follow from it without any code."""

from __future__ import annotations

from dataclasses import dataclass

from moe_mk.config.problem import Problem, Reason


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts of one backend. Defaults are the most permissive answer."""

    summary: str
    """One line: what it is and when to choose it."""
    kinds: frozenset[str] = frozenset({"cpu", "cuda", "rocm"})
    """Kinds of device it runs on."""
    min_arch: tuple[int, int] = (0, 0)
    """Lowest CUDA compute capability; devices without one are not asked."""
    library: str = ""
    """Module name of the optional library it needs."""
    extra: str = ""
    """The pip command or recipe that installs the library."""
    graph_safe: bool = True
    """Whether a call can be captured in a CUDA graph: no host sync, no changing sizes."""
    deterministic: bool = True
    """Whether equal inputs give equal bits."""


def common_reasons(traits: Traits, problem: Problem) -> list[Reason]:
    """Everything that device, libraries and the promises asked for say against a backend."""
    device, kernel, reasons = problem.device, problem.config.kernel, []
    # An emulation needs no device of its own: it runs on the host.
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
    if kernel.deterministic and not traits.deterministic:
        reasons.append(Reason("deterministic", "does not give equal bits twice", "kernel.deterministic = false"))
    return reasons


def runs_emulated(traits: Traits, problem: Problem) -> bool:
    """Whether a backend would run on the emulation of its library: that is there, allowed, and the real one is not."""
    stands_in = traits.library in problem.emulated and traits.library not in problem.installed
    return bool(traits.library) and stands_in and problem.config.kernel.allow_emulated


def _library_reasons(traits: Traits, problem: Problem) -> list[Reason]:
    emulated = traits.library in problem.emulated
    if emulated and problem.config.kernel.allow_emulated:
        return []
    fix = traits.extra or f"pip install {traits.library}"
    if emulated:
        fix += ", or kernel.allow_emulated = true"
    return [Reason("library", f"{traits.library} is not installed", fix)]
