"""`moe-mk bench`: milliseconds of each stage over several batch sizes, for the selected pair or a pinned one."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError, unless_signalled
from moe_mk.external.device import collective_backend, describe, device_of_rank
from moe_mk.files import read_json, write_text
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.cli.exits import MISMATCH, OK, print_json
from moe_mk.lab.cli.inputs import DTYPES, Batch, dtype_of, expect_checkpoint, num_token_ids, tokens_of
from moe_mk.lab.cli.measure import SHOWN, stage_times, time_stages
from moe_mk.lab.cli.outputs import expect_outputs, new_figure, save_picture
from moe_mk.lab.cli.processes import run_ranks
from moe_mk.lab.cli.residency import (
    curves_of,
    expect_budget,
    measure_residency,
    pooled,
    residency_lines,
    residency_table,
    save_residency_plot,
    with_budget,
)
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.cli.version import own_version
from moe_mk.lab.cli.world import Place, World, groups_of, team_of, together
from moe_mk.layer import DeepseekV3MoE
from moe_mk.layer.settings import config_of, stated

SMALL_MS = 0.01
"""Stages below this are not compared: their ratio is noise."""


@dataclass(frozen=True)
class BenchOrder:
    """The settings of a measurement."""

    checkpoint: Path | None
    """None: a random layer of `shape` in a temporary folder."""
    shape: CheckpointShape
    layers: tuple[int, ...]
    """Several with `memory` only: they share it, and each step calls all of them."""
    tokens: tuple[int, ...]
    """Per rank, one measurement each."""
    repeats: int
    device: str
    dtype: str
    settings: Mapping[str, Any]
    """Of MoEConfig, by bare key."""
    timeout_s: float
    threads: int = 1
    out: Path | None = None
    plot: Path | None = None
    memory: str | None = None
    """For the experts of all ranks; None: all are resident."""
    store: Path | None = None
    steps: int = 32
    """With `memory`: batches per size, half of which are counted."""
    quiet: bool = False
    """Whether no progress is shown."""
    against: Path | None = None
    """The `out` of an earlier run, to compare its times."""
    limit: float | None = None
    """The largest ratio of a forward to the earlier one that is still good."""


def bench(screen: Screen, order: BenchOrder, world: World, *, as_json: bool) -> int:
    """Measure on every rank, print on one. Raises the errors of building the layer."""
    dtype_of(order.dtype)
    expect_outputs({"--out": order.out, "--plot": order.plot})
    earlier = None if order.against is None else read_earlier(order.against)
    with_budget(order.settings, order.memory, order.store, Path(), 1)  # raises ConfigError
    if len(order.layers) > 1 and order.memory is None:
        raise ConfigError(f"--layer is given {len(order.layers)} times; several layers need --memory, which they share")
    if order.checkpoint is not None:
        expect_checkpoint(order.checkpoint)
    if order.checkpoint is None and world.launched is not None:
        raise ConfigError("a launcher's ranks must share a checkpoint; write one with moe-mk make-checkpoint")
    place = nullcontext(order.checkpoint) if order.checkpoint else tempfile.TemporaryDirectory(prefix="moe-mk-")
    with place as folder, tempfile.TemporaryDirectory(prefix="moe-mk-") as results:
        if order.checkpoint is None:
            write_checkpoint(folder, order.shape)
        result = Path(results) / "bench.json"
        settings = with_budget(order.settings, order.memory, order.store, Path(str(folder)), world.size)
        job = BenchJob(replace(order, settings=settings), Path(str(folder)), result)
        backend = collective_backend(order.device, world.local_size)
        code = run_ranks(bench_rank, job, world, backend, order.timeout_s)
        if code == OK and result.is_file():
            facts = json.loads(result.read_text(encoding="utf-8"))
            found = {} if earlier is None else ratios(earlier, facts)
            facts |= {} if earlier is None else {"against": found}
            _report(screen, order, facts, as_json=as_json)
            if earlier is not None and not as_json:
                screen.facts([("differs", line) for line in differences(earlier, facts)])
                screen.console.print(ratios_table(found))
            slower = [tokens for tokens, row in found.items() if row["forward"] > (order.limit or math.inf)]
            if slower:
                screen.fact("slower", f"than {order.limit:g} x at {', '.join(map(str, slower))} tokens")
                code = MISMATCH
    return code


def read_earlier(file: Path) -> dict[str, Any]:
    """Read a result of `--out`. Raises ConfigError for anything else."""
    try:
        facts = read_json(file)
        if facts["what"] == "moe-mk bench" and ratios(facts, facts) and not differences(facts, facts):
            return dict(facts)
        why = "write them with --out"
    except unless_signalled(OSError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as problem:
        why = f"{type(problem).__name__}: {problem}; write them with --out"
    raise ConfigError(f"--against {file} has no results of moe-mk bench; {why}")


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """List the differences between two results, apart from times."""
    was, now = ({"pair": each["pair"], **each["environment"], **each["layer"]} for each in (before, after))
    return [f"{key}: {was.get(key)} -> {now.get(key)}" for key in sorted(was | now) if was.get(key) != now.get(key)]


def ratios(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """By batch size: times of a result over those of an earlier one, of the forward and of stages above SMALL_MS."""
    ours, theirs = ({each["tokens"]: each for each in facts["results"]} for facts in (before, after))
    found = {}
    for tokens in (count for count in ours if count in theirs):
        then, now = ours[tokens]["stages_ms"], theirs[tokens]["stages_ms"]
        found[tokens] = {name: now[name] / then[name] for name in then if min(then[name], now.get(name, 0)) >= SMALL_MS}
        found[tokens]["forward"] = theirs[tokens]["total_ms"] / ours[tokens]["total_ms"]
    return found


def ratios_table(found: Mapping[int, Mapping[str, float]]) -> Table:
    """The ratios of stages that have one, one column per batch size."""
    title = "time over the earlier one; above 1 is slower"
    table = table_of(("stage", *(f"{tokens} tok" for tokens in found)), left=("stage",), title=title)
    for stage in (*SHOWN, "forward"):
        if any(stage in row for row in found.values()):
            table.add_row(stage, *(f"{row[stage]:.2f}x" if stage in row else "-" for row in found.values()))
    return table


@dataclass(frozen=True)
class BenchJob:
    """The settings sent to every rank."""

    order: BenchOrder
    folder: Path
    result: Path


@torch.no_grad()
def bench_rank(job: BenchJob, place: Place) -> int:
    """Measure one rank; rank 0 writes the results."""
    order = job.order
    torch.set_num_threads(order.threads)
    team, groups = team_of(place, order.timeout_s, "bench"), groups_of(place)
    device, dtype = device_of_rank(order.device, place.local_rank), DTYPES[order.dtype]

    def build() -> list[DeepseekV3MoE]:
        settings, pool = pooled(order.settings, len(order.layers))
        settings |= {"max_num_tokens": max(1, *order.tokens)}
        layers = list[DeepseekV3MoE]()
        for number in order.layers:
            config = stated(config_of(job.folder, number, **settings), job.folder, number)
            layers.append(DeepseekV3MoE(config, device=device, dtype=dtype, groups=groups, name="bench", pool=pool))
            expect_budget(layers[-1].decision, order.memory, len(order.layers))
        for number, layer in zip(order.layers, layers, strict=True):
            with Screen(quiet=order.quiet or place.rank > 0).progress(f"layer {number}") as advance:
                layer.load_from_safetensors(job.folder, number, on_progress=advance)
        return layers

    layers, measured = together(team, build), []
    layer = layers[0]
    for count in order.tokens:
        batches = [
            _random_batch(layer.config, count, place.ep_rank + step * place.size, dtype).to(device)
            for step in range(1 if order.memory is None else order.steps)
        ]
        if order.memory is None:
            times, paged = time_stages(layer, batches[0], team, order.repeats), None
        else:
            paged, samples = measure_residency(layers, batches, team)
            times = stage_times(samples, team)
        result = {"tokens": count, "total_ms": times.total, "stages_ms": times.stages}
        measured.append(result if paged is None else result | {"residency": paged})
    for each in layers:
        each.report().require_as_planned()
    if place.rank == 0:
        write_text(job.result, json.dumps(_facts(order, place, layer, describe(device), measured)))
    return OK


def _random_batch(config: MoEConfig, count: int, seed: int, dtype: torch.dtype) -> Batch:
    draw, vocabulary = torch.Generator("cpu").manual_seed(seed), num_token_ids(config.router)
    shape = (count, config.model.hidden_size)
    x_TH = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(dtype)
    if vocabulary is None:
        return Batch(x_TH)
    return Batch(x_TH, torch.randint(vocabulary, (count,), generator=draw, dtype=torch.int64, device="cpu"))


def _facts(
    order: BenchOrder, place: Place, layer: DeepseekV3MoE, device: str, measured: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    model = layer.config.model
    return {
        "what": "moe-mk bench",
        "environment": {
            "moe_mk": own_version(),
            "torch": torch.__version__,
            "device": device,
            "threads": order.threads,
            "ranks": place.size,
            "tp": place.tp,
        },
        "layer": {
            "checkpoint": str(order.checkpoint) if order.checkpoint else asdict(order.shape),
            "layers": list(order.layers),
            "num_experts": model.num_experts,
            "hidden_size": model.hidden_size,
            "moe_intermediate_size": model.moe_intermediate_size,
            "top_k": layer.config.router.top_k,
            "dtype": order.dtype,
        },
        "pair": layer.decision.chosen.name,
        "because": layer.decision.because,
        "repeats": order.repeats if order.memory is None else order.steps - order.steps // 2,
        "ran_as_decided": not layer.report().departures,
        "results": list(measured),
    }


def _report(screen: Screen, order: BenchOrder, facts: dict[str, Any], *, as_json: bool) -> None:
    if order.out is not None:
        write_text(order.out, json.dumps(facts, indent=2) + "\n")
    paged = [(each["tokens"], each["residency"]) for each in facts["results"] if "residency" in each]
    if order.plot is not None and paged:
        save_residency_plot([curve for tokens, each in paged for curve in curves_of(each, tokens)], order.plot)
    elif order.plot is not None:
        save_bench_plot(facts, order.plot)
    if as_json:
        print_json(facts)
        return
    screen.facts(bench_head(facts))
    screen.console.print(bench_table(facts))
    screen.facts([line for _, each in paged[:1] for line in residency_lines(each)])
    for tokens, each in paged:
        screen.console.print(residency_table(each, tokens))
    for option, file in (("json", order.out), ("plot", order.plot)):
        if file is not None:
            screen.fact(option, str(file))


def bench_head(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The settings and the machine of a measurement."""
    e, shape = facts["environment"], facts["layer"]
    sizes = f"{shape['num_experts']} experts, hidden {shape['hidden_size']}"
    inner = f"intermediate {shape['moe_intermediate_size']}, top-{shape['top_k']}, {shape['dtype']}"
    ran = "it ran as decided" if facts["ran_as_decided"] else "ANOTHER BACKEND RAN"
    ranks, threads = _several(e["ranks"], "rank"), _several(e["threads"], "thread")
    return [
        ("layer", f"{sizes}, {inner}"),
        ("pair", f"{facts['pair']}: {facts['because']}; {ran}"),
        ("where", f"{ranks}, {e['device']}, {threads} per rank, torch {e['torch']}"),
    ]


