"""The selection algorithm of all quantisation types: collect reasons, estimate costs, apply pins. A pure function.

The reasons against a pair are those of its transport, of its experts, and of the combination: layout, reduction, wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moe_mk.config.device import DeviceProfile
from moe_mk.config.moe import KernelConfig
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.quant import QuantConfig
from moe_mk.config.router import TRAINING_KINDS
from moe_mk.config.traits import runs_emulated
from moe_mk.errors import ConfigError, UnsupportedError, unless_signalled
from moe_mk.experts.base import EXPERTS, ExpertsTraits
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.external.library import COMPILER
from moe_mk.oracle import cost
from moe_mk.oracle.base import ORACLES, Oracle
from moe_mk.oracle.fallback import RejectedFormat, effect_of, held_in, in_native_form
from moe_mk.oracle.memory import Buffers, Workspace, buffers_of, limited_to, most_tokens, room_of, weights_bytes
from moe_mk.oracle.trust import failed, is_named, measured_us, reason_against, reasons_of
from moe_mk.oracle.verdict import Decision, Verdict, refusal_lines
from moe_mk.permute import can_permute
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportTraits, Volume
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import Registry, did_you_mean, more_backends
from moe_mk.router.gate import SMALL_M_LIBRARY, choose_gate_tier
from moe_mk.text import amount
from moe_mk.tokens import LAYOUT_NAMES, GroupedTokens


def libraries_of(device: DeviceProfile) -> frozenset[str]:
    """Optional libraries that some backend needs and that could be installed on a device of this profile.

    For `Problem.installed`, to plan for another machine.
    """
    registries: tuple[Registry[Any], ...] = (PREPARE_FINALIZE, EXPERTS, MONOLITHIC)
    traits = [backend.traits for registry in registries for _, backend in registry.items()]
    here = [each for each in traits if device.kind in each.kinds]
    return frozenset(each.library for each in here if each.library and (device.arch or each.min_arch) >= each.min_arch)


def pair_reasons(transport: TransportTraits, experts: ExpertsTraits, problem: Problem) -> Iterator[Reason]:
    """Reasons of layout, reduction and wire."""
    produced, layout = LAYOUT_NAMES[transport.produces], layout_read(transport, experts)
    if layout is None:
        read = ", ".join(LAYOUT_NAMES[consumed] for consumed in experts.consumes)
        yield Reason("layout", f"the transport delivers {produced} tokens, the experts read {read}")
    elif experts.emits[layout] > transport.wants:
        have, want = experts.emits[layout].name.lower(), transport.wants.name.lower()
        yield Reason("reduce", f"the experts return {have} output, the transport reduces {want} output itself")
    permuted = layout is not None and layout is not transport.produces
    device = problem.device
    able = device.kind == "cuda" and device.arch is not None and device.arch >= (9, 0) and "triton" in problem.installed
    if permuted and problem.config.kernel.graphs and not (able and layout is GroupedTokens):  # as `permute` decides
        yield Reason("graphs", "permuting rows synchronises with the host to read counts", "kernel.graphs = false")
    if problem.config.kernel.invariant and transport.partial:
        yield Reason("invariant", "adds the parts of all ranks in one all-reduce", "kernel.invariant = false")
    yield from wire_reasons(transport.wire, problem)


def wire_reasons(carries: frozenset[str], problem: Problem) -> Iterator[Reason]:
    """Reasons against a pinned wire scheme; none on a single rank, where nothing is sent."""
    wish, activations = problem.config.kernel.wire, problem.activations
    if wish in ("auto", "plain") or problem.ranks == 1:
        return
    family = activations.family if wish == "checkpoint" and activations is not None else "fp8"
    if family not in carries:
        yield Reason("wire", f"the transport does not support {family.upper()} rows", "kernel.wire = auto")
    if activations is None or (wish == "fp8" and activations.family != "fp8"):
        stored = problem.weights.name
        yield Reason(
            "wire", f"the checkpoint ({stored} experts) defines no FP8 activation scales", "kernel.wire = auto"
        )


def layout_read(transport: TransportTraits, experts: ExpertsTraits) -> type | None:
    """The layout that experts read from a transport: as produced if they consume it, else permuted; None if neither."""
    if transport.produces in experts.consumes:
        return transport.produces
    best = experts.consumes[0]
    return best if can_permute(transport.produces, best) else None


CODES = ("trust", "plugin")
"""Of reasons against a backend from outside of this package whose code is not called, or fails."""
INSIDE = "inside"
"""The transport name of monolithic kernels: they route internally, and tokens are gathered around them if needed."""


@dataclass(frozen=True)
class Candidate:
    """One pair of transport and experts, with the schemes it would use."""

    transport: str
    experts: str
    traits: ExpertsTraits
    transport_type: type[PrepareFinalize]
    reasons: tuple[Reason, ...]
    wire: QuantScheme
    compute: QuantScheme
    workspace: Workspace

    def volume(self, problem: Problem) -> Volume:
        return self.transport_type.volume(problem.as_sent)

    def buffers(self, problem: Problem) -> Buffers:
        """Memory in addition to the weights, for calls of the problem's number of tokens."""
        return buffers_of(self.transport_type, self.wire, self.workspace, problem.as_sent)


