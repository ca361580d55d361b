"""The verbs that test and measure backends: certify, chaos, bisect, judge, bench, tune, compile, waits, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_mk.lab.cli.exits import with_exit_code
from moe_mk.lab.cli.options import (
    BACKEND_NAMES,
    EXPERTS_NAMES,
    LARGEST,
    MODEL_NAMES,
    AllowEmulated,
    AsJson,
    Device,
    Experts,
    Memory,
    PrepareFinalize,
    Settings,
    Store,
    settings_of,
)
from moe_mk.lab.cli.words import FORMATS

workbench = typer.Typer()


@workbench.command("certify")
@with_exit_code
def certify_command(
    name: Annotated[str, typer.Argument(help="a transport or an experts backend", autocompletion=BACKEND_NAMES)],
    out: Annotated[Path | None, typer.Option(help="file of the certificate; default NAME.certificate.json")] = None,
    modules: Annotated[list[str] | None, typer.Option("--import", help="import this module first")] = None,
    against: Annotated[Path | None, typer.Option(help="a certificate whose digests must be equal")] = None,
    processes: Annotated[bool, typer.Option(help="also run a transport on real processes")] = True,
    faults: Annotated[bool, typer.Option("--faults", help="also run a transport with injected faults")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="leave out many tokens, many experts and further sizes")
    ] = False,
    tuned_dir: Annotated[
        Path | None, typer.Option(help="write it to this folder of kernel.tuned_dir, where layers look it up")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Certify a backend: run every check that its traits require, and write a JSON certificate."""
    from moe_mk.lab.cli.certify import CertifyOrder, certify_backend
    from moe_mk.lab.cli.screen import Screen

    order = CertifyOrder(name, out, tuple(modules or ()), against, processes, faults, quick, tuned_dir)
    return certify_backend(Screen(), order, as_json=as_json)


@workbench.command("chaos")
@with_exit_code
def chaos_command(
    config: Annotated[
        str | None, typer.Argument(help="model or file with the routing and kernel settings; default random")
    ] = None,
    transport: Annotated[
        str, typer.Option(help="registered transports, separated by commas, or all built-in ones")
    ] = "all",
    worlds: Annotated[int, typer.Option(min=1, max=1_000_000, help="number of worlds")] = 60,
    seed: Annotated[int, typer.Option(help="seed of all worlds")] = 0,
    only: Annotated[
        list[int] | None, typer.Option(min=0, help="run only this world, and print the outcomes of each rank")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=3600.0, help="kernel.timeout_s of worlds with a fault")] = 3.0,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="worlds in parallel")] = 2,
    modules: Annotated[list[str] | None, typer.Option("--import", help="import this module first")] = None,
    out: Annotated[Path | None, typer.Option(help="file of the report; default chaos.json, none with --only")] = None,
    as_json: AsJson = False,
) -> int:
    """Run groups of processes (worlds) with one fault each; compare outputs, classify errors, detect hangs and aborts.

    The exit code is 1 after a wrong output, a hang, an abort, a late error or an untyped error.
    """
    from moe_mk.lab.cli.chaos import ChaosOrder, chaos
    from moe_mk.lab.cli.screen import Screen

    file = out or (None if only else Path("chaos.json"))
    order = ChaosOrder(config, transport, worlds, seed, tuple(only or ()), timeout, jobs, tuple(modules or ()), file)
    return chaos(Screen(), order, as_json=as_json)