def _several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def bench_table(facts: Mapping[str, Any]) -> Table:
    """Milliseconds per stage, one column per batch size."""
    title = f"milliseconds: median of {facts['repeats']} forward passes, slowest rank"
    heads = ("stage", *(f"{result['tokens']} tok" for result in facts["results"]))
    table = table_of(heads, left=heads[:1], title=title)
    for stage in SHOWN:
        table.add_row(stage, *(f"{result['stages_ms'][stage]:.3f}" for result in facts["results"]))
    table.add_row("forward", *(f"{result['total_ms']:.3f}" for result in facts["results"]), style="bold")
    return table


def save_bench_plot(facts: Mapping[str, Any], file: Path) -> None:
    """Stacked stages over batch sizes. Raises LibraryMissing without matplotlib."""
    figure = new_figure((8, 4))
    axes, results = figure.subplots(), facts["results"]
    labels, bottoms = [str(result["tokens"]) for result in results], [0.0] * len(results)
    for stage in SHOWN:
        heights = [result["stages_ms"][stage] for result in results]
        axes.bar(labels, heights, bottom=bottoms, label=stage)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("ms")
    axes.set_title(f"{facts['pair']}, {facts['environment']['ranks']} ranks")
    axes.legend(fontsize="small")
    save_picture(figure, file)


def sizes_of(text: str) -> tuple[int, ...]:
    """Batch sizes from "1,16,64"; raises ConfigError for anything else."""
    return tuple(dict.fromkeys(tokens_of(text)))