def decide(problem: Problem, oracle: type[Oracle]) -> Decision:
    """Evaluate every registered pair and choose the eligible one with the lowest cost, within the pins.

    Weights keep their stored format if any backend other than the reference reads it, else the first format of the
    oracle that such a backend reads; the decision then states the cost (`Decision.effect`).
    Raises UnsupportedError with all reasons against all pairs if none is eligible, ConfigError for an unknown pin or
    a problem of another quantisation type.
    """
    check_pins(problem.config.kernel)
    _check_type(problem, oracle)
    attempts: list[Attempt] = []
    for quant in _allowed_formats(problem, oracle):
        attempts.append(_try(problem, held_in(quant, problem), oracle))
        if any(not candidate.traits.definition for _, candidate in attempts[-1].able):
            break
    serving = attempts[-1] if any(not c.traits.definition for _, c in attempts[-1].able) else None
    chosen = serving or next((each for each in attempts if each.able), None)
    if chosen is None:
        wanted = [verdict for verdict in attempts[0].verdicts if _is_wanted(verdict, problem)]
        lines = refusal_lines(wanted, in_full=bool(_pins(problem)))
        inside = f"{', '.join(MONOLITHIC)} route internally, with transport {INSIDE!r}, which only they have"
        raise UnsupportedError(_nothing_serves(problem), lines or [f"no such pair is registered: {inside}"])
    winner, candidate = min(chosen.able, key=lambda pair: (pair[0].emulated, pair[0].cost_us or 0.0))
    decision = _decision(chosen.problem, oracle, chosen.verdicts, winner, candidate, rivals=len(chosen.able) - 1)
    passed = tuple(_rejected_format(each) for each in attempts if each is not chosen)
    return replace(decision, effect=effect_of(problem, chosen.problem), passed_over=passed)


def _allowed_formats(problem: Problem, oracle: type[Oracle]) -> tuple[QuantConfig, ...]:
    """Formats to try. Requantised weights have no activation scheme, so activations = checkpoint allows no fallback."""
    formats, kernel = oracle.formats(problem), problem.config.kernel
    insists = kernel.rounds and problem.activations is not None
    return (*in_native_form(problem), *formats) if kernel.fallback and not insists else formats[:1]


@dataclass(frozen=True)
class Attempt:
    """The verdicts on all pairs for one format of the weights."""

    problem: Problem
    verdicts: list[Verdict]
    able: list[tuple[Verdict, Candidate]]


