"""The verbs of `moe-mk trace`: check, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_mk.lab.cli.exits import with_exit_code
from moe_mk.lab.cli.options import LARGEST, AsJson

trace_verbs = typer.Typer(
    help="Check routing records of rollouts, and measure what replaying them changes.",
    epilog="Example: moe-mk trace check rollout.json --checkpoint DeepSeek-V3",
    no_args_is_help=True,
)


@trace_verbs.callback()
def _routing_records() -> None:
    """Check routing records of rollouts, and measure what replaying them changes."""


@trace_verbs.command("check", epilog="Example: moe-mk trace check rollout.json --checkpoint DeepSeek-V3")
@with_exit_code
def check_command(
    record: Annotated[
        Path,
        typer.Argument(help="routed experts of vLLM, SGLang, Megatron, slime or veRL: .json, .jsonl, .pt, .npz, ..."),
    ],
    checkpoint: Annotated[Path | None, typer.Option(help="the model's checkpoint, a folder")] = None,
    other: Annotated[
        Path | None, typer.Option("--record", help="a record of the same tokens, such as one of the trainer")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help=".safetensors with layers.N.hidden_states or layers.N.router_logits of the same tokens"),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="layers of a record of bare numbers, without a checkpoint")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="experts per token of a record of bare numbers")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Find and name what is wrong with a routing record: by the gates, by another record, or by statistics."""
    from moe_mk.lab.cli.records import CheckOrder, check
    from moe_mk.lab.cli.screen import Screen

    return check(Screen(), CheckOrder(record, checkpoint, other, inputs, layers, top_k), as_json=as_json)


@trace_verbs.command("replay", epilog="Example: moe-mk trace replay build/tiny-ds3")
@with_exit_code
def replay_command(
    checkpoint: Annotated[Path, typer.Argument(help="an FP8 checkpoint of a small DeepSeek-V3, see 07_train_tiny.py")],
    sequences: Annotated[int, typer.Option(min=1, max=LARGEST, help="sequences that are generated")] = 8,
    tokens: Annotated[int, typer.Option(min=2, max=LARGEST, help="tokens of each sequence")] = 128,
    seed: Annotated[int, typer.Option(help="seed of the tokens")] = 0,
    as_json: AsJson = False,
) -> int:
    """Measure KL between rollout and trainer in other number formats, with and without replayed experts."""
    from moe_mk.lab.cli.replay import ReplayOrder, replay
    from moe_mk.lab.cli.screen import Screen

    return replay(Screen(), ReplayOrder(checkpoint, sequences, tokens, seed), as_json=as_json)
