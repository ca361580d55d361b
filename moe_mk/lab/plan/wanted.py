"""Changes that make a backend eligible: the smallest sets of changes of settings, packages, sizes and device.

    moe-mk explain deepseek_v3 --device h200 --ranks 4 --graphs --want deepep_ht

Every candidate set is asked of the oracle itself (its reasons against a pair, then `select` with the pair pinned), so
that a set is listed only if the oracle accepts it. The search is breadth first by the number of changes: from a problem
it goes on with each change that removes at least one reason against a wanted pair, and never past a set that suffices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from moe_mk.config.problem import Problem
from moe_mk.config.shipped import device_profile, shipped_devices
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.experts.base import EXPERTS, FusedExperts
from moe_mk.oracle import Decision, select
from moe_mk.oracle.decide import CODES, pair_reasons
from moe_mk.oracle.trust import reasons_of
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize
from moe_mk.registry import did_you_mean

FREE: dict[str, tuple[object, ...]] = {
    "graphs": (False,), "deterministic": (False,), "invariant": (False,), "batch_invariant": (False,),
    "wire": ("auto", "plain"), "activations": ("auto", "plain"), "tiles": (1,), "comm_units": (None,),
    "relay_tokens": (None,), "tokens": ("sharded", "replicated"), "placement": ("linear",), "tp": (1,),
    "max_num_tokens": (8192, 4096, 1024, 512, 256, 128, 64),
}  # fmt: skip
"""Settings that are changed, and their values."""
SECTION = {
    "tokens": "parallel",
    "placement": "parallel",
    "tp": "parallel",
    "ep": "parallel",
    "ranks_per_node": "parallel",
}
EP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_STATES = 20_000


@dataclass(frozen=True)
class Change:
    """One change of a problem."""

    kind: str
    """setting, package, ranks or device, in the order in which equally small sets are listed."""
    name: str
    value: object = None

    def __str__(self) -> str:
        if self.kind == "package":
            return f"install {self.name}"
        if self.kind == "device":
            return f"device {self.name}"
        section = SECTION.get(self.name, "kernel")
        shown = {True: "true", False: "false", None: "null"}.get(self.value, self.value)  # type: ignore[call-overload]
        return f"{section}.{self.name} = {shown}"

    def of(self, problem: Problem) -> Problem | None:
        """The changed problem; None where the change is none, or gives sizes that cannot be."""
        try:
            if self.kind == "package":
                return (
                    None
                    if self.name in problem.installed
                    else replace(problem, installed=problem.installed | {self.name})
                )
            if self.kind == "device":
                return None if self.name == problem.device.name else replace(problem, device=device_profile(self.name))
            config = problem.config.with_(**{self.name: self.value})
            changed = replace(problem, config=config, num_tokens=min(problem.num_tokens, config.kernel.max_num_tokens))
        except ConfigError:
            return None
        return None if changed.config == problem.config else changed


@dataclass(frozen=True)
class Way:
    """A set of changes that suffices."""

    changes: tuple[Change, ...]
    """None: the backend is eligible as it is."""
    decision: Decision
    """Of the changed problem, with the wanted backends pinned."""

    @cached_property
    def weight(self) -> tuple[int, ...]:
        """Fewer changes first; then settings before packages before sizes before another device."""
        kinds = [KINDS.index(change.kind) for change in self.changes]
        return (len(kinds), *sorted(kinds, reverse=True))

    def line(self) -> str:
        """The changes and the pair they lead to."""
        what = " and ".join(map(str, self.changes)) or "nothing to change"
        return f"{what}: {self.decision.chosen.name}, {self.decision.chosen.cost_us or 0.0:,.0f} us"


KINDS = ("setting", "package", "ranks", "device")


def ways_to(
    problem: Problem, want: str, *, most_changes: int = 4, other_devices: bool = True
) -> tuple[list[Way], list[str]]:
    """The smallest sets of changes that make `want` eligible, smallest first; and why none was found, if none was.

    want: a transport, experts, or "transport + experts". All sets of the smallest size are listed. Raises ConfigError
    for an unknown name.
    """
    pairs = list(_pairs(want))
    named = [part.strip() for part in want.split("+")]
    problem = replace(problem, config=problem.config.with_(trust=(*problem.config.kernel.trust, *named)))
    changes = list(_changes(problem, pairs, other_devices=other_devices))
    level: dict[frozenset[Change], Problem] = {frozenset(): problem}
    met: set[frozenset[Change]] = {frozenset()}
    nearest: dict[frozenset[Change], tuple[str, ...]] = {}
    for size in range(most_changes + 1):
        found = []
        after: dict[frozenset[Change], Problem] = {}
        for made, changed in level.items():
            reasons_of = {pair: _reasons(pair, changed) for pair in pairs}
            free = [pair for pair, reasons in reasons_of.items() if not reasons]
            if decision := _decided(changed, free):
                found.append(Way(tuple(change for change in changes if change in made), decision))
                continue
            nearest[made] = min((tuple(sorted(reasons)) for reasons in reasons_of.values()), key=len)
            if size == most_changes or len(met) > MOST_STATES:
                continue
            for change in changes:
                if any(change.name == other.name or change.kind == other.kind == "device" for other in made):
                    continue
                further = change.of(changed)
                if further is None or (key := made | {change}) in met:
                    continue
                if any(reasons_of[pair] - _reasons(pair, further) for pair in pairs) or free:
                    met.add(key)
                    after[key] = further
        if found:
            return sorted(found, key=lambda way: way.weight), []
        level = after
    best = min(nearest.values(), key=len, default=())
    return [], list(best)


def _pairs(want: str) -> Iterator[tuple[str, str]]:
    transports, experts = list(PREPARE_FINALIZE), list(EXPERTS)
    parts = [part.strip() for part in want.split("+")]
    if len(parts) == 2 and parts[0] in transports and parts[1] in experts:
        yield parts[0], parts[1]
    elif len(parts) == 1 and parts[0] in transports:
        yield from ((parts[0], name) for name in experts if not EXPERTS[name].traits.definition)
    elif len(parts) == 1 and parts[0] in experts:
        yield from ((name, parts[0]) for name in transports)
    else:
        known = [*transports, *experts]
        unknown = next((part for part in parts if part not in known), want)
        raise ConfigError(
            f"--want {want!r}: {unknown!r} is no transport and no experts{did_you_mean(unknown, known)}; "
            "name one of them, or TRANSPORT + EXPERTS"
        )


def _changes(problem: Problem, pairs: list[tuple[str, str]], *, other_devices: bool) -> Iterator[Change]:
    for name, values in FREE.items():
        yield from (Change("setting", name, value) for value in values)
    yield Change("setting", "ranks_per_node", problem.ranks * problem.config.parallel.tp)
    traits = [each.traits for pair in pairs for each in _types(pair)]
    yield from (Change("package", name) for name in sorted({each.library for each in traits if each.library}))
    yield from (Change("ranks", "ep", size) for size in EP_SIZES if size <= problem.config.model.num_experts)
    if other_devices:
        yield from (Change("device", name) for name in shipped_devices())


def _types(pair: tuple[str, str]) -> tuple[type[PrepareFinalize], type[FusedExperts]]:
    return PREPARE_FINALIZE[pair[0]], EXPERTS[pair[1]]


def _reasons(pair: tuple[str, str], problem: Problem) -> set[str]:
    """Every reason against a pair as the oracle finds them, by its text without the remedy."""
    transport, experts = pair
    reasons = [*reasons_of(PREPARE_FINALIZE, transport, problem.as_sent), *reasons_of(EXPERTS, experts, problem)]
    if not any(reason.code in CODES for reason in reasons):
        reasons += pair_reasons(PREPARE_FINALIZE[transport].traits, EXPERTS[experts].traits, problem)
    return {f"{reason.code}: {reason.text}" for reason in reasons}


def _decided(problem: Problem, pairs: list[tuple[str, str]]) -> Decision | None:
    """The oracle's decision for the cheapest of these pairs; None where memory or a format is against all."""
    decisions = []
    for transport, experts in pairs:
        try:
            decisions.append(
                select(replace(problem, config=problem.config.with_(prepare_finalize=transport, experts=experts)))
            )
        except (UnsupportedError, ConfigError):
            continue
    return min(decisions, key=lambda decision: decision.chosen.cost_us or 0.0, default=None)