def _try(stored: Problem, held: Problem, oracle: type[Oracle]) -> Attempt:
    judged = _judged(held, oracle)
    verdicts = [verdict for verdict, _ in judged]
    able = [(v, c) for v, c in judged if c is not None and not v.reasons and _is_wanted(v, held)]
    if held.config.model.quant != stored.config.model.quant:  # monolithic kernels support only the stored format
        able = [(v, c) for v, c in able if v.prepare_finalize != INSIDE]
    return Attempt(held, verdicts, able)


def _rejected_format(attempt: Attempt) -> RejectedFormat:
    against = {
        name: reasons
        for name, experts in EXPERTS.items()
        if not experts.traits.definition and (reasons := reasons_of(EXPERTS, name, attempt.problem))
    }
    lines = [f"{name} {', '.join(map(str, reasons))}" for name, reasons in against.items()]
    left = "; only the reference backend reads it" if attempt.able else ""
    return RejectedFormat(attempt.problem.weights.name, ("; ".join(lines) or "no transport supports it") + left)


def judge(problem: Problem, oracle: type[Oracle]) -> list[Verdict]:
    """The verdict on every registered pair with the stored weights, without pins, even if none is eligible."""
    _check_type(problem, oracle)
    return [verdict for verdict, _ in _judged(problem, oracle)]


def _check_type(problem: Problem, oracle: type[Oracle]) -> None:
    if (kind := problem.config.router.kind) in TRAINING_KINDS:
        raise UnsupportedError(
            f"router.kind = {kind} is for training, and {problem.config.model.name} is to be served",
            ["to train: moe_mk.lab.training.TrainingMoE(config, comm)", "to serve: router.kind = topk"],
        )
    if problem.config.model.quant.weights not in oracle.stored:
        stored, served = problem.config.model.quant.weights, ", ".join(sorted(oracle.stored))
        raise ConfigError(f"oracle {oracle.name!r} serves {served}; these experts are {stored!r}")


def _judged(problem: Problem, oracle: type[Oracle]) -> list[tuple[Verdict, Candidate | None]]:
    """The verdict on every pair; no candidate for one with a backend from elsewhere that may not be selected or fails.

    Backends of this package are evaluated first, and none of them depends on what is registered besides.
    """
    against = {name: reasons_of(PREPARE_FINALIZE, name, problem.as_sent) for name in PREPARE_FINALIZE}
    of_experts = {name: _reasons_of_experts(name, problem, oracle) for name in EXPERTS}
    judged: list[tuple[Verdict, Candidate | None]] = []
    for name in PREPARE_FINALIZE:
        for experts in EXPERTS:
            foreign = PREPARE_FINALIZE.is_foreign(name) or EXPERTS.is_foreign(experts)
            reasons = [*against[name], *of_experts[experts]]
            judged.append(_pair(name, experts, reasons, problem, oracle, foreign=foreign))
    for experts in MONOLITHIC:
        judged.append(_whole(experts, problem, oracle))
    return judged


def _reasons_of_experts(name: str, problem: Problem, oracle: type[Oracle]) -> list[Reason]:
    """All reasons against experts; certified ones from elsewhere must have been timed in what they compute."""
    reasons = reasons_of(EXPERTS, name, problem)
    if reasons or is_named(EXPERTS, name, problem):
        return reasons
    reason = reason_against(EXPERTS, name, problem, oracle.compute_scheme(problem, EXPERTS[name].traits))
    return [] if reason is None else [reason]


def _pair(
    name: str, experts_name: str, reasons: list[Reason], problem: Problem, oracle: type[Oracle], *, foreign: bool
) -> tuple[Verdict, Candidate | None]:  # fmt: skip
    if any(reason.code in CODES for reason in reasons):
        return Verdict(name, experts_name, tuple(reasons), None), None
    transport, experts = PREPARE_FINALIZE[name], EXPERTS[experts_name]
    try:
        compute = oracle.compute_scheme(problem, experts.traits)
        wire = oracle.wire_scheme(problem, transport.traits, compute)
        every = (*reasons, *pair_reasons(transport.traits, experts.traits, problem))
        found = Candidate(name, experts_name, experts.traits, transport, every, wire, compute, experts.workspace_bytes)
        return _priced(_with_memory(found, problem), problem)
    except unless_signalled(Exception) as error:
        if not foreign or isinstance(error, ConfigError):
            raise
        return Verdict(name, experts_name, (*reasons, failed("traits or estimates", error)), None), None


