"""The verbs for who writes, compares and measures backends: certify, chaos, bisect, bench, tune, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_mk.cli.exits import speaking
from moe_mk.cli.words import FORMATS

workbench = typer.Typer()
LARGEST = 2**31 - 1
"""Sizes above do not fit into the integers that are sent."""

Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N")]
PrepareFinalize = Annotated[str, typer.Option("--prepare-finalize", help="pin the transport")]
Experts = Annotated[str, typer.Option("--experts-backend", help="pin the experts")]
AllowEmulated = Annotated[bool, typer.Option("--allow-emulated", help="let emulated libraries be chosen")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@workbench.command("certify")
@speaking
def certify_command(
    name: Annotated[str, typer.Argument(help="a transport or an experts backend")],
    out: Annotated[Path | None, typer.Option(help="the certificate; default NAME.certificate.json here")] = None,
    modules: Annotated[list[str] | None, typer.Option("--import", help="import this module first")] = None,
    against: Annotated[Path | None, typer.Option(help="a certificate whose digests must be equal")] = None,
    processes: Annotated[bool, typer.Option(help="also run a transport on real processes")] = True,
    faults: Annotated[bool, typer.Option("--faults", help="also run a transport in worlds with faults")] = False,
    as_json: AsJson = False,
) -> int:
    """Certify a backend: every check its traits call for, hostile cases included, one JSON certificate."""
    from moe_mk.cli.certify import CertifyOrder, certify_backend
    from moe_mk.cli.screen import Screen

    order = CertifyOrder(name, out, tuple(modules or ()), against, processes, faults)
    return certify_backend(Screen(), order, as_json=as_json)


@workbench.command("chaos")
@speaking
def chaos_command(
    config: Annotated[
        str | None,
        typer.Argument(help="a model or file whose routing and kernel settings are used; drawn if not given"),
    ] = None,
    transport: Annotated[str, typer.Option(help="registered transports by comma, or all built-in ones")] = "all",
    worlds: Annotated[int, typer.Option(min=1, max=1_000_000, help="how many")] = 60,
    seed: Annotated[int, typer.Option(help="of all worlds")] = 0,
    only: Annotated[
        list[int] | None, typer.Option(min=0, help="run this world alone, and print what each rank saw")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=3600.0, help="kernel.timeout_s of worlds with a fault")] = 3.0,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="worlds at a time")] = 2,
    modules: Annotated[list[str] | None, typer.Option("--import", help="import this module first")] = None,
    out: Annotated[Path | None, typer.Option(help="the report; default chaos.json here, none with --only")] = None,
    as_json: AsJson = False,
) -> int:
    """Run worlds of real processes with one fault each; compare outputs, classify errors, find hangs and aborts.

    The exit code is 1 after a wrong output, a hang, an abort, an error that is late or of no type of this library.
    """
    from moe_mk.cli.chaos import ChaosOrder, chaos
    from moe_mk.cli.screen import Screen

    file = out or (None if only else Path("chaos.json"))
    order = ChaosOrder(config, transport, worlds, seed, tuple(only or ()), timeout, jobs, tuple(modules or ()), file)
    return chaos(Screen(), order, as_json=as_json)


@workbench.command("bench")
@speaking
def bench_command(
    checkpoint: Annotated[Path | None, typer.Argument(help="a checkpoint folder; default a random layer")] = None,
    layer: Annotated[int, typer.Option(help="which layer")] = 3,
    experts: Annotated[int, typer.Option(help="routed experts of the random layer")] = 32,
    hidden: Annotated[int, typer.Option(help="hidden size of the random layer")] = 1024,
    intermediate: Annotated[int, typer.Option(help="intermediate size of the random layer")] = 512,
    quant: Annotated[str, typer.Option(help=f"of the random layer: {FORMATS}")] = "fp8",
    ranks: Annotated[int | None, typer.Option(min=1, help="processes to start; torchrun's, or 1, if not given")] = None,
    tp: Annotated[int, typer.Option(min=1, help="ranks that share the slices of an expert")] = 1,
    tokens: Annotated[str, typer.Option(help="batch sizes of a rank, by comma")] = "1,16,64",
    repeats: Annotated[int, typer.Option(min=1, help="timed forwards of each size")] = 5,
    prepare_finalize: PrepareFinalize = "auto",
    experts_backend: Experts = "auto",
    allow_emulated: AllowEmulated = False,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    timeout: Annotated[float, typer.Option(help="seconds a peer may be late")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="write what was measured; benchmarks/compare.py reads it")] = None,
    plot: Annotated[Path | None, typer.Option(help="write the stages as a picture")] = None,
    as_json: AsJson = False,
) -> int:
    """Measure every stage of a layer over several batch sizes, for the decided pair or a pinned one."""
    from moe_mk.cli.bench import BenchOrder, bench, sizes_of
    from moe_mk.cli.screen import Screen
    from moe_mk.cli.world import world_of
    from moe_mk.weights.checkpoint_shape import CheckpointShape

    world = world_of(ranks, tp)
    shape = CheckpointShape(
        num_experts=experts, hidden_size=hidden, intermediate_size=intermediate, layers=(layer,), quant=quant
    )
    pins = {"prepare_finalize": prepare_finalize, "experts": experts_backend, "allow_emulated": allow_emulated}
    order = BenchOrder(
        checkpoint, shape, layer, sizes_of(tokens), repeats, device, dtype, pins, timeout, world.threads, out, plot
    )
    return bench(Screen(quiet=not world.speaks), order, world, as_json=as_json)


@workbench.command("tune")
@speaking
def tune_command(
    experts: Annotated[str, typer.Argument(help="an experts backend")],
    hidden: Annotated[int, typer.Option(min=1, help="hidden size")] = 7168,
    intermediate: Annotated[int, typer.Option(min=1, help="intermediate size of an expert")] = 2048,
    slots: Annotated[int, typer.Option(min=1, help="physical experts of a rank")] = 8,
    top_k: Annotated[int, typer.Option(min=1, help="experts a token, of these slots")] = 2,
    tokens: Annotated[str, typer.Option(help="batch sizes, by comma")] = "1,4,16,64,256",
    weights: Annotated[str, typer.Option(help="plain, fp8, int8, mxfp8, mxfp4 or nvfp4")] = "fp8",
    activations: Annotated[str, typer.Option(help="plain, fp8 or int8")] = "plain",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    device: Device = "cpu",
    budget: Annotated[float, typer.Option(help="seconds after which no measurement starts")] = 60.0,
    tuned_dir: Annotated[Path | None, typer.Option(help="folder of tuned files; default configs/tuned")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be done, measure nothing")] = False,
    as_json: AsJson = False,
) -> int:
    """Measure a backend's parameters here and replace built-in ones that lose beyond the spread of the measurements.

    A killed session goes on where it was.
    """
    from moe_mk.cli.bench import sizes_of
    from moe_mk.cli.screen import Screen
    from moe_mk.cli.tune import TuneOrder, tune_backend

    order = TuneOrder(
        experts, hidden, intermediate, slots, top_k, sizes_of(tokens), weights, activations, dtype, device, budget,
        tuned_dir, dry_run,
    )  # fmt: skip
    return tune_backend(Screen(), order, as_json=as_json)


@workbench.command("bisect")
@speaking
def bisect_command(
    one: Annotated[str, typer.Argument(help="transport+experts, or one of the two")],
    other: Annotated[str, typer.Argument(help="likewise")],
    ranks: Annotated[int, typer.Option(min=1, max=LARGEST, help="virtual ranks")] = 1,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="of all ranks together")] = 16,
    experts: Annotated[int, typer.Option(min=1, max=LARGEST, help="routed experts")] = 8,
    top_k: Annotated[int, typer.Option(min=1, max=LARGEST, help="experts a token")] = 2,
    hidden: Annotated[int, typer.Option(min=1, max=LARGEST, help="hidden size")] = 256,
    intermediate: Annotated[int, typer.Option(min=1, max=LARGEST, help="intermediate size of an expert")] = 128,
    weights: Annotated[str, typer.Option(help="plain or fp8")] = "plain",
    activations: Annotated[str, typer.Option(help="plain or fp8")] = "plain",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="of tokens and routes")] = 0,
    exact: Annotated[bool, typer.Option("--exact", help="any differing bit counts")] = False,
    as_json: AsJson = False,
) -> int:
    """Find the first stage in which two backends differ on one input: token, expert, block, error."""
    from moe_mk.cli.bisect import BisectOrder, bisect_backends
    from moe_mk.cli.screen import Screen

    order = BisectOrder(
        one, other, ranks, tokens, experts, top_k, hidden, intermediate, weights, activations, dtype, seed, exact
    )
    return bisect_backends(Screen(), order, as_json=as_json)


@workbench.command("demo")
@speaking
def demo_command(
    host: Annotated[str, typer.Argument(help="hf: transformers generates with an FP8 model on this machine")],
    tokens: Annotated[int, typer.Option(min=1, help="new tokens of each prompt")] = 16,
    experts_backend: Experts = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32: what tokens are computed in")] = "float32",
    keep: Annotated[Path | None, typer.Option(help="write the tiny checkpoint here and keep it")] = None,
    seed: Annotated[int, typer.Option(help="of the random model")] = 0,
    as_json: AsJson = False,
) -> int:
    """Show a host running on this library: a tiny random FP8 DeepSeek-V3 is written, loaded and generates."""
    from moe_mk.cli.demo import DemoOrder, demo_hf
    from moe_mk.cli.screen import Screen

    return demo_hf(Screen(), DemoOrder(host, tokens, experts_backend, dtype, keep, seed), as_json=as_json)
