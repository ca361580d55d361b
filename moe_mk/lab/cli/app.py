"""The verbs of `moe-mk`: each reads its options, calls the library and prints the result.

A verb imports its modules when it is called, so that help, completion and usage errors do not import torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moe_mk.errors import ConfigError
from moe_mk.lab.cli.checkpoint_verbs import checkpoint_verbs
from moe_mk.lab.cli.environment import has_launcher
from moe_mk.lab.cli.exits import code_of, end_in_order, with_exit_code
from moe_mk.lab.cli.options import (
    MODEL_NAMES,
    PROFILE_NAMES,
    AllowEmulated,
    AsJson,
    Device,
    Experts,
    ExplainCommand,
    Memory,
    PrepareFinalize,
    Settings,
    Store,
    settings_of,
)
from moe_mk.lab.cli.predictions import predictions
from moe_mk.lab.cli.trace_verbs import trace_verbs
from moe_mk.lab.cli.workbench import workbench

app = typer.Typer(
    name="moe-mk",
    help="Run, explain, verify and measure expert-parallel MoE layers.",
    no_args_is_help=True,
    add_completion=True,
)
app.add_typer(checkpoint_verbs)
app.add_typer(workbench)
app.add_typer(predictions, name="plan")
app.add_typer(trace_verbs, name="trace")
SCHEMA = Path(__file__).parents[2] / "config" / "schema.json"
"""The schema of `MoEConfig`, stored so that it is printed without importing torch; a test compares both."""


def _print_version(asked: bool) -> None:
    if asked:
        from moe_mk.lab.cli.version import own_version

        typer.echo(f"moe-mk {own_version()}")
        raise typer.Exit


@app.callback()
def _every_verb(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that precede a verb."""


