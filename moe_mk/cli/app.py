"""The verbs of `moe-mk`. Each is a thin door: it reads options, calls the library, and speaks.

A verb imports what it needs when it is called. Help, completion and mistakes in a command so answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_mk.cli.checkpoint_verbs import checkpoint_verbs
from moe_mk.cli.exits import speaking
from moe_mk.cli.predictions import predictions
from moe_mk.cli.workbench import workbench

app = typer.Typer(
    name="moe-mk",
    help="Expert-parallel MoE layers: chosen, explained, verified.",
    no_args_is_help=True,
    add_completion=True,
)
app.add_typer(checkpoint_verbs)
app.add_typer(workbench)
app.add_typer(predictions, name="plan")

Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N")]
PrepareFinalize = Annotated[str, typer.Option("--prepare-finalize", help="pin the transport")]
Experts = Annotated[str, typer.Option("--experts-backend", help="pin the experts")]
AllowEmulated = Annotated[bool, typer.Option("--allow-emulated", help="let emulated libraries be chosen")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def _tell_version(asked: bool) -> None:
    if asked:
        from moe_mk.cli.version import own_version

        typer.echo(f"moe-mk {own_version()}")
        raise typer.Exit


@app.callback()
def _every_verb(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    """What stands before a verb; `app` says what the command is for."""


@app.command()
@speaking
def run(
    checkpoint: Annotated[
        Path, typer.Argument(help="a checkpoint folder in the official layout, with its config.json")
    ],
    layer: Annotated[int, typer.Option(help="which layer")] = 3,
    ranks: Annotated[int | None, typer.Option(min=1, help="processes to start; torchrun's, or 1, if not given")] = None,
    tp: Annotated[int, typer.Option(min=1, help="ranks that share the slices of an expert")] = 1,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="plan as if so many ranks shared a node")] = None,
    tokens: Annotated[str | None, typer.Option(help="tokens of each EP rank: 64, or 0,0,7,1; 64 if not given")] = None,
    hidden_states: Annotated[
        Path | None, typer.Option(help="rows from a .safetensors or .npy file, shared out")
    ] = None,
    token_ids: Annotated[
        Path | None, typer.Option(help="their ids, for layers that choose experts by them; drawn if not given")
    ] = None,
    replicated: Annotated[bool, typer.Option("--replicated", help="all ranks bring the same tokens")] = False,
    prepare_finalize: PrepareFinalize = "auto",
    experts_backend: Experts = "auto",
    allow_emulated: AllowEmulated = False,
    wire: Annotated[str, typer.Option(help="auto, plain, fp8 or checkpoint: what tokens travel in")] = "auto",
    activations: Annotated[str, typer.Option(help="auto, checkpoint or plain: what experts multiply")] = "auto",
    router_dtype: Annotated[str, typer.Option(help="float32 or model")] = "float32",
    placement: Annotated[str, typer.Option(help="linear or round_robin")] = "linear",
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="of the random tokens")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="timed forwards")] = 3,
    timeout: Annotated[float, typer.Option(help="seconds a peer may be late")] = 120.0,
    network: Annotated[str, typer.Option(help="where one_sided_network meets: 10.0.0.0/24")] = "127.0.0.0/8",
    inject: Annotated[str | None, typer.Option(help="a fault that verification must find")] = None,
    verify: Annotated[bool, typer.Option(help="check against the reference")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(help="write the expert load as a picture")] = None,
    trace: Annotated[Path | None, typer.Option(help="write one prefill of all ranks as a Chrome trace")] = None,
    record_trace: Annotated[Path | None, typer.Option(help="write what was routed, for place --trace")] = None,
) -> int:
    """Run one MoE layer of a checkpoint over N ranks: planned, explained, timed and verified."""
    from moe_mk.cli.inputs import RunSettings, dtype_of, expect_checkpoint, tokens_of
    from moe_mk.cli.plan import plan_run
    from moe_mk.cli.processes import run_ranks
    from moe_mk.cli.run import run_rank
    from moe_mk.cli.screen import Screen
    from moe_mk.cli.show import show_plan
    from moe_mk.cli.world import world_of
    from moe_mk.config.moe import MoEConfig
    from moe_mk.external.device import collective_backend

    dtype_of(dtype)
    expect_checkpoint(checkpoint)
    world = world_of(ranks, tp)
    config = MoEConfig.from_hf(
        checkpoint,
        prepare_finalize=prepare_finalize,
        experts=experts_backend,
        allow_emulated=allow_emulated,
        wire=wire,
        activations=activations,
        router_dtype=router_dtype,
        placement=placement,
        tokens="replicated" if replicated else "sharded",
        timeout_s=timeout,
        network=network,
    )
    settings = RunSettings(
        checkpoint=checkpoint,
        layer=layer,
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
        json=json_file,
        plot=plot,
        trace=trace,
        record_trace=record_trace,
        threads=world.threads,
        ranks_per_node=ranks_per_node,
    )
    plan = plan_run(settings, world)
    show_plan(Screen(quiet=not world.speaks), plan)
    return run_ranks(run_rank, plan, world, collective_backend(device, world.local_size), timeout)


@app.command()
@speaking
def explain(
    config: Annotated[str, typer.Argument(help="a shipped model by name, our YAML or JSON, or a config.json")],
    device: Annotated[str, typer.Option(help="a shipped device profile by name, or a file of one")] = "cpu",
    ranks: Annotated[int, typer.Option(min=1, help="ranks that share out the experts")] = 1,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes they lie on; default by the device profile")] = None,
    tp: Annotated[int, typer.Option(min=1, help="ranks that share the slices of an expert")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="tokens a rank")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    graphs: Annotated[bool, typer.Option("--graphs", help="calls must be capturable in a CUDA graph")] = False,
    replicated: Annotated[bool, typer.Option("--replicated", help="all ranks bring the same tokens")] = False,
    comm_units: Annotated[int | None, typer.Option(min=1, help="SMs or threads that a transport may keep")] = None,
    installed: Annotated[str | None, typer.Option(help="libraries to assume, by comma; default those here")] = None,
    prepare_finalize: PrepareFinalize = "auto",
    experts_backend: Experts = "auto",
    allow_emulated: AllowEmulated = False,
    as_json: AsJson = False,
) -> int:
    """Explain which transport and experts would serve, and why not the others, on any device, here or not."""
    from moe_mk.cli.explain import Question, explain_config
    from moe_mk.cli.screen import Screen

    overrides = {
        "ep": ranks,
        "tp": tp,
        "graphs": graphs,
        "tokens": "replicated" if replicated else "sharded",
        "prepare_finalize": prepare_finalize,
        "experts": experts_backend,
        "allow_emulated": allow_emulated,
    }
    overrides |= {} if comm_units is None else {"comm_units": comm_units}
    question = Question(config, device, tokens, nodes, dtype, installed, overrides)
    return explain_config(Screen(), question, as_json=as_json)


@app.command("place")
@speaking
def place_command(
    loads: Annotated[
        Path | None,
        typer.Option(
            help="counts of experts, layers x experts, or windows x layers x experts: .json, .npy, .safetensors or .pt"
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="a routing trace in place of counts; tells what crosses nodes")
    ] = None,
    phase: Annotated[str | None, typer.Option(help="of the trace: prefill or decode; both if not given")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="routed experts, if the trace does not say")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs that share out the experts")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes they stand in")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="physical experts a GPU; default evens any load")] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="expert groups that routing keeps together; 1, or as the trace says")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="auto, compat, flat, hybrid, one of another wheel, or all to compare them")
    ] = "all",
    speeds: Annotated[str | None, typer.Option(help="relative speeds of GPUs: 1,1,0.5,0.5 or 1*16,0.5*16")] = None,
    preset: Annotated[str | None, typer.Option(help="DeepSeek-V3's prefill-ep32 or decode-ep144")] = None,
    min_copies: Annotated[int, typer.Option(min=1, help="2 survives the loss of any one GPU")] = 1,
    expert_bytes: Annotated[int | None, typer.Option(min=0, help="of one expert, to tell memory and traffic")] = None,
    plot: Annotated[Path | None, typer.Option(help="write GPU loads before and after as a picture")] = None,
    as_json: AsJson = False,
) -> int:
    """Say where experts should lie for a recorded load: balance, moves and memory, policy beside policy."""
    from moe_mk.cli.place import PlaceOrder, place
    from moe_mk.cli.screen import Screen

    order = PlaceOrder(
        loads, gpus, nodes, slots, groups, policy, speeds, preset, min_copies, expert_bytes, plot, trace, phase, experts
    )
    return place(Screen(), order, as_json=as_json)


@app.command()
@speaking
def doctor(as_json: AsJson = False) -> int:
    """Say what is installed, what works here, and why the rest does not."""
    from moe_mk.cli.doctor import examine
    from moe_mk.cli.screen import Screen

    return examine(Screen(), as_json=as_json)


@app.command()
@speaking
def schema() -> int:
    """Print the JSON schema of a configuration file."""
    import json

    from moe_mk.config.moe import MoEConfig

    typer.echo(json.dumps(MoEConfig.model_json_schema(), indent=2))
    return 0


def main() -> None:
    """Entry point of `python -m moe_mk.cli`."""
    app()