def _whole(name: str, problem: Problem, oracle: type[Oracle]) -> tuple[Verdict, Candidate | None]:
    from moe_mk.prepare_finalize.all_gather import AllGather
    from moe_mk.prepare_finalize.no_ep import NoEP

    whole, transport = MONOLITHIC[name], NoEP if problem.ranks == 1 else AllGather
    against = [*transport.reasons_against(problem), *reasons_of(MONOLITHIC, name, problem)]
    reasons = (*against, *wire_reasons(frozenset({"plain"}), problem), *_whole_reasons(problem))
    if any(reason.code in CODES for reason in reasons):
        return Verdict(INSIDE, name, reasons, None), None
    compute, plain = oracle.compute_scheme(problem, whole.traits), problem.dtype
    found = Candidate(INSIDE, name, whole.traits, transport, reasons, plain, compute, whole.workspace_bytes)
    return _priced(_with_memory(found, problem), problem)


def _whole_reasons(problem: Problem) -> Iterator[Reason]:
    kernel = problem.config.kernel
    if kernel.tiles > 1:
        yield Reason("tiles", f"a monolithic kernel cannot be split into {kernel.tiles} tiles", "kernel.tiles = 1")
    if kernel.invariant:
        yield Reason("invariant", "a monolithic kernel sums over experts itself", "kernel.invariant = false")


def _priced(candidate: Candidate, problem: Problem) -> tuple[Verdict, Candidate]:
    emulated = any(runs_emulated(traits, problem) for traits in (candidate.traits, candidate.transport_type.traits))
    price, source = None, "model"
    if not candidate.reasons:
        if candidate.experts in EXPERTS:
            price, source = _time_of(candidate.experts, problem, candidate.compute)
        if price is None:
            fp8_math = candidate.compute.block is not None
            price = cost.experts_us(problem, candidate.traits, fp8_math=fp8_math)
        price += cost.transport_us(problem.as_sent, candidate.volume(problem), candidate.wire)
    verdict = Verdict(candidate.transport, candidate.experts, candidate.reasons, price, False, source, emulated)
    return verdict, candidate


def _time_of(name: str, problem: Problem, compute: QuantScheme) -> tuple[float | None, str]:
    """Measured microseconds of experts or None, and the source of the estimate; of others' what was measured here."""
    timed = EXPERTS.is_foreign(name) and problem.device.kind == "cpu"
    if timed and (measured := measured_us(name, problem, compute)) is not None:
        return measured, "measured"
    return EXPERTS[name].priced(problem, compute)


def _with_memory(candidate: Candidate, problem: Problem) -> Candidate:
    need, have = weights_bytes(problem) + candidate.buffers(problem).total, room_of(problem)
    if need <= have:
        return candidate
    sizes = f"{amount(need)} of weights and buffers exceed the device's {amount(have)}"
    fewer = "use fewer tokens a call, or a smaller kernel.max_num_tokens"
    fix = "use more ranks" if weights_bytes(problem) > have else fewer  # more ranks would send more rows here
    return replace(candidate, reasons=(*candidate.reasons, Reason("memory", sizes, fix)))