@app.command()
@with_exit_code
def run(
    checkpoint: Annotated[
        Path, typer.Argument(help="a checkpoint folder in the official layout, with its config.json")
    ],
    layer: Annotated[list[int] | None, typer.Option(help="which layer; default: the first with experts")] = None,
    prefix: Annotated[
        str | None, typer.Option(help="names before experts.0, where several blocks have the layer's number")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="processes to start; default: as under torchrun, else 1")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel size: ranks over which experts are sliced")] = 1,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="treat this many ranks as one node")] = None,
    tokens: Annotated[str | None, typer.Option(help="tokens of each EP rank: 64, or 0,0,7,1; default 64")] = None,
    hidden_states: Annotated[
        Path | None, typer.Option(help="rows from a .safetensors or .npy file, split over ranks")
    ] = None,
    token_ids: Annotated[
        Path | None, typer.Option(help="token ids, for layers that route by them; default random")
    ] = None,
    replicated: Annotated[bool, typer.Option("--replicated", help="all ranks have the same tokens")] = False,
    memory: Memory = None,
    store: Store = None,
    prepare_finalize: PrepareFinalize = "auto",
    experts: Experts = "auto",
    allow_emulated: AllowEmulated = False,
    settings: Settings = None,
    wire: Annotated[str, typer.Option(help="auto, plain, fp8 or checkpoint: format of dispatched tokens")] = "auto",
    activations: Annotated[
        str, typer.Option(help="auto, checkpoint or plain: format of the experts' activations")
    ] = "auto",
    router_dtype: Annotated[str, typer.Option(help="float32 or model")] = "float32",
    placement: Annotated[str, typer.Option(help="linear or round_robin")] = "linear",
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="seed of the random tokens")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="timed forward passes")] = 3,
    timeout: Annotated[float, typer.Option(help="seconds to wait for a peer")] = 120.0,
    network: Annotated[str, typer.Option(help="network of one_sided_network, such as 10.0.0.0/24")] = "127.0.0.0/8",
    inject: Annotated[str | None, typer.Option(help="inject a fault that verification must detect")] = None,
    verify: Annotated[bool, typer.Option(help="verify against the reference")] = True,
    against: Annotated[
        str | None, typer.Option(help="transformers: verify what the model's own class computes, measured there")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write all results as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the expert load")] = None,
    trace: Annotated[Path | None, typer.Option(help="write one prefill of all ranks as a Chrome trace")] = None,
    record_trace: Annotated[Path | None, typer.Option(help="write the routing, for place --trace")] = None,
    as_json: AsJson = False,
) -> int:
    """Run one MoE layer of a checkpoint on N ranks, explain the backends, measure times and verify the output."""
    from moe_mk.external.device import collective_backend
    from moe_mk.lab.cli.inputs import RunSettings, dtype_of, expect_checkpoint, first_moe_layer, tokens_of
    from moe_mk.lab.cli.plan import plan_run
    from moe_mk.lab.cli.processes import run_ranks
    from moe_mk.lab.cli.residency import with_budget
    from moe_mk.lab.cli.run import run_rank
    from moe_mk.lab.cli.screen import Screen
    from moe_mk.lab.cli.show import show_plan
    from moe_mk.lab.cli.world import world_of
    from moe_mk.lab.verify import own_block
    from moe_mk.layer.settings import config_of

    dtype_of(dtype)
    expect_checkpoint(checkpoint)
    if layer is not None and len(layer) > 1:
        several = "moe-mk bench --memory measures several in one pool of memory"
        raise ConfigError(f"--layer is given {len(layer)} times, and run verifies one layer; {several}")
    number = layer[0] if layer else first_moe_layer(checkpoint)
    world = world_of(ranks, tp)
    overrides = {
        "prepare_finalize": prepare_finalize,
        "experts": experts,
        "allow_emulated": allow_emulated,
        "wire": wire,
        "activations": activations,
        "router_dtype": router_dtype,
        "placement": placement,
        "tokens": "replicated" if replicated else "sharded",
        "timeout_s": timeout,
        "network": network,
    }
    overrides = with_budget(overrides | settings_of(settings), memory, store, checkpoint, world.size)
    config = config_of(checkpoint, number, **overrides)
    order = RunSettings(
        checkpoint=checkpoint,
        layer=number,
        config=config,
        tokens=None if tokens is None else tokens_of(tokens),
        dtype=dtype,
        device=device,
        seed=seed,
        repeats=repeats,
        hidden_states=hidden_states,
        token_ids=token_ids,
        inject=inject,
        verify=verify,
        against=None if against is None else own_block(against, config, checkpoint, number),
        out=out,
        as_json=as_json,
        plot=plot,
        trace=trace,
        record_trace=record_trace,
        threads=world.threads,
        ranks_per_node=ranks_per_node,
        prefix=prefix,
        memory=memory,
    )
    plan = plan_run(order, world)
    show_plan(Screen(quiet=as_json or not world.prints), plan)
    return run_ranks(run_rank, plan, world, collective_backend(device, world.local_size), timeout)


