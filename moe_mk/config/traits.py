"""Traits that every backend declares, and the reasons that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from moe_mk.config.problem import Installed, Problem, Reason
from moe_mk.errors import ConfigError
from moe_mk.registry import did_you_mean

DEVICES = frozenset({"cpu", "cuda", "rocm"})
"""Every kind of device."""
OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "amd": "rocm", "hip": "rocm"}


class Unstated(frozenset[str]):
    """The kinds of device of a backend that does not state any."""


UNSTATED = Unstated({"cpu"})
"""It is certified on a CPU, and nothing else is known of it."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of one backend. Not stated: no guarantee, a CPU as the only device; otherwise the most permissive."""

    summary: str
    """One line: what it is and when to choose it."""
    kinds: frozenset[str] = UNSTATED
    """Kinds of device it runs on, some of "cpu", "cuda" and "rocm". If not stated, it is used on a CPU only."""
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
    tables: bool = True
    """Whether it follows the placement tables. False: it derives the rank of an expert from its number, `id // slots`,
    and serves the linear placement without replicas only."""

    @property
    def advice(self) -> tuple[str, ...]:
        """Traits that the author should state, for a warning at registration."""
        if not isinstance(self.kinds, Unstated):
            return ()
        return ("states no kinds of device and is used on a CPU only; state them, as in kinds = frozenset({'cpu'})",)

    def __post_init__(self) -> None:
        """Raises ConfigError for unknown kinds of device."""
        if isinstance(self.kinds, str):
            raise ConfigError(f"traits.kinds = {self.kinds!r} is a text; write frozenset({{{self.kinds!r}}})")
        for kind in sorted(set(self.kinds) - DEVICES):
            other = OTHER_NAMES.get(kind.lower())
            meant = f"; did you mean {other!r}? (known: {', '.join(sorted(DEVICES))})" if other else None
            raise ConfigError(f"traits.kinds has {kind!r}, no kind of device{meant or did_you_mean(kind, [*DEVICES])}")
        if not self.kinds:
            raise ConfigError(f"traits.kinds is empty; name some of {', '.join(sorted(DEVICES))}")


def common_reasons(traits: Traits, problem: Problem) -> list[Reason]:
    """Reasons against a backend from the device, missing libraries and required guarantees."""
    device, kernel, reasons = problem.device, problem.config.kernel, []
    # An emulation runs on the host.
    kinds = traits.kinds | {"cpu"} if runs_emulated(traits, problem) else traits.kinds
    if device.kind not in kinds:
        stated = f"runs on {', '.join(sorted(kinds))}, this device is {device.kind}"
        if isinstance(traits.kinds, Unstated):
            text = f"states no kinds of device and is used on a CPU only, this device is {device.kind}"
            reasons.append(Reason("device", text, f'traits.kinds = frozenset({{"{device.kind}"}}) in the backend'))
        else:
            reasons.append(Reason("device", stated))
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
    if not traits.tables and (placement := problem.config.parallel.placement) != "linear":
        stated = placement if isinstance(placement, str) else "a list"
        text = f"has no placement tables and serves the linear placement only, parallel.placement is {stated}"
        reasons.append(Reason("placement", text, "parallel.placement = linear"))
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
    if isinstance(problem.installed, Installed) and (against := problem.installed.against.get(traits.library)):
        return [Reason("library", against)]
    return [Reason("library", f"{traits.library} is not installed", fix)]
