"""The verbs of checkpoints: make-checkpoint, convert, derive, inspect-checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moe_mk.lab.cli.exits import with_exit_code
from moe_mk.lab.cli.options import AsJson, Settings, settings_of
from moe_mk.lab.cli.words import FORMATS, TARGETS

checkpoint_verbs = typer.Typer()


@checkpoint_verbs.command("make-checkpoint")
@with_exit_code
def make_checkpoint(
    directory: Annotated[Path, typer.Argument(help="folder to write")],
    experts: Annotated[
        int, typer.Option("--num-experts", "--experts", help="routed experts; 256 is the full layer, 11.3 GB")
    ] = 32,
    layer: Annotated[int, typer.Option(help="number of the MoE layer")] = 3,
    hidden: Annotated[int, typer.Option(help="hidden size")] = 7168,
    intermediate: Annotated[int, typer.Option(help="intermediate size of an expert")] = 2048,
    quant: Annotated[str, typer.Option(help=f"format of the experts: {FORMATS}")] = "fp8",
    ue8m0: Annotated[bool, typer.Option("--ue8m0", help="power-of-two scales")] = False,
    hash_vocabulary: Annotated[
        int | None,
        typer.Option(min=1, help="write a DeepSeek-V4 hash layer, which routes by token id; rows of its table"),
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="config.json of a model: write a small layer in its names and formats")
    ] = None,
    seed: Annotated[int, typer.Option(help="equal seeds give equal bytes")] = 0,
    force: Annotated[bool, typer.Option("--force", help="overwrite a complete checkpoint")] = False,
) -> int:
    """Write one MoE layer of DeepSeek-V3, a hash layer of DeepSeek-V4, or one as in another model's config.json."""
    from moe_mk.lab.checkpoints.checkpoint_shape import HASHED, CheckpointShape, groups_of
    from moe_mk.lab.cli.checkpoints import make
    from moe_mk.lab.cli.screen import Screen

    if like is not None:
        from moe_mk.lab.checkpoints.like import write_like

        layer = write_like(directory, like, seed=seed)
        Screen().fact("wrote", f"layer {layer} as in {like}; verify it: moe-mk run {directory} --layer {layer}")
        return 0
    hashed = {**HASHED, "hash_vocabulary": hash_vocabulary}
    routing = groups_of(experts) if hash_vocabulary is None else hashed
    shape = CheckpointShape(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=(layer,),
        quant=quant,
        power_of_two_scales=ue8m0,
        **routing,
    )
    return make(Screen(), directory, shape, seed=seed, force=force)


@checkpoint_verbs.command("convert")
@with_exit_code
def convert_command(
    source: Annotated[Path, typer.Argument(help="checkpoint folder to read")],
    target: Annotated[Path, typer.Argument(help="folder to write: without --store it must be empty or not exist")],
    to: Annotated[str | None, typer.Option(help=f"target format of the experts: {TARGETS}")] = None,
    store: Annotated[
        bool, typer.Option("--store", help="keep the format, and write the stores of experts larger than memory")
    ] = False,
    layer: Annotated[list[int] | None, typer.Option(help="of --store: which layer; repeatable; default all")] = None,
    ranks: Annotated[int, typer.Option(min=1, max=65536, help="of --store: expert-parallel size")] = 1,
    tp: Annotated[int, typer.Option(min=1, max=65536, help="of --store: tensor-parallel size")] = 1,
    settings: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Convert the experts of a checkpoint to another format, or write the stores of experts larger than memory."""
    from moe_mk.errors import ConfigError
    from moe_mk.lab.cli.convert import StoreOrder, convert, convert_to_stores
    from moe_mk.lab.cli.screen import Screen

    if store == (to is not None):
        raise ConfigError("convert takes either --to FORMAT or --store; moe-mk convert --help lists the formats")
    if store:
        order = StoreOrder(source, target, tuple(layer or ()), ranks, tp, settings_of(settings))
        return convert_to_stores(Screen(quiet=as_json), order, as_json=as_json)
    assert to is not None
    return convert(Screen(quiet=as_json), source, target, to, as_json=as_json)


@checkpoint_verbs.command("derive")
@with_exit_code
def derive_command(
    config: Annotated[Path, typer.Argument(help="config.json of a model, or its folder")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="file to write; default: layer_equation.json next to it")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="only this layer; default: all with experts")] = None,
    family: Annotated[
        str | None, typer.Option("--as", help="model_type with the same keys and layers; nothing is measured")
    ] = None,
) -> int:
    """Derive what the MoE layers of a model compute from its class in transformers, and write layer_equation.json.

    With --as, they are declared to be those of a family that is read without one.
    """
    from moe_mk.config.equation import FILE
    from moe_mk.errors import UnsupportedError
    from moe_mk.files import write_text
    from moe_mk.lab.cli.outputs import expect_outputs
    from moe_mk.lab.cli.screen import Screen
    from moe_mk.weights.checkpoint import ranges

    try:
        if family is not None:
            from moe_mk.lab.cli.checkpoints import declared
        else:
            from moe_mk.lab.checkpoints.derive import derive
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            "moe-mk derive reads model classes of transformers",
            [f"{missing.name} is not installed; pip install 'moe-mk[hf]'"],
        ) from None
    target = out or (config if config.is_dir() else config.parent) / FILE
    expect_outputs({"--out": target})
    found = derive(config, layer) if family is None else declared(config, family, layer)
    write_text(target, found.model_dump_json(indent=2, exclude_none=True) + "\n")
    screen = Screen()
    screen.fact("derived", f"{target}: {found.derived_from}")
    for group in found.groups or (found,):
        screen.fact("layers", ranges(group.layers) if group.layers else "all with experts")
        screen.fact("model", ", ".join(f"{key} {value}" for key, value in group.model.items()))
        screen.fact("router", ", ".join(f"{key} {value}" for key, value in group.router.items()))
    for layers, reason in found.refused.items():
        screen.fact("refused", f"layers {layers}: {reason}")
    return 0


@checkpoint_verbs.command("inspect", hidden=True)
@checkpoint_verbs.command("inspect-checkpoint")
@with_exit_code
def inspect_checkpoint_command(
    directory: Annotated[Path, typer.Argument(help="checkpoint folder or file")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """List the contents of a checkpoint and its defects; reads headers only."""
    from moe_mk.lab.cli.checkpoints import config_problems, inspect
    from moe_mk.lab.cli.screen import Screen
    from moe_mk.weights.inspect import inspect_checkpoint

    facts = inspect_checkpoint(directory)
    facts = replace(facts, problems=(*facts.problems, *config_problems(directory, facts)))
    return inspect(Screen(), facts, as_json=as_json)
