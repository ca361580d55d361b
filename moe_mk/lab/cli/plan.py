"""The plan of a run: all checks that are possible before processes are started and weights are read."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from moe_mk.config.problem import Problem
from moe_mk.errors import ConfigError, WeightError
from moe_mk.external.device import profile_here, usable_device
from moe_mk.external.library import emulated, installed
from moe_mk.lab.cli.inputs import DTYPES, RunSettings, check_token_ids, token_counts
from moe_mk.lab.cli.outputs import expect_outputs
from moe_mk.lab.cli.residency import expect_budget
from moe_mk.lab.cli.world import World
from moe_mk.lab.verify import check_fault
from moe_mk.layer.report import MemoryReport, memory_report
from moe_mk.layer.settings import expert_map_of, stated
from moe_mk.oracle import select
from moe_mk.oracle.verdict import Decision
from moe_mk.quant.plain import plain
from moe_mk.weights.checkpoint import find_prefix
from moe_mk.weights.completeness import some
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.inspect import CheckpointFacts, inspect_checkpoint


@dataclass(frozen=True)
class RunPlan:
    """A run that has passed all checks."""

    settings: RunSettings
    """As requested; the configuration has the sizes of this run."""
    facts: CheckpointFacts
    decision: Decision
    counts: tuple[int, ...]
    """Tokens of each batch: one per EP rank, or one for all if tokens are replicated."""
    experts: tuple[tuple[int, ...], ...]
    """Of each rank."""
    memory: tuple[MemoryReport, ...]
    """Of each rank."""
    command: tuple[str, ...]
    """The command line."""

    def batch_of(self, ep_rank: int) -> int:
        """The batch of a rank."""
        return ep_rank if len(self.counts) > 1 else 0


def plan_run(settings: RunSettings, world: World) -> RunPlan:
    """Check the settings and select backends for the tokens of this run.

    Raises ConfigError, ShapeError or WeightError for invalid input, UnsupportedError if it cannot run here.
    """
    device = usable_device(settings.device)
    if settings.inject:
        check_fault(settings.inject, settings.config.model.quant.weight_scheme)
    files = {"--out": settings.out, "--plot": settings.plot, "--trace": settings.trace}
    expect_outputs(files | {"--record-trace": settings.record_trace})
    facts = _checked(inspect_checkpoint(settings.checkpoint), settings.layer, settings.prefix)
    replicated = settings.config.parallel.tokens == "replicated"
    counts = token_counts(settings, 1 if replicated else world.ep)
    limits = {"max_num_tokens": max(1, *counts), "ranks_per_node": _ranks_per_node(settings, world)}
    config = stated(settings.config, settings.checkpoint, settings.layer, settings.prefix)
    config = config.with_(ep=world.ep, tp=world.tp, **limits)
    check_token_ids(replace(settings, config=config), counts)
    dtype = plain(DTYPES[settings.dtype])
    most = config.kernel.max_num_tokens
    decision = select(
        Problem(config, profile_here(device), dtype, most, installed(config.kernel.cache_dir), emulated())
    )
    expect_budget(decision, settings.memory)
    experts = expert_map_of(config)
    owners = [rank // world.tp for rank in range(world.size)]
    return RunPlan(
        settings=replace(settings, config=config),
        facts=facts,
        decision=decision,
        counts=counts,
        experts=tuple(tuple(experts.local_to_global(owner)) for owner in owners),
        memory=tuple(memory_report(decision, experts, owner) for owner in owners),
        command=tuple(sys.argv),
    )


def _ranks_per_node(settings: RunSettings, world: World) -> int:
    """Ranks per node. Raises ConfigError if nodes would split TP groups or exceed the world."""
    asked = settings.ranks_per_node
    if asked is None:
        return world.local_size
    if asked > world.size or asked % world.tp:
        what = f"exceeds {world.size} ranks" if asked > world.size else f"splits TP groups of {world.tp}"
        fitting = [n for n in range(world.tp, world.size + 1, world.tp) if world.size % n == 0]
        raise ConfigError(f"--ranks-per-node {asked} {what}; use one of {', '.join(map(str, fitting))}")
    return asked


def _checked(facts: CheckpointFacts, layer: int, prefix: str | None) -> CheckpointFacts:
    """The facts of one layer; raises WeightError if it is not there or its headers are not sound."""
    prefix = find_prefix(open_source(facts.where), layer) if prefix is None else prefix.replace("{N}", str(layer))
    found = tuple(each for each in facts.layers if each.prefix == prefix)
    if not found:
        blocks = some(each.prefix for each in facts.layers)
        raise WeightError(f"{facts.where} has no block under {prefix!r}; there are {blocks}")
    problems = [*facts.problems, *(problem for each in found for problem in each.problems)]
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise WeightError(f"layer {layer} of {facts.where} cannot be loaded:{lines}")
    return replace(facts, layers=found)
