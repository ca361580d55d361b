"""`moe-mk explain`: the oracle's decision for any device.

Also by number of tokens, with the lower bound of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from moe_mk.config.device import DeviceProfile
from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem
from moe_mk.config.shipped import device_profile, load_config
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.external.device import is_here, profile_here, wanted_device
from moe_mk.external.library import LIBRARIES, emulated, installed
from moe_mk.lab.cli.exits import MISMATCH, OK, print_json
from moe_mk.lab.cli.fit import reads_on
from moe_mk.lab.cli.inputs import dtype_of
from moe_mk.lab.cli.options import HERE
from moe_mk.lab.cli.screen import Screen
from moe_mk.lab.cli.show import show_pairs
from moe_mk.lab.plan.roofline import LayerShape, Rates, experts_us
from moe_mk.lab.plan.wanted import ways_to
from moe_mk.oracle import Decision, libraries_of, select
from moe_mk.oracle.memory import expected_reads, room_of
from moe_mk.quant.plain import plain
from moe_mk.registry import did_you_mean
from moe_mk.text import amount

BUCKETS = (1, 16, 64, 128, 512, 1024, 4096)


def show_buckets(screen: Screen, decide: Callable[[int], Decision]) -> None:
    """One line per number of tokens: the selected pair, its cost and basis, and the lower bound of its experts.

    decide: returns the decision for a number of tokens per rank.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("tokens", "cost", "lower bound"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("pair")
    table.add_column("other experts with that transport")
    for tokens in BUCKETS:
        try:
            decision = decide(tokens)
        except UnsupportedError as refused:
            table.add_row(str(tokens), "-", "-", str(refused).splitlines()[0], "")
            continue
        chosen = decision.chosen
        pair = f"{chosen.name}, {chosen.cost_source}"
        table.add_row(
            str(tokens), f"{chosen.cost_us:,.0f} us", f"{experts_floor_us(decision):,.0f} us", pair, rivals_of(decision)
        )
    screen.fact(
        "by tokens", "the lower bound is the time to read each weight and row once, or to multiply, whichever is longer"
    )
    screen.console.print(table)


def rivals_of(decision: Decision) -> str:
    """Other eligible experts with the selected transport, cheapest first."""
    chosen = decision.chosen
    able = [
        verdict
        for verdict in decision.verdicts
        if verdict.prepare_finalize == chosen.prepare_finalize and verdict is not chosen and verdict.cost_us is not None
    ]
    ordered = sorted(able, key=lambda verdict: verdict.cost_us or 0.0)
    return ", ".join(f"{verdict.experts} {verdict.cost_us:,.0f} us" for verdict in ordered) or "none"


def experts_floor_us(decision: Decision) -> float:
    """The minimum time of both grouped GEMMs in FP8 on the most loaded rank of a decision."""
    p, model = decision.problem, decision.problem.config.model
    shape = LayerShape(model.hidden_size, p.intermediate, model.num_experts, p.config.router.top_k, ep=p.ranks)
    return experts_us(shape, p.num_tokens, Rates.of(p.device))


@dataclass(frozen=True)
class Question:
    """The options of `moe-mk explain`."""

    config: str
    """A shipped model, or a file."""
    device: str
    tokens: int
    """Of each rank."""
    nodes: int | None = None
    """None: by the device profile."""
    dtype: str = "bfloat16"
    libraries: str | None = None
    """Separated by commas; `options.HERE`: the installed ones; None: the installed ones for a device of this machine,
    else all that the device supports."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    trace: Path | None = None
    """Recorded routing, for the reads of `kernel.residency`."""


def explain_config(screen: Screen, question: Question, *, as_json: bool) -> int:
    """Decide and print. Raises ConfigError for unknown names, UnsupportedError if no pair is eligible."""
    decision = decide_on(question)
    traced = None if question.trace is None else reads_on(question.trace, decision.problem)
    if as_json:
        stated = decision.as_dict()
        if traced is not None:
            stated["residency"]["trace"] = traced
        print_json(stated)
    else:
        _, assumption = libraries_for(question.libraries, decision.problem.device, decision.problem.config)
        show(screen, decision, assumption)
        if traced is not None:
            hits, read = f"hit rate {100 * traced['hit_rate']:.3g} %", f"{amount(traced['bytes'])} read a step"
            screen.fact("trace", f"{question.trace}: {hits}, {read} of a layer and rank, as moe-mk fit simulates it")
        divides = decision.problem.config.model.num_experts % decision.problem.ranks == 0
        if divides and decision.problem.config.model.quant.is_fp8 and decision.problem.device.fp8_tflops:
            show_buckets(screen, lambda tokens: decide_on(replace(question, tokens=tokens)))
    return OK


def explain_want(screen: Screen, question: Question, want: str, *, as_json: bool) -> int:
    """Print the smallest sets of changes that make a backend eligible; exit code 1 if none was found."""
    problem = problem_of(question)
    ways, reasons = ways_to(problem, want)
    if as_json:
        each = [
            {
                "changes": [str(change) for change in way.changes], "pair": way.decision.chosen.name,
                "cost_us": way.decision.chosen.cost_us,
            }
            for way in ways
        ]  # fmt: skip
        print_json({"want": want, "ways": each, "reasons": reasons})
        return OK if ways else MISMATCH
    screen.fact("wanted", f"{want} on {problem.device.name}, ep={problem.ranks}, {problem.num_tokens} tokens per rank")
    for way in ways:
        screen.fact("change", way.line())
    for reason in reasons:
        screen.fact("against", reason)
    if not ways:
        screen.fact("", "no set of up to 4 changes of settings, packages, sizes and devices makes it eligible")
    return OK if ways else MISMATCH


def decide_on(question: Question) -> Decision:
    """The oracle's decision; kernel.max_num_tokens is raised to the number of tokens if necessary."""
    return select(problem_of(question))


def problem_of(question: Question) -> Problem:
    """The problem that the options describe."""
    profile = device_profile(question.device)
    settings = load_config(question.config).with_(**question.overrides)
    settings = settings.with_(max_num_tokens=max(question.tokens, settings.kernel.max_num_tokens))
    if question.nodes is not None:
        ranks = settings.parallel.ep * settings.parallel.tp
        if ranks % question.nodes:
            raise ConfigError(f"{ranks} ranks do not divide over --nodes {question.nodes}; use a divisor of {ranks}")
        profile = profile.model_copy(update={"ranks_per_node": ranks // question.nodes})
    dtype = plain(dtype_of(question.dtype))
    libraries, _ = libraries_for(question.libraries, profile, settings)
    return Problem(settings, profile, dtype, question.tokens, libraries, emulated())


def active_fraction(config: MoEConfig) -> float:
    """Fraction of the parameters used by one token: of the model if its size is known, else of this layer."""
    model = config.model
    if model.total_params_b and model.active_params_b:
        return model.active_params_b / model.total_params_b
    shared = model.shared_size / model.moe_intermediate_size
    chosen = config.router.top_k * model.num_experts / model.scored_experts
    return (chosen + shared) / (model.num_experts + shared)


def show(screen: Screen, decision: Decision, assumption: str = "") -> None:
    """Print the decision. assumption: which libraries it presumes."""
    p, model, decided = decision.problem, decision.problem.config.model, decision.as_dict()["bytes"]
    active = f"{100 * active_fraction(p.config):.2f} % of parameters active"
    experts = f"{model.num_experts} experts, top-{p.config.router.top_k}, {p.weights.name}"
    screen.fact("model", f"{model.name}: {experts}, {active}")
    nodes = f"{p.nodes} {'node' if p.nodes == 1 else 'nodes'} of {p.device.name}"
    screen.fact("fabric", f"ep={p.ranks} tp={p.config.parallel.tp} on {nodes}, {p.num_tokens} tokens per rank")
    if assumption:
        screen.fact("libraries", assumption)
    screen.fact("decision", f"{decision.chosen.name}: {decision.because}")
    for warning in decision.warnings:
        screen.fact("warning", warning)
    graphs = "can be captured in a CUDA graph" if decision.graph_safe else "cannot be captured in a CUDA graph"
    screen.fact("", f"wire {decision.wire.name}, experts compute {decision.compute.name}, {graphs}")
    sent, returned = amount(decided["dispatch"]), amount(decided["combine"])
    screen.fact("bytes", f"{sent} dispatch, {returned} combine, per rank and call")
    for label, line in zip(("memory", "", "", ""), memory_lines(decision), strict=False):
        screen.fact(label, line)
    asked = p.config.kernel.comm_units
    if decision.budget is not None:
        setting = " [kernel.comm_units]" if asked is None else ""
        screen.fact("budget", f"{decision.chosen.prepare_finalize} keeps {decision.budget}{setting}")
    elif asked is not None:
        screen.fact("budget", f"kernel.comm_units = {asked} changes nothing: a single rank has no transport")
    if decision.link is not None:
        screen.fact("link", str(decision.link))
    screen.fact("gate", decision.gate.tier)
    for tier, reasons in decision.gate.reasons.items():
        screen.fact("", f"not {tier}: {'; '.join(reasons)}")
    show_pairs(screen, decision.verdicts)


def memory_lines(decision: Decision) -> list[str]:
    """Memory by part, with the current and a smaller kernel.max_num_tokens, and the largest one that fits."""
    p, pair, held = decision.problem, decision.chosen, decision.buffers
    limit, fits, device = p.config.kernel.max_num_tokens, decision.tokens_that_fit, p.device
    most = f"buffers of at most {amount(held.total)} for {limit} tokens per rank [kernel.max_num_tokens]"
    parts = {"rows": held.rows, pair.experts: held.workspace, pair.prepare_finalize: held.transport}
    by = ", ".join(f"{who} {amount(num_bytes)}" for who, num_bytes in parts.items() if num_bytes)
    least = "" if p.num_tokens == limit else f"; {amount(decision.least_buffers.total)} with a limit of {p.num_tokens}"
    lines = [
        f"{amount(decision.weights_bytes)} of experts, {most}",
        f"worst routing (all tokens of all ranks on this rank): {by}{least}",
    ]
    if reads := expected_reads(p):
        lines.insert(1, f"{reads}; of other routing: moe-mk fit")
    if fits < limit:
        lines.append(f"more than the {amount(room_of(p))} of {device.name}, which hold a limit of {fits}")
    return lines


def is_profile_here(profile: DeviceProfile) -> bool:
    """Whether this machine has a device of a profile; every machine has a CPU."""
    gpu = wanted_device("cuda")
    return profile.kind == "cpu" or (is_here(gpu) and profile_here(gpu).name == profile.name)


def libraries_for(names: str | None, device: DeviceProfile, config: MoEConfig) -> tuple[frozenset[str], str]:
    """The libraries of a question, and a sentence on them; empty for a CPU. Raises ConfigError for an unknown one."""
    if names is None and not is_profile_here(device):
        assumed = libraries_of(device)
        here = f"there is no {device.name} here; --installed assumes only what is installed here"
        return assumed, f"assumed: {_listed(assumed)} ({here})"
    if names in (None, HERE):
        found = installed(config.kernel.cache_dir)
        return found, "" if device.kind == "cpu" else f"installed here: {_listed(found)}"
    wanted = frozenset(name for name in str(names).split(",") if name)
    for name in wanted - set(LIBRARIES):
        raise ConfigError(f"--installed names {name!r}{did_you_mean(name, list(LIBRARIES))}")
    return wanted, f"as given by --installed: {_listed(wanted)}"


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"
