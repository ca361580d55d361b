"""The verbs of checkpoints: make-checkpoint, convert, inspect-checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moe_mk.lab.cli.exits import with_exit_code
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
    from moe_mk.lab.cli.checkpoints import WriteOrder, make
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
    return make(Screen(), WriteOrder(directory, shape, seed, force))


@checkpoint_verbs.command("convert")
@with_exit_code
def convert_command(
    source: Annotated[Path, typer.Argument(help="checkpoint folder to read")],
    target: Annotated[Path, typer.Argument(help="folder to write; must be empty or not exist")],
    to: Annotated[str, typer.Option(help=f"target format of the experts: {TARGETS}")],
) -> int:
    """Convert the experts of a checkpoint to another format, one at a time, and report the error of each."""
    from moe_mk.lab.cli.convert import ConvertOrder, convert
    from moe_mk.lab.cli.screen import Screen

    return convert(Screen(), ConvertOrder(source, target, to))


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
