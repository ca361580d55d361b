"""Verdicts on pairs, the decision, and its explanation.

An explanation lists eligible pairs with their estimated cost. Each reason against a pair is printed once: under the
transport if it holds with all experts, under the experts if it holds with all transports, otherwise under the pair.
`explain_pairs` renders it for `print(decision)`, for the command line and for `UnsupportedError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from moe_mk.config.problem import Problem, Reason
from moe_mk.experts.base import EXPERTS
from moe_mk.oracle.base import ORACLES
from moe_mk.oracle.fallback import Effect, RejectedFormat
from moe_mk.oracle.memory import Buffers, expected_reads
from moe_mk.oracle.trust import reason_against, reasons_of
from moe_mk.prepare_finalize.base import Budget, LinkChoice
from moe_mk.quant.tensor import QuantScheme
from moe_mk.router.gate import GateChoice
from moe_mk.text import WIDTH, amount, terminal_width, wrapped

K = TypeVar("K")
V = TypeVar("V")
Pair = tuple[str, str]
Reasons = tuple[Reason, ...]
ANY = "any"
OTHER_DEVICE = ("device", "arch")
"""Codes of reasons of backends for another kind or generation of device."""


@dataclass(frozen=True)
class Refusal:
    """Reasons that hold against every pair of these transports and these experts."""

    prepare_finalize: tuple[str, ...]
    """Empty: any."""
    experts: tuple[str, ...]
    """Empty: any."""
    reasons: Reasons

    def covers(self, verdict: Verdict) -> bool:
        """Whether the reasons hold against this pair."""
        of_transport = not self.prepare_finalize or verdict.prepare_finalize in self.prepare_finalize
        return of_transport and (not self.experts or verdict.experts in self.experts)

    @property
    def fits_device(self) -> bool:
        """Whether no reason is that the backend is for another device."""
        return not any(reason.code in OTHER_DEVICE for reason in self.reasons)

    @property
    def distance(self) -> tuple[int, int]:
        """How far the backends are from eligible: reasons that no setting or command removes, then all reasons."""
        return sum(not reason.fix for reason in self.reasons), len(self.reasons)

    def without(self, away: Sequence[Refusal]) -> Refusal | None:
        """This verdict for the backends that `away` does not refuse for all pairs; None if none is left."""
        far_transports = {name for refusal in away if not refusal.experts for name in refusal.prepare_finalize}
        far_experts = {name for refusal in away if not refusal.prepare_finalize for name in refusal.experts}
        transports = tuple(name for name in self.prepare_finalize if name not in far_transports)
        experts = tuple(name for name in self.experts if name not in far_experts)
        if bool(transports) != bool(self.prepare_finalize) or bool(experts) != bool(self.experts):
            return None
        return Refusal(transports, experts, self.reasons)

    def line(self) -> str:
        """The backends and every reason against them."""
        transports, experts = (", ".join(part) or ANY for part in (self.prepare_finalize, self.experts))
        return f"{transports} + {experts}: {'; '.join(map(str, self.reasons))}"


def refusal_lines(verdicts: Sequence[Verdict], *, in_full: bool = False) -> list[str]:
    """Every reason against pairs once: those against all pairs, then the backends that are closest to eligible first.

    Backends for other devices are last, in one line. in_full: they are listed like the others, with all their reasons.
    """

    def order(refusal: Refusal) -> tuple[int, ...]:
        everywhere = all(refusal.covers(verdict) for verdict in verdicts)
        return (not everywhere, not refusal.fits_device, *refusal.distance)

    refusals = sorted(group_refusals(verdicts), key=order)
    away = [] if in_full else [refusal for refusal in refusals if not refusal.fits_device]
    kept = [left for refusal in refusals if refusal not in away and (left := refusal.without(away))]
    lines = [refusal.line() for refusal in kept]
    if away:
        names_of: dict[str, list[str]] = {}
        for refusal in away:
            why = ", ".join(reason.text for reason in refusal.reasons if reason.code in OTHER_DEVICE)
            pairs = [f"{t} + {e}" for t in refusal.prepare_finalize for e in refusal.experts]
            names_of.setdefault(why, []).extend(pairs or (*refusal.prepare_finalize, *refusal.experts))
        lines.append("for other devices: " + "; ".join(f"{', '.join(n)} ({why})" for why, n in names_of.items()))
    return lines


def explain_pairs(verdicts: Sequence[Verdict], width: int | None = None) -> list[str]:
    """Eligible pairs with their cost, the chosen one marked by *, then the refused ones with every reason.

    width: columns at which lines are wrapped; None: not at all.
    """
    eligible = [verdict for verdict in verdicts if verdict.cost_us is not None]
    columns = [max((len(name) for name in names), default=0) for names in zip(*(v.pair for v in eligible), strict=True)]
    lines = [(verdict.line(*columns), sum(columns) + len("*  + 1,234,567 us  ")) for verdict in eligible]
    lines += [(f"  refused  {line}", len("  refused  ")) for line in refusal_lines(verdicts)]
    return [wrapped(line, width, hanging) for line, hanging in lines]


def group_refusals(verdicts: Sequence[Verdict]) -> list[Refusal]:
    """Group the reasons against all pairs. For each pair, the refusals that cover it have exactly its reasons."""
    of_transport = _in_all(verdicts, [verdict.prepare_finalize for verdict in verdicts])
    left = {verdict: _without(verdict.reasons, of_transport.get(verdict.prepare_finalize, ())) for verdict in verdicts}
    of_experts: dict[str, Reasons] = {}
    for name, common in _in_all(verdicts, [verdict.experts for verdict in verdicts]).items():
        remaining = {reason for verdict, reasons in left.items() if verdict.experts == name for reason in reasons}
        if new := tuple(reason for reason in common if reason in remaining):
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


def _without(reasons: Reasons, listed: Reasons) -> Reasons:
    return tuple(reason for reason in dict.fromkeys(reasons) if reason not in listed)


def _in_all(verdicts: Sequence[Verdict], names: Sequence[str]) -> dict[str, Reasons]:
    """By name, the reasons that all of its verdicts share; names with a single verdict are left out."""
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
    """Merge pairs with equal reasons into products of transports and experts."""
    for pairs, reasons in _grouped(left.items()):
        experts_of: dict[str, list[str]] = {}
        for transport, experts in pairs:
            experts_of.setdefault(transport, []).append(experts)
        for transports, alike in _grouped((name, tuple(sorted(each))) for name, each in experts_of.items()):
            yield Refusal(transports, alike, reasons)


def _grouped(items: Iterable[tuple[K, V]]) -> Iterator[tuple[tuple[K, ...], V]]:
    met: dict[V, list[K]] = {}
    for key, value in items:
        met.setdefault(value, []).append(key)
    for value, keys in met.items():
        yield tuple(keys), value


@dataclass(frozen=True)
class Verdict:
    """One pair: chosen, eligible with a cost, or refused with every reason."""

    prepare_finalize: str
    experts: str
    reasons: tuple[Reason, ...]
    cost_us: float | None
    """None if refused."""
    chosen: bool = False
    cost_source: str = "model"
    emulated: bool = False

    @property
    def pair(self) -> Pair:
        return self.prepare_finalize, self.experts

    @property
    def name(self) -> str:
        return f"{self.prepare_finalize} + {self.experts}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "prepare_finalize": self.prepare_finalize,
            "experts": self.experts,
            "chosen": self.chosen,
            "cost_us": None if self.cost_us is None else round(self.cost_us, 1),
            "cost_source": self.cost_source,
            "emulated": self.emulated,
            "reasons": [{"code": r.code, "text": r.text, "fix": r.fix} for r in self.reasons],
        }

    def line(self, transport_width: int, experts_width: int) -> str:
        """One line of an explanation, of an eligible pair. Widths: columns of the two names."""
        emulated = ", emulated" if self.emulated else ""
        mark, names = "*" if self.chosen else " ", f"{self.prepare_finalize:<{transport_width}} + "
        return f"{mark} {names}{self.experts:<{experts_width}} {self.cost_us:9,.0f} us  {self.cost_source}{emulated}"


def untrusted_oracles(problem: Problem) -> tuple[str, ...]:
    """Oracles from outside of this package that the configuration does not name, in words."""
    against = {name: reason_against(ORACLES, name, problem) for name in ORACLES}
    return tuple(f"oracle {name} {reason}" for name, reason in against.items() if reason)


CARRIERS = {"turns": "the calling thread, alternating with the experts", "thread": "a separate thread"}
BY_STAGES = "stage by stage, without a native call: {}; define it in the class, if it still computes the same"
REPLACED = "experts are chosen by {}, not by the router of the settings"
UNROUTED = "{:,} assignments chose no expert: NaN or infinity in hidden states, or ids of -1"


@dataclass(frozen=True)
class Decision:
    """The oracle's answer: pure data, printed, serialised, and compared across ranks."""

    problem: Problem
    oracle: str
    verdicts: tuple[Verdict, ...]
    """Every pair: the chosen one, then the eligible ones by cost, then the refused ones."""
    because: str
    wire: QuantScheme
    """The scheme of tokens in dispatch."""
    compute: QuantScheme
    """The scheme to which the experts quantise activations before each GEMM."""
    dispatch_bytes: int
    """Expected bytes that one rank sends in dispatch of one call, under uniform routing."""
    combine_bytes: int
    weights_bytes: int
    """Bytes of this layer's experts on the fullest rank."""
    buffers: Buffers
    """Memory in addition to the weights, for calls of kernel.max_num_tokens tokens a rank."""
    least_buffers: Buffers
    """The same with kernel.max_num_tokens = num_tokens."""
    tokens_that_fit: int
    """The largest kernel.max_num_tokens, up to the configured one, whose buffers and the weights fit the device."""
    graph_safe: bool
    deterministic: bool
    gate: GateChoice
    budget: Budget | None = None
    """Compute units that the transport reserves; None if it has none that `kernel.comm_units` counts."""
    link: LinkChoice | None = None
    """What carries rows between proxies; None if the transport has none."""
    effect: Effect | None = None
    """The cost of requantising the weights at load; None if they keep the stored format. `problem` describes the
    weights as they are held."""
    passed_over: tuple[RejectedFormat, ...] = ()
    """The weight formats that were rejected before the one in use."""
    parameters: str = ""
    """How the kernel parameters of the experts were chosen on this machine; "" before loading, or if they have none."""
    unrouted: int = 0
    """Assignments of the layer's tokens that chose no expert, see `MoELayer.unrouted`."""
    router: str = ""
    """The router that the layer uses instead of that of the settings; empty: none."""
    by_stages: str = ""
    """Backends that inherit their native call, which is then not used; empty: none."""

    @property
    def chosen(self) -> Verdict:
        return self.verdicts[0]

    @property
    def buffer_bytes(self) -> int:
        """Upper bound on the bytes of received rows, outputs, workspace and transport buffers: worst routing."""
        return self.buffers.total

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about this decision: a reference backend was selected for a GPU."""
        name, device = self.chosen.experts, self.problem.device
        if device.kind == "cpu" or name not in EXPERTS or not EXPERTS[name].traits.definition:
            return ()
        against = {other: reasons_of(EXPERTS, other, self.problem) for other in EXPERTS}
        lacking = [
            f"{other} [{reasons[0].fix}]"
            for other, reasons in against.items()
            if [reason.code for reason in reasons] == ["library"]
        ]
        remedy = f"; one library away: {', '.join(lacking)}" if lacking else ""
        return (f"{name} is the reference implementation, which is slow on {device.name}{remedy}",)

    def notes(self) -> Mapping[str, str]:
        """Values that must be equal on every rank of a group, by name."""
        config = self.problem.config
        return {
            "prepare_finalize": self.chosen.prepare_finalize,
            "experts": self.chosen.experts,
            "wire": self.wire.name,
            "compute": self.compute.name,
            "held": self.problem.weights.name,
            "dtype": self.problem.dtype.name,
            "model": json.dumps(config.model.model_dump(mode="json"), sort_keys=True),
            "router": json.dumps(config.router.model_dump(mode="json"), sort_keys=True),
            "parallel": json.dumps(config.parallel.model_dump(mode="json"), sort_keys=True),
            "max_num_tokens": str(config.kernel.max_num_tokens),
            "relay_tokens": str(config.kernel.relay_tokens),
            "tiles": f"{config.kernel.tiles} by {config.kernel.tile_carrier}",
            "comm_units": str(config.kernel.comm_units),
            "network_link": "" if self.link is None else self.link.name,
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "oracle": self.oracle,
            "problem": self.problem.as_dict(),
            "chosen": self.chosen.as_dict(),
            "because": self.because,
            "wire": self.wire.name,
            "compute": self.compute.name,
            "fallback": None if self.effect is None else self.effect.as_dict(),
            "passed_over": [{"form": each.format, "why": each.why} for each in self.passed_over],
            "untrusted_oracles": list(untrusted_oracles(self.problem)),
            "bytes": {
                "dispatch": self.dispatch_bytes,
                "combine": self.combine_bytes,
                "weights": self.weights_bytes,
                "buffers": self.buffer_bytes,
                "buffers_by": asdict(self.buffers),
                "least_buffers": self.least_buffers.total,
            },
            "tokens_that_fit": self.tokens_that_fit,
            "budget": None if self.budget is None else asdict(self.budget),
            "link": None if self.link is None else asdict(self.link),
            "residency": reads.as_dict() if (reads := expected_reads(self.problem)) else None,
            "parameters": self.parameters,
            "unrouted": self.unrouted,
            "router": self.router,
            "by_stages": self.by_stages,
            "graph_safe": self.graph_safe,
            "deterministic": self.deterministic,
            "warnings": list(self.warnings),
            "gate": {"tier": self.gate.tier, "reasons": {tier: list(why) for tier, why in self.gate.reasons.items()}},
            "verdicts": [verdict.as_dict() for verdict in self.verdicts],
        }

    def __str__(self) -> str:
        """The explanation as text, wrapped to the width of the terminal, or to 140 columns without one."""
        return self.text(terminal_width() or WIDTH)

    def text(self, width: int | None = None) -> str:
        """The explanation: eligible pairs with their cost, and each reason against the others once.

        width: columns at which lines are wrapped; None: not at all.
        """
        p, kernel = self.problem, self.problem.config.kernel
        head = [
            f"{self.chosen.name}: {self.because}",
            f"  on {p.device.name}, ep={p.ranks} tp={p.config.parallel.tp}, {p.num_tokens} tokens a rank, "
            f"{p.dtype.name}; wire {self.wire.name}, experts compute {self.compute.name}",
            f"  per call: {amount(self.dispatch_bytes)} dispatched, {amount(self.combine_bytes)} combined; "
            f"{amount(self.weights_bytes)} of experts, buffers up to {amount(self.buffer_bytes)}",
            f"  gate {self.gate.tier}; "
            + "; ".join(f"not {t}: {', '.join(why)}" for t, why in self.gate.reasons.items()),
        ]
        head += [f"  warning: {line}" for line in self.warnings]
        head += [] if self.budget is None else [f"  {self.chosen.prepare_finalize} reserves {self.budget}"]
        head += [] if self.link is None else [f"  {self.chosen.prepare_finalize} sends rows over {self.link}"]
        head += [f"  {kernel.tiles} tiles per call, sent by {CARRIERS[kernel.tile_carrier]}"] * (kernel.tiles > 1)
        head += [f"  {reads}"] if (reads := expected_reads(p)) else []
        head += [f"  kernel parameters: {self.parameters}"] * bool(self.parameters)
        head += [f"  {REPLACED.format(self.router)}"] * bool(self.router)
        head += [f"  {BY_STAGES.format(self.by_stages)}"] * bool(self.by_stages)
        head += [f"  warning: {UNROUTED.format(self.unrouted)}"] * bool(self.unrouted)
        head += [f"  {line}" for line in (self.effect, *self.passed_over) if line is not None]
        head += [f"  not selected: {line}" for line in untrusted_oracles(p)]
        lines = [wrapped(line, width, hanging=4) for line in head]
        return "\n".join([*lines, *explain_pairs(self.verdicts, width)])
