"""Terminal output of a run: checkpoint, plan, decision, times, load, verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from moe_mk.comm.traffic import INTER_NODE, INTRA_NODE
from moe_mk.config.equation import FILE
from moe_mk.config.moe import MoEConfig
from moe_mk.config.shipped import load_config, shipped_models
from moe_mk.lab.cli.checkpoints import show_checkpoint
from moe_mk.lab.cli.measure import StageTimes
from moe_mk.lab.cli.plan import RunPlan
from moe_mk.lab.cli.report import Report
from moe_mk.lab.cli.residency import residency_lines, residency_table
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.verify import Verification
from moe_mk.oracle.memory import expected_reads
from moe_mk.oracle.verdict import Decision, Verdict, explain_pairs
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.text import amount
from moe_mk.weights.checkpoint import ranges

HEAT = ("grey15", "blue", "cyan", "green", "yellow", "red")
LONGEST = 60
"""Characters of a list of experts."""


def show_plan(screen: Screen, plan: RunPlan) -> None:
    """Print the checkpoint, the experts and memory of each rank, and the decision."""
    show_checkpoint(screen, plan.facts)
    if subset := subset_note(plan.settings.config):
        screen.fact("subset", subset)
    p, parallel = plan.decision.problem, plan.settings.config.parallel
    tokens = "+".join(map(str, plan.counts)) + " tokens"
    if len(plan.counts) < p.ranks:
        tokens += ", the same on all ranks"
    threads = plan.settings.threads
    where = f"{p.device.name}, {threads} {'thread' if threads == 1 else 'threads'} per rank"
    nodes = "" if p.nodes == 1 else f"{p.nodes} nodes of {p.ranks_per_node} ranks, "
    screen.fact("plan", f"ep={p.ranks} tp={parallel.tp} on {nodes}{where}, {p.dtype.name}, {tokens}")
    for rank, (experts, memory) in enumerate(zip(plan.experts, plan.memory, strict=True)):
        sizes = f"experts {amount(memory.experts)}, shared {amount(memory.shared)}, gate {amount(memory.gate)}"
        total = f"buffers at most {amount(memory.buffers)}, total {amount(memory.total)}"
        screen.fact(f"rank {rank}", f"experts {listed(experts)}: {sizes}, {total}")
    if reads := expected_reads(replace(p, num_tokens=max(1, *plan.counts))):
        screen.fact("residency", str(reads))
    show_decision(screen, plan.decision)


def show_decision(screen: Screen, decision: Decision) -> None:
    """Print the selected pair, and every other pair with its cost or all reasons against it."""
    screen.fact("decision", f"{decision.chosen.name}: {decision.because}")
    sent, returned = amount(decision.dispatch_bytes), amount(decision.combine_bytes)
    bytes_ = f"about {sent} dispatch and {returned} combine per rank and call"
    gate = f"gate {decision.gate.tier}"
    screen.fact("", f"wire {decision.wire.name}, experts compute {decision.compute.name}, {gate}, {bytes_}")
    show_pairs(screen, decision.verdicts)


def subset_note(config: MoEConfig) -> str:
    """The effect of a checkpoint with fewer experts than its model; empty for a complete layer."""
    name, experts, groups = config.model.name, config.model.num_experts, config.router.num_expert_group
    twins = [shipped for shipped in map(load_config, shipped_models()) if shipped.model.name == name]
    full = max(twins, key=lambda shipped: shipped.model.num_experts, default=None)
    if full is None or experts >= full.model.num_experts:
        return ""
    all_groups = full.router.num_expert_group
    note = f"{experts} of the {full.model.num_experts} experts of {name}"
    if (groups, all_groups) != (1, 1):
        note += (
            f", in {groups} groups of {experts // groups}, not {all_groups} of {full.model.num_experts // all_groups}"
        )
    return f"{note}: tokens are routed among these only"


def show_results(screen: Screen, report: Report) -> None:
    """Print load time and memory, times of stages, sent bytes, and a heat strip of expert load."""
    for rank in report.ranks:
        peak = f"peak memory {amount(rank.peak_bytes)}, including mapped files"
        screen.fact(f"rank {rank.rank}", f"read {amount(rank.bytes)}, {peak}")
    total, read, seconds = sum(rank.bytes for rank in report.ranks), report.read_seconds, report.load_seconds
    rate = f"{amount(total / max(read, 1e-9))}/s over all ranks"
    layout = f"converted to the layout of {report.decision['chosen']['experts']} after {seconds:.2f} s"
    screen.fact("load", f"{amount(total)} read and checked in {read:.2f} s ({rate}), {layout}")
    screen.console.print(stage_table(report.prefill, report.decode))
    if report.residency is not None:
        screen.facts(residency_lines(report.residency))
        screen.console.print(residency_table(report.residency, 1))
    screen.fact("sent", sent_bytes(report.traffic, report.decision))
    if report.plan.decision.problem.nodes > 1 and report.traffic:
        near, far = report.links[INTRA_NODE], report.links[INTER_NODE]
        screen.fact("", f"of these, {amount(near)} inside the node and {amount(far)} between nodes")
    show_load(screen, report)


def sent_bytes(traffic: Mapping[str, int], decision: Mapping[str, Any]) -> str:
    """Counted bytes by phase; for libraries, whose traffic is not counted, the planned bytes."""
    name = decision["chosen"]["prepare_finalize"]
    library = PREPARE_FINALIZE[name].traits.library if name in dict(PREPARE_FINALIZE.items()) else ""
    if library and not traffic:
        dispatch, combine = (decision["bytes"][way] for way in ("dispatch", "combine"))
        planned = f"{amount(dispatch)} dispatch, {amount(combine)} combine per rank"
        return f"not counted (sent by {library}); planned {planned}"
    sent = ", ".join(f"{phase} {amount(count)}" for phase, count in traffic.items()) or "nothing"
    return f"{sent} (rank 0, one prefill)"


def show_load(screen: Screen, report: Report) -> None:
    """Print one strip per rank: one cell per expert, coloured by its number of tokens."""
    load, hottest = report.expert_load, max(report.expert_load)
    for rank in report.ranks:
        strip = Text.assemble((f"load rank {rank.rank:<2}", "bold cyan"))
        for expert in rank.experts:
            strip.append("█", HEAT[min(load[expert] * len(HEAT) // (hottest + 1), len(HEAT) - 1)])
        total = sum(load[expert] for expert in rank.experts)
        screen.console.print(strip, Text(f"{total} assignments", "dim"))
    mean = sum(load) / len(load)
    balance = f"max/mean {hottest / mean:.2f}" if hottest else "no assignments"
    screen.fact("balance", f"tokens per expert: min {min(load)}, mean {mean:.1f}, max {hottest}; {balance}")


def show_verdict(screen: Screen, judged: Verification, decision: Decision, equation: str | None = None) -> None:
    """Print pass or fail, with the errors and the origin of their limits.

    equation: the origin of the equation that layer and reference share, if nothing else has checked it.
    """
    if not judged.num_tokens:
        screen.fact("verify", "no tokens, nothing was compared")
        return
    word = Text("PASS", "bold green") if judged.passed else Text("FAIL", "bold red")
    same = judged.routing_equal + judged.routing_ties
    ties = f", {judged.routing_ties} of them by a tie" if judged.routing_ties else ""
    apart = f"cosine {judged.cosine:.6f}, largest difference {judged.max_abs:.2e}"
    screen.fact("verify", f"{same} of {judged.num_tokens} tokens routed as in the reference{ties}; {apart}")
    worst = f"worst token {judged.worst_token_error:.2e} (limit {judged.worst_token_limit:.2e})"
    screen.fact("", f"relative error {judged.error:.2e} (limit {judged.limit:.2e}), {worst}")
    formats = f"{decision.problem.weights.name} weights, {decision.compute.name} activations, {decision.wire.name} wire"
    source = f"  against an independent reference; the limits follow from {formats}"
    if judged.passed and equation is not None:
        word, source = Text("CONSISTENT", "bold yellow"), f"  with {FILE}; the limits follow from {formats}"
    screen.fact("", word.append(source, "default not bold"))
    if equation is not None:
        screen.fact("", f"  nothing independent has checked {FILE} ({equation}); add --against transformers")


def show_pairs(screen: Screen, verdicts: Sequence[Verdict]) -> None:
    """Print eligible pairs with their cost; then each rejection reason once, with the backends that cause it."""
    for line in explain_pairs(verdicts, screen.console.width):
        style = "bold green" if line.startswith("*") else ("dim" if line.startswith("  refused") else "")
        screen.console.print(Text(line, style))


def stage_table(prefill: StageTimes | None, decode: StageTimes | None) -> Table:
    """Milliseconds of each stage; with several batches, shared experts run during dispatch."""
    title = "milliseconds per stage: median of the forward passes, slowest rank"
    named = [(name, times) for name, times in (("prefill", prefill), ("decode", decode)) if times is not None]
    heads = (f"{name} {'+'.join(map(str, times.tokens))} tok" for name, times in named)
    table = table_of(("stage", *heads), left=("stage",), title=title)
    travel = any(len(times.tokens) > 1 for _, times in named)
    for stage in named[0][1].stages if named else ():
        label = "shared, during dispatch" if stage == "shared" and travel else stage
        table.add_row(label, *(f"{times.stages[stage]:.2f}" for _, times in named))
    table.add_row("forward", *(f"{times.total:.2f}" for _, times in named), style="bold")
    return table


def listed(experts: tuple[int, ...]) -> str:
    """Experts as ranges, shortened with their number if too long."""
    text = ranges(sorted(experts))
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rsplit(',', 1)[0]}, ... ({len(experts)})"