@workbench.command("bench")
@with_exit_code
def bench_command(
    checkpoint: Annotated[Path | None, typer.Argument(help="checkpoint folder; default: a random layer")] = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="which layer; default: the first with experts. With --memory: of several, in one pool"),
    ] = None,
    num_experts: Annotated[int, typer.Option(help="routed experts of the random layer")] = 32,
    hidden: Annotated[int, typer.Option(help="hidden size of the random layer")] = 1024,
    intermediate: Annotated[int, typer.Option(help="intermediate size of the random layer")] = 512,
    quant: Annotated[str, typer.Option(help=f"format of the random layer: {FORMATS}")] = "fp8",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="processes to start; default: as under torchrun, else 1")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel size: ranks over which experts are sliced")] = 1,
    tokens: Annotated[str, typer.Option(help="batch sizes per rank, by comma")] = "1,16,64",
    repeats: Annotated[int, typer.Option(min=1, help="timed forward passes per size")] = 5,
    memory: Memory = None,
    store: Store = None,
    steps: Annotated[int, typer.Option(min=4, help="with --memory: batches per size, half of them counted")] = 32,
    prepare_finalize: PrepareFinalize = "auto",
    experts: Experts = "auto",
    allow_emulated: AllowEmulated = False,
    settings: Settings = None,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    timeout: Annotated[float, typer.Option(help="seconds to wait for a peer")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="write the results")] = None,
    against: Annotated[Path | None, typer.Option(help="compare with the results of an earlier --out")] = None,
    limit: Annotated[float | None, typer.Option(help="exit 1 above this ratio of a forward pass")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw the stages, or with --memory hits and reads over time")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Measure every stage of a layer over several batch sizes, for the selected pair or a pinned one."""
    from moe_mk.lab.checkpoints.checkpoint_shape import CheckpointShape, groups_of
    from moe_mk.lab.cli.bench import BenchOrder, bench, sizes_of
    from moe_mk.lab.cli.inputs import first_moe_layer
    from moe_mk.lab.cli.screen import Screen
    from moe_mk.lab.cli.world import world_of

    world = world_of(ranks, tp)
    layers = tuple(dict.fromkeys(layer or ())) or (3 if checkpoint is None else first_moe_layer(checkpoint),)
    shape = CheckpointShape(
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        quant=quant,
        **groups_of(num_experts),
    )
    pins = {"prepare_finalize": prepare_finalize, "experts": experts, "allow_emulated": allow_emulated}
    pins |= settings_of(settings)
    order = BenchOrder(
        checkpoint, shape, layers, sizes_of(tokens), repeats, device, dtype, pins, timeout, world.threads, out, plot,
        memory, store, steps, as_json, against, limit,
    )  # fmt: skip
    return bench(Screen(quiet=not world.prints), order, world, as_json=as_json)


@workbench.command("tune")
@with_exit_code
def tune_command(
    experts: Annotated[str, typer.Argument(help="an experts backend", autocompletion=EXPERTS_NAMES)],
    hidden: Annotated[int, typer.Option(min=1, help="hidden size")] = 7168,
    intermediate: Annotated[int, typer.Option(min=1, help="intermediate size of an expert")] = 2048,
    slots: Annotated[int, typer.Option(min=1, help="physical experts of a rank")] = 8,
    top_k: Annotated[int, typer.Option(min=1, help="experts per token, among these slots")] = 2,
    tokens: Annotated[str, typer.Option(help="batch sizes, by comma")] = "1,4,16,64,256",
    weights: Annotated[str, typer.Option(help="plain, fp8, int8, mxfp8, mxfp4 or nvfp4")] = "fp8",
    activations: Annotated[str, typer.Option(help="plain, fp8 or int8")] = "plain",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    device: Device = "cpu",
    budget: Annotated[float, typer.Option(help="seconds after which no new measurement starts")] = 60.0,
    tuned_dir: Annotated[Path | None, typer.Option(help="folder of tuned files; default configs/tuned")] = None,
    modules: Annotated[list[str] | None, typer.Option("--import", help="import this module first")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the candidates without measuring")] = False,
    as_json: AsJson = False,
) -> int:
    """Measure the parameters of a backend, and store those that are faster than the built-in ones.

    An interrupted session resumes.
    """
    from moe_mk.lab.cli.bench import sizes_of
    from moe_mk.lab.cli.screen import Screen
    from moe_mk.lab.cli.tune import TuneOrder, tune_backend

    order = TuneOrder(
        experts, hidden, intermediate, slots, top_k, sizes_of(tokens), weights, activations, dtype, device, budget,
        tuned_dir, dry_run, tuple(modules or ()),
    )  # fmt: skip
    return tune_backend(Screen(), order, as_json=as_json)


@workbench.command("compile", epilog="Example: moe-mk compile deepseek_v3 --device h200 --tokens 1,128 --out kernels")
@with_exit_code
def compile_command(
    config: Annotated[str, typer.Argument(help="a shipped model, or a file")],
    out: Annotated[Path, typer.Option(help="folder of compiled kernels")],
    device: Annotated[str, typer.Option(help="a shipped device, or a file")] = "h200",
    ranks: Annotated[int, typer.Option(min=1, max=LARGEST, help="ranks that share out the experts")] = 1,
    tokens: Annotated[str, typer.Option(help="tokens of a rank, by comma")] = "1,16,128,512,1024,8192",
    as_json: AsJson = False,
) -> int:
    """Compile the Triton kernels of a layer for a GPU that this machine does not have, into a folder for that GPU."""
    from moe_mk.lab.cli.bench import sizes_of
    from moe_mk.lab.cli.compile import compile_kernels
    from moe_mk.lab.cli.screen import Screen

    return compile_kernels(Screen(), config, device, ranks, sizes_of(tokens), out, as_json=as_json)


@workbench.command("bisect", epilog="Example: moe-mk bisect all_to_all+torch_cpu all_gather+reference --ranks 2")
@with_exit_code
def bisect_command(
    one: Annotated[str, typer.Argument(metavar="A", help="transport+experts, or one of the two")],
    other: Annotated[str, typer.Argument(metavar="B", help="the pair to compare with")],
    ranks: Annotated[int, typer.Option(min=1, max=LARGEST, help="virtual ranks")] = 1,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="tokens of all ranks together")] = 16,
    experts: Annotated[int, typer.Option("--num-experts", "--experts", min=1, max=LARGEST, help="routed experts")] = 8,
    top_k: Annotated[int, typer.Option(min=1, max=LARGEST, help="experts per token")] = 2,
    hidden: Annotated[int, typer.Option(min=1, max=LARGEST, help="hidden size")] = 256,
    intermediate: Annotated[int, typer.Option(min=1, max=LARGEST, help="intermediate size of an expert")] = 128,
    weights: Annotated[str, typer.Option(help="plain or fp8")] = "plain",
    activations: Annotated[str, typer.Option(help="plain or fp8")] = "plain",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="seed of tokens and routing")] = 0,
    exact: Annotated[bool, typer.Option("--exact", help="report any differing bit")] = False,
    as_json: AsJson = False,
) -> int:
    """Find the first stage in which two backends differ on one input, with token, expert, block and error."""
    from moe_mk.lab.cli.bisect import BisectOrder, bisect_backends
    from moe_mk.lab.cli.screen import Screen

    order = BisectOrder(
        one, other, ranks, tokens, experts, top_k, hidden, intermediate, weights, activations, dtype, seed, exact
    )
    return bisect_backends(Screen(), order, as_json=as_json)


