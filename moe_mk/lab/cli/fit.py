"""`moe-mk fit`: hit rates and predicted time of experts larger than memory, over a recorded routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from moe_mk.config.problem import Problem
from moe_mk.config.shipped import device_profile, load_config
from moe_mk.errors import ConfigError
from moe_mk.experts.residency import POLICIES
from moe_mk.lab.cli.exits import OK, print_json
from moe_mk.lab.cli.options import bytes_of, enough
from moe_mk.lab.cli.outputs import expect_outputs
from moe_mk.lab.cli.residency import Curve, save_residency_plot
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.plan.residency import Machine, Outcome, Recorded, compare, simulate, simulate_page_cache, steps_of
from moe_mk.lab.trace.importers import import_trace
from moe_mk.lab.trace.routing import RoutingTrace, TraceError
from moe_mk.layer.settings import expert_map_of
from moe_mk.oracle.cost import expert_bytes
from moe_mk.oracle.memory import expected_reads
from moe_mk.quant.plain import BF16
from moe_mk.text import amount

PARTS = (0.125, 0.25, 0.375, 0.5, 0.75)
"""Slots of the first table, as parts of the experts of a layer."""
AVERAGED = 100
"""Points of a curve in the picture; each is the mean of as many steps as that takes."""


@dataclass(frozen=True)
class FitOrder:
    """The options of `moe-mk fit`."""

    config: str
    trace: Path
    memory: str
    disk: str
    ram: str
    faults: str | None
    other_us: float
    tokens: int
    gate_trace: Path | None
    overrides: Mapping[str, Any]
    plot: Path | None = None


def fit(screen: Screen, order: FitOrder, *, as_json: bool) -> int:
    """Simulate and print. Raises ConfigError, or TraceError for a trace that does not fit the configuration."""
    memory = bytes_of("--memory", order.memory)
    expect_outputs({"--plot": order.plot})
    config = load_config(order.config).with_(**order.overrides)
    trace = read_trace(order.trace, config.model.num_experts)
    early = None if order.gate_trace is None else read_trace(order.gate_trace, config.model.num_experts)
    steps = steps_of(trace, order.tokens)
    early_steps = None if early is None else steps_of(early, order.tokens)
    if early_steps is not None and [len(step) for step in early_steps] != [len(step) for step in steps]:
        raise TraceError(f"{order.gate_trace} has other steps or layers than {order.trace}; record both together")
    each = expert_bytes(Problem(config, device_profile("cpu"), BF16, order.tokens))
    faults = None if order.faults is None else bytes_of("--faults", order.faults, per_second=True)
    disk, ram = (bytes_of(f"--{name}", getattr(order, name), per_second=True) for name in ("disk", "ram"))
    machine = Machine(each, disk, ram, order.other_us * 1e-6, faults)
    layers, experts = len(steps[0]), config.model.num_experts
    slots = min(memory // (layers * each), experts)
    if slots < 1:
        raise ConfigError(
            f"--memory {order.memory} is less than one expert of {amount(each)} in each of {layers} layers; "
            f"give at least {enough(layers * each)}"
        )
    recorded = Recorded(steps, experts, trace.facts.top_k, early_steps)
    pool = min(memory // each, layers * experts) if layers > 1 else None
    outcomes = compare(recorded, machine, slots, list(POLICIES), pool)
    by_slots = {}
    for count in sorted({max(1, round(p * experts)) for p in PARTS}):
        found = [simulate_page_cache(recorded, machine, count)]
        found += [simulate(recorded, machine, count, name) for name in (*POLICIES, "belady")]
        by_slots[count] = {one.name: one.hit_rate for one in found}
    if order.plot is not None:
        save_residency_plot([_curve(one, each) for one in outcomes if "prefetch" not in one.name], order.plot)
    if as_json:
        stated = {
            "expert_bytes": each, "layers": layers, "experts": experts, "slots": slots, "pool_slots": pool,
            "steps": len(steps) - recorded.half, "hit_rates_by_slots": by_slots,
            "outcomes": [
                {
                    "name": one.name, "hit_rate": one.hit_rate, "reads_per_step": one.reads / len(one.seconds),
                    "step_s": one.step_s, "tokens_per_s": order.tokens / one.step_s, "error": one.error,
                    "prefetch_right": one.right / max(one.predicted, 1), "prefetch_wasted": one.wasted,
                }
                for one in outcomes
            ],
        }  # fmt: skip
        return print_json(stated)
    whole = amount(layers * experts * each)
    screen.fact(
        "model", f"{config.model.name}: {experts} experts of {amount(each)}, {layers} layers in the trace, {whole}"
    )
    screen.fact(
        "memory", f"{amount(memory)}: {slots} of {experts} experts a layer; disk {amount(disk)}/s, ram {amount(ram)}/s"
    )
    screen.fact(
        "trace", f"{len(steps)} steps of {order.tokens} tokens; the first half fills the slots, the second is counted"
    )
    screen.fact("hit rates", "by slots of a layer")
    screen.console.print(_table_of_rates(by_slots, experts))
    of_all = "" if pool is None else f", pool: {pool} slots of all layers together"
    screen.fact("predicted", f"with {slots} slots a layer{of_all}; x: the time of the page cache divided by this time")
    screen.console.print(_table_of_outcomes(outcomes, order.tokens))
    return OK


def reads_on(file: Path, problem: Problem) -> dict[str, float]:
    """Hit rate and bytes read of a step of one layer, mean of all ranks, with `kernel.residency` on a recorded routing.

    Raises ConfigError for a layer without it or in a pool, TraceError for a trace that does not fit.
    """
    residency, expected = problem.config.kernel.residency, expected_reads(problem)
    if residency is None or expected is None:
        how = "--set 'residency={slots: N, store: FOLDER}'"
        raise ConfigError(f"--trace states the hit rate of {how} with fewer slots than experts; of a pool: moe-mk fit")
    trace, experts = read_trace(file, problem.config.model.num_experts), expert_map_of(problem.config)
    steps, found = steps_of(trace, problem.num_tokens * problem.ranks), []
    for rank in range(problem.ranks):
        local = {expert: slot for slot, expert in enumerate(experts.local_to_global(rank))}
        own = [[tuple(sorted(local[each] for each in layer if each in local)) for layer in step] for step in steps]
        recorded = Recorded(own, len(local), trace.facts.top_k)
        found.append(simulate(recorded, Machine(expected.slot_bytes, 1.0, 1.0), expected.slots, residency.policy))
    uses, hits, reads = (sum(getattr(one, name) for one in found) for name in ("uses", "hits", "reads"))
    calls = len(found) * len(found[0].seconds) * len(steps[0])
    return {"hit_rate": hits / max(uses, 1), "bytes": reads / calls * expected.slot_bytes}


def read_trace(file: Path, num_experts: int) -> RoutingTrace:
    """Import a trace. Raises TraceError for one of another number of experts."""
    trace = import_trace(file, num_experts=num_experts)
    if trace.facts.num_experts != num_experts:
        raise TraceError(
            f"trace {file} has {trace.facts.num_experts} experts, the configuration {num_experts}; name its model, or "
            f"add --set num_experts={trace.facts.num_experts}"
        )
    return trace


def _curve(one: Outcome, expert_bytes: int) -> Curve:
    """Hits and reads over the counted steps."""
    size = max(1, len(one.by_step) // AVERAGED)
    parts = [one.by_step[at : at + size] for at in range(0, len(one.by_step), size)]
    hits = [sum(hit for _, hit, _ in part) / max(sum(use for use, _, _ in part), 1) for part in parts]
    num_bytes = [sum(reads for *_, reads in part) / len(part) * expert_bytes for part in parts]
    return Curve(one.name, hits, num_bytes, every=size)


def _table_of_rates(by_slots: Mapping[int, Mapping[str, float]], experts: int) -> Table:
    table = table_of(("slots", *next(iter(by_slots.values()))), pad_edge=False)
    for slots, rates in by_slots.items():
        table.add_row(f"{slots} of {experts}", *(f"{100 * rate:.1f} %" for rate in rates.values()))
    return table


def _table_of_outcomes(outcomes: list[Outcome], tokens: int) -> Table:
    heads = ("policy", "hits", "reads/step", "ms/step", "tokens/s", "x", "predicted right")
    table = table_of(heads, left=("policy",), pad_edge=False)
    base = outcomes[0].step_s
    for one in outcomes:
        right = f"{100 * one.right / one.predicted:.0f} %" if one.predicted else ""
        error = f" +- {100 * one.error:.0f} %"
        table.add_row(
            one.name, f"{100 * one.hit_rate:.1f} %", f"{one.reads / len(one.seconds):.2f}", f"{1e3 * one.step_s:.4g}",
            f"{tokens / one.step_s:.4g}{error}", f"{base / one.step_s:.2f}", right,
        )  # fmt: skip
    return table