@app.command(cls=ExplainCommand)
@with_exit_code
def explain(
    config: Annotated[
        str,
        typer.Argument(
            help="name of a shipped model, a YAML or JSON file, or a config.json", autocompletion=MODEL_NAMES
        ),
    ],
    device: Annotated[
        str, typer.Option(help="name of a shipped device profile, or a file", autocompletion=PROFILE_NAMES)
    ] = "cpu",
    ranks: Annotated[int, typer.Option(min=1, help="expert-parallel size")] = 1,
    nodes: Annotated[int | None, typer.Option(min=1, help="number of nodes; default: by the device profile")] = None,
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel size: ranks over which experts are sliced")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="tokens per rank")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    graphs: Annotated[bool, typer.Option("--graphs", help="calls must be capturable in a CUDA graph")] = False,
    replicated: Annotated[bool, typer.Option("--replicated", help="all ranks have the same tokens")] = False,
    comm_units: Annotated[int | None, typer.Option(min=1, help="SMs or threads that a transport may reserve")] = None,
    installed: Annotated[
        str | None,
        typer.Option(
            help="libraries to assume, by comma; without a value: those installed here. Default: those installed here "
            "for a device of this machine, else all that the device supports"
        ),
    ] = None,
    want: Annotated[
        str | None,
        typer.Option(help="transport, experts or TRANSPORT+EXPERTS: print the smallest changes that make it eligible"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="a routing trace: also print the hit rate of kernel.residency on it")
    ] = None,
    prepare_finalize: PrepareFinalize = "auto",
    experts: Experts = "auto",
    allow_emulated: AllowEmulated = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> int:
    """List eligible pairs of transport and experts with their cost, and why others are rejected, for any device."""
    from moe_mk.lab.cli.explain import Question, explain_config
    from moe_mk.lab.cli.screen import Screen

    overrides = {
        "ep": ranks,
        "tp": tp,
        "graphs": graphs,
        "tokens": "replicated" if replicated else "sharded",
        "prepare_finalize": prepare_finalize,
        "experts": experts,
        "allow_emulated": allow_emulated,
        **settings_of(settings),
    }
    overrides |= {} if comm_units is None else {"comm_units": comm_units}
    question = Question(config, device, tokens, nodes, dtype, installed, overrides, trace)
    if want is not None:
        from moe_mk.lab.cli.explain import explain_want

        return explain_want(Screen(), question, want, as_json=as_json)
    return explain_config(Screen(), question, as_json=as_json)


@app.command(
    "place",
    options_metavar="(--loads FILE | --trace FILE) (--gpus N | --preset NAME) [OPTIONS]",
    epilog="Example: moe-mk place --loads counts.json --gpus 16 --nodes 2",
)
@with_exit_code
def place_command(
    loads: Annotated[
        Path | None,
        typer.Option(
            help="token counts, layers x experts or windows x layers x experts: .json, .npy, .safetensors or .pt"
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="a routing trace instead of counts; also gives node traffic")
    ] = None,
    phase: Annotated[str | None, typer.Option(help="phase of the trace: prefill or decode; default both")] = None,
    experts: Annotated[
        int | None,
        typer.Option("--num-experts", "--experts", min=1, help="number of routed experts, if not in the trace"),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="number of GPUs")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="number of nodes")] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="physical experts per GPU; default: enough to balance any load")
    ] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="expert groups of the router; default 1, or that of the trace")
    ] = None,
    policy: Annotated[str, typer.Option(help="auto, compat, flat, hybrid, a plugin, or all to compare them")] = "all",
    speeds: Annotated[str | None, typer.Option(help="relative speeds of GPUs: 1,1,0.5,0.5 or 1*16,0.5*16")] = None,
    preset: Annotated[str | None, typer.Option(help="DeepSeek-V3's prefill-ep32 or decode-ep144")] = None,
    min_copies: Annotated[
        int, typer.Option(min=1, help="copies of an expert; 2 tolerates the loss of any one GPU")
    ] = 1,
    expert_bytes: Annotated[
        int | None, typer.Option(min=0, max=10**12, help="bytes of one expert, to compute memory and traffic")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="draw GPU loads before and after")] = None,
    as_json: AsJson = False,
) -> int:
    """Compute a placement of experts for a recorded load; compare policies by balance, moves and memory."""
    from moe_mk.lab.cli.place import PlaceOrder, place
    from moe_mk.lab.cli.screen import Screen

    order = PlaceOrder(
        loads, gpus, nodes, slots, groups, policy, speeds, preset, min_copies, expert_bytes, plot, trace, phase, experts
    )
    return place(Screen(), order, as_json=as_json)


@app.command()
@with_exit_code
def doctor(settings: Settings = None, as_json: AsJson = False) -> int:
    """List installed libraries and backends, and why a backend does not work on this machine."""
    from moe_mk.lab.cli.doctor import examine
    from moe_mk.lab.cli.screen import Screen

    return examine(Screen(), settings_of(settings), as_json=as_json)


@app.command()
@with_exit_code
def schema() -> int:
    """Print the JSON schema of a configuration file."""
    typer.echo(SCHEMA.read_text(encoding="utf-8"), nl=False)
    return 0


def main() -> None:
    """Entry point of `python -m moe_mk`."""
    if not has_launcher():  # its ranks may block in native code, where Python handlers do not run
        end_in_order()
    sys.exit(code_of(_in_folder))


def _in_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError as problem:  # in a folder that was removed, MKL ends the process in the middle of a verb
        raise ConfigError("the working folder was removed; change to one that exists") from problem
    app()  # printing help, a version or a usage error can fail as well