def _decision(
    problem: Problem, oracle: type[Oracle], verdicts: list[Verdict], winner: Verdict, candidate: Candidate, rivals: int
) -> Decision:
    order = sorted(
        verdicts, key=lambda v: (v is not winner, v.cost_us is None, v.emulated, v.cost_us or 0.0, len(v.reasons))
    )
    volume, config = candidate.volume(problem), problem.config
    return Decision(
        problem=problem,
        oracle=oracle.name,
        verdicts=(replace(winner, chosen=True), *order[1:]),
        because=_because(problem, rivals),
        wire=candidate.wire,
        compute=candidate.compute,
        dispatch_bytes=cost.dispatch_bytes(problem.as_sent, volume, candidate.wire),
        combine_bytes=cost.combine_bytes(problem, volume),
        weights_bytes=weights_bytes(problem),
        buffers=candidate.buffers(limited_to(problem, config.kernel.max_num_tokens)),
        least_buffers=candidate.buffers(limited_to(problem, problem.num_tokens)),
        tokens_that_fit=most_tokens(problem, candidate.buffers),
        graph_safe=candidate.traits.graph_safe and candidate.transport_type.traits.graph_safe,
        deterministic=candidate.traits.deterministic and candidate.transport_type.traits.deterministic,
        budget=candidate.transport_type.budget(problem),
        link=candidate.transport_type.link(problem),
        gate=choose_gate_tier(
            problem.device.arch if problem.device.kind == "cuda" else None,
            problem.num_tokens,
            problem.dtype.dtype,
            config.router.router_dtype,
            _gate_kernels(candidate, problem),
        ),
    )


def _gate_kernels(candidate: Candidate, problem: Problem) -> frozenset[str]:
    """The native gate is in the library that native experts load; it supports sigmoid and softmax scores only."""
    config = problem.config
    scored = config.router.scoring_func in ("sigmoid", "softmax")
    native = candidate.traits.library == COMPILER and config.kernel.fused_router and scored
    few = {"small_m"} if SMALL_M_LIBRARY in problem.installed else set()
    return frozenset({"native", *few} if native else few)


def check_pins(kernel: KernelConfig) -> None:
    """Raise ConfigError, with the nearest name, for a pinned or trusted backend that is not registered."""
    if kernel.prepare_finalize not in ("auto", INSIDE):
        PREPARE_FINALIZE[kernel.prepare_finalize]
    if kernel.experts != "auto" and kernel.experts not in MONOLITHIC:
        EXPERTS[kernel.experts]
    registries: tuple[Registry[Any], ...] = (PREPARE_FINALIZE, EXPERTS, MONOLITHIC, ORACLES)
    known = [name for registry in registries for name in (*registry, *registry.broken)]
    wheels = {registry.distribution(name) for registry in registries for name in registry} - {""}
    for name in kernel.trust:
        if name not in (*known, *wheels):
            near = did_you_mean(name, [*known, *sorted(wheels)])
            raise ConfigError(f"kernel.trust names {name!r}, which is not registered{near}{more_backends()}")


def _is_wanted(verdict: Verdict, problem: Problem) -> bool:
    kernel = problem.config.kernel
    return kernel.prepare_finalize in ("auto", verdict.prepare_finalize) and kernel.experts in ("auto", verdict.experts)


def _pins(problem: Problem) -> str:
    kernel = problem.config.kernel
    pins = {"kernel.prepare_finalize": kernel.prepare_finalize, "kernel.experts": kernel.experts}
    return ", ".join(f"{key} = {name}" for key, name in pins.items() if name != "auto")


def _because(problem: Problem, rivals: int) -> str:
    pins = _pins(problem)
    if pins and not rivals:
        return f"pinned by {pins}"
    if not rivals:
        return "the only eligible pair"
    return f"lowest cost of {rivals + 1} eligible pairs" + (f", pinned by {pins}" if pins else "")


def _nothing_serves(problem: Problem) -> str:
    pins = _pins(problem)
    pinned = f" that is pinned ({pins})" if pins else ""
    return (
        f"no pair{pinned} can serve {problem.config.model.name} with {problem.weights.name} experts on "
        f"{problem.device.name}, ep={problem.ranks}"
    )