@workbench.command("judge", epilog="Example: moe-mk judge layer3.safetensors --html verdict.html")
@with_exit_code
def judge_command(
    cases: Annotated[list[Path], typer.Argument(help="case files; of one layer, each also explains the others")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="the folder of the checkpoint, for cases without weights")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write one page with the error map")] = None,
    as_json: AsJson = False,
) -> int:
    """Replay recorded calls of any engine's MoE layer: right within their number formats, or the first wrong stage."""
    from moe_mk.lab.cli.judge import judge_cases
    from moe_mk.lab.cli.screen import Screen

    return judge_cases(Screen(), cases, checkpoint, html, as_json=as_json)


@workbench.command(
    "fit", epilog="Example: moe-mk fit deepseek_v3 --trace routing.safetensors --memory 3GB --disk 1.1GB/s"
)
@with_exit_code
def fit_command(
    config: Annotated[
        str, typer.Argument(help="a shipped model, a file, or a config.json", autocompletion=MODEL_NAMES)
    ],
    trace: Annotated[Path, typer.Option(help="a routing trace, of moe-mk run --record-trace or of another program")],
    memory: Annotated[str, typer.Option(help="memory for the experts of the traced layers, such as 3GB")],
    disk: Annotated[str, typer.Option(help="rate of direct reads")] = "1.1GB/s",
    ram: Annotated[str, typer.Option(help="rate at which resident experts are multiplied")] = "20GB/s",
    faults: Annotated[str | None, typer.Option(help="rate of reads by page faults; default: as --disk")] = None,
    other: Annotated[float, typer.Option(min=0, help="microseconds of each layer outside its experts")] = 0.0,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="consecutive tokens of a step")] = 1,
    gate_trace: Annotated[
        Path | None, typer.Option(help="what each gate chooses from the input of the layer before, as a trace")
    ] = None,
    settings: Settings = None,
    plot: Annotated[Path | None, typer.Option(help="draw hits and reads over time")] = None,
    as_json: AsJson = False,
) -> int:
    """Predict hit rates and time of experts larger than memory: policies, their optimum, prefetch, page cache."""
    from moe_mk.lab.cli.fit import FitOrder, fit
    from moe_mk.lab.cli.screen import Screen

    order = FitOrder(config, trace, memory, disk, ram, faults, other, tokens, gate_trace, settings_of(settings), plot)
    return fit(Screen(), order, as_json=as_json)


@workbench.command("waits", epilog="Example: moe-mk waits prefill.json")
@with_exit_code
def waits_command(
    file: Annotated[Path, typer.Argument(help="a Chrome trace of all ranks, written by moe-mk run --trace")],
    stage: Annotated[str | None, typer.Option(help="dispatch or combine; default both")] = None,
    as_json: AsJson = False,
) -> int:
    """Print who waited for whom in a trace, and the ranks that are late or slow to receive."""
    from moe_mk.lab.cli.screen import Screen
    from moe_mk.lab.cli.waits import show_waits

    return show_waits(Screen(), file, stage, as_json=as_json)


@workbench.command("demo")
@with_exit_code
def demo_command(
    host: Annotated[str, typer.Argument(help="hf: generate text with an FP8 model in transformers")],
    tokens: Annotated[int, typer.Option(min=1, help="new tokens per prompt")] = 16,
    experts: Experts = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32: dtype of the computation")] = "bfloat16",
    keep: Annotated[Path | None, typer.Option(help="folder in which to keep the tiny checkpoint")] = None,
    seed: Annotated[int, typer.Option(help="seed of the random model")] = 0,
    as_json: AsJson = False,
) -> int:
    """Demonstrate an integration: write a tiny random FP8 DeepSeek-V3, load it and generate text."""
    from moe_mk.lab.cli.demo import DemoOrder, demo_hf
    from moe_mk.lab.cli.screen import Screen

    return demo_hf(Screen(), DemoOrder(host, tokens, experts, dtype, keep, seed), as_json=as_json)
