"""What stands against pairs, each reason told once of whoever causes it: a transport, experts, or the two together.

With twenty transports and six experts a table of pairs repeats itself a hundred times. A reason against a transport
whatever the experts is told of the transport alone, likewise of experts; what is left is told of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from moe_mk.config.problem import Reason

if TYPE_CHECKING:
    from moe_mk.oracle.verdict import Verdict

K = TypeVar("K")
V = TypeVar("V")
Pair = tuple[str, str]
Reasons = tuple[Reason, ...]
ANY = "any"


@dataclass(frozen=True)
class Refusal:
    """Reasons, and every pair of one of these transports and one of these experts against which they stand."""

    prepare_finalize: tuple[str, ...]
    """Empty for any."""
    experts: tuple[str, ...]
    """Empty for any."""
    reasons: Reasons

    def covers(self, verdict: Verdict) -> bool:
        """Whether it speaks of a pair."""
        of_transport = not self.prepare_finalize or verdict.prepare_finalize in self.prepare_finalize
        return of_transport and (not self.experts or verdict.experts in self.experts)

    def line(self) -> str:
        """One line of an explanation."""
        transports, experts = (", ".join(part) or ANY for part in (self.prepare_finalize, self.experts))
        return f"  {transports:>14} + {experts:<20}      refused     {'; '.join(map(str, self.reasons))}"


def told_once(verdicts: Sequence[Verdict]) -> list[Refusal]:
    """All reasons against all refused pairs. For each pair, the refusals that cover it have exactly its reasons."""
    of_transport = _in_all(verdicts, [verdict.prepare_finalize for verdict in verdicts])
    left = {verdict: _without(verdict.reasons, of_transport.get(verdict.prepare_finalize, ())) for verdict in verdicts}
    of_experts: dict[str, Reasons] = {}
    for name, common in _in_all(verdicts, [verdict.experts for verdict in verdicts]).items():
        untold = {reason for verdict, reasons in left.items() if verdict.experts == name for reason in reasons}
        if new := tuple(reason for reason in common if reason in untold):
            of_experts[name] = new
    of_pairs = {
        (verdict.prepare_finalize, verdict.experts): rest
        for verdict, reasons in left.items()
        if (rest := _without(reasons, of_experts.get(verdict.experts, ())))
    }
    return [
        *(Refusal(names, (), reasons) for names, reasons in _grouped(of_transport.items())),
        *(Refusal((), names, reasons) for names, reasons in _grouped(of_experts.items())),
        *_of_pairs(of_pairs),
    ]


def _without(reasons: Reasons, told: Reasons) -> Reasons:
    """Reasons that are not told yet, each once."""
    return tuple(reason for reason in dict.fromkeys(reasons) if reason not in told)


def _in_all(verdicts: Sequence[Verdict], names: Sequence[str]) -> dict[str, Reasons]:
    """By name, the reasons that all of its verdicts have, where it has more than one."""
    mine: dict[str, list[Reasons]] = {}
    for name, verdict in zip(names, verdicts, strict=True):
        mine.setdefault(name, []).append(verdict.reasons)
    common = {
        name: tuple(reason for reason in dict.fromkeys(each[0]) if all(reason in other for other in each))
        for name, each in mine.items()
        if len(each) > 1
    }
    return {name: reasons for name, reasons in common.items() if reasons}


def _of_pairs(left: Mapping[Pair, Reasons]) -> Iterator[Refusal]:
    """Pairs with the same reasons, in rectangles: transports that have them with the same experts."""
    for pairs, reasons in _grouped(left.items()):
        experts_of: dict[str, list[str]] = {}
        for transport, experts in pairs:
            experts_of.setdefault(transport, []).append(experts)
        for transports, alike in _grouped((name, tuple(sorted(each))) for name, each in experts_of.items()):
            yield Refusal(transports, alike, reasons)


def _grouped(items: Iterable[tuple[K, V]]) -> Iterator[tuple[tuple[K, ...], V]]:
    """Keys by what they have, in the order in which that is met first."""
    met: dict[V, list[K]] = {}
    for key, value in items:
        met.setdefault(value, []).append(key)
    for value, keys in met.items():
        yield tuple(keys), value
