"""`moe-mk chaos`: groups of processes with one fault each, with a table and a report."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from moe_mk.config.shipped import load_config
from moe_mk.errors import ConfigError
from moe_mk.files import write_text
from moe_mk.lab.cli import environment
from moe_mk.lab.cli.exits import MISMATCH, OK
from moe_mk.lab.cli.outputs import expect_outputs
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.testing.faults import ACCEPTED, OUTCOMES, Campaign, Report, WorldResult, run_worlds, transports_of

SHOWN_FAILURES = 20


@dataclass(frozen=True)
class ChaosOrder:
    """The settings of a fault test."""

    config: str | None
    transport: str
    worlds: int
    seed: int
    only: tuple[int, ...] = ()
    timeout_s: float = 3.0
    jobs: int = 2
    modules: tuple[str, ...] = ()
    out: Path | None = None

    @property
    def command(self) -> str:
        """The command that draws the same worlds."""
        words = ["moe-mk", "chaos", *([self.config] if self.config else []), "--transport", self.transport]
        words += ["--worlds", str(self.worlds), "--seed", str(self.seed), "--timeout", f"{self.timeout_s:g}"]
        return shlex.join([*words, *(word for module in self.modules for word in ("--import", module))])


def chaos(screen: Screen, order: ChaosOrder, *, as_json: bool) -> int:
    """Run, write, print. Raises ConfigError for unknown names, and for a layer that the reference cannot compute."""
    import_modules(order.modules)
    expect_outputs({"--out": order.out})
    environment.stay_on_this_machine()
    config = None if order.config is None else load_config(order.config)
    campaign = Campaign(transports_of(order.transport), order.seed, order.timeout_s, config, order.modules)
    numbers = order.only or tuple(range(order.worlds))
    with screen.progress("worlds", in_bytes=False) as advance:
        report = run_worlds(
            campaign,
            numbers,
            jobs=order.jobs,
            on_world=lambda what, done, total: advance("worlds", done, total),
            command=order.command,
        )
    if order.out is not None:
        write_text(order.out, json.dumps(report.as_dict(), indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    else:
        show_report(screen, order, report)
    return OK if report.passed else MISMATCH


def import_modules(modules: Sequence[str]) -> None:
    """Import modules that register backends, also from the working folder, as `python -m` does. Raises ConfigError."""
    if modules and (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    for module in modules:
        try:
            importlib.import_module(module)
        except (ImportError, ValueError, TypeError) as problem:
            raise ConfigError(f"--import {module}: {problem}") from problem


def show_report(screen: Screen, order: ChaosOrder, report: Report) -> None:
    """Failed worlds with the command that repeats each, outcomes by transport and by fault, and the verdict."""
    if order.only:
        for world in report.worlds:
            _print_world(screen, world)
    failed = [world for world in report.worlds if world.bad]
    for world in () if order.only else failed[:SHOWN_FAILURES]:
        screen.fact(f"world {world.plan.number}", world.plan.describe())
        for row in world.bad:
            first_line = next(iter(row.text.splitlines()), "")
            screen.fact("", f"rank {row.rank}, {row.stage} {row.call}: {row.outcome} {row.error} {first_line}")
        screen.fact("", f"{order.command} --only {world.plan.number}")
    if len(failed) > SHOWN_FAILURES and not order.only:
        screen.fact("more", f"{len(failed) - SHOWN_FAILURES} more worlds failed, see the report")
    screen.console.print(outcomes_table("transport", report.table()))
    screen.console.print(outcomes_table("fault", report.table(lambda plan: plan.kind)))
    screen.fact("worlds", f"{len(report.worlds)} in {report.seconds:.0f} s, {len(failed)} failed")
    if order.out is not None:
        screen.fact("report", str(order.out))
    screen.fact("verdict", Text("PASS", "bold green") if report.passed else Text("FAIL", "bold red"))


def outcomes_table(what: str, lines: Sequence[dict[str, Any]]) -> Table:
    """Outcomes of calls, one line a transport or a fault; delays are those of ranks that are not the victim."""
    shown = [name for name in OUTCOMES if name in ACCEPTED or any(line["outcomes"][name] for line in lines)]
    heads = (what, "worlds", *shown, "names victim", "has cause", "median s", "max s")
    table = table_of(heads, left=heads[:1], pad_edge=False)
    for line in lines:
        cells = [str(line["worlds"])]
        for name in shown:
            count = line["outcomes"][name]
            cells.append(str(count) if name in ACCEPTED or not count else f"[bold red]{count}[/]")
        cells += ["/".join(map(str, line[fact])) for fact in ("named", "cause")]
        delays = (line["delay_median_s"], line["delay_max_s"])
        table.add_row(line["key"], *cells, *("" if s is None else f"{s:.3f}" for s in delays))
    return table


def _print_world(screen: Screen, world: WorldResult) -> None:
    """Outcomes of each rank, call by call."""
    screen.fact(f"world {world.plan.number}", world.plan.describe())
    for row in world.rows:
        delay = "" if row.delay_s is None else f" after {row.delay_s:.3f} s"
        thread = f", thread {row.thread}" if row.thread else ""
        style = "" if row.outcome in ACCEPTED else "bold red"
        place = f"{'':<12}rank {row.rank}, {row.stage} {row.call}{thread}: "
        stated = f" {row.error}{delay} {row.digest}{row.text}".rstrip()
        screen.console.print(Text.assemble(place, (row.outcome, style), stated))
